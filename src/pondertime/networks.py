"""The network of a config."""

import torch
from torch import nn

from pondertime.act import ACT
from pondertime.config import TrainConfig
from pondertime.tasks import Task

CELLS: dict[str, type[nn.Module]] = {"rnn": nn.RNNCell, "lstm": nn.LSTMCell, "gru": nn.GRUCell}


def build(config: TrainConfig, task: Task, *, backend: str = "auto") -> ACT:
    """The network of a config with fresh weights, drawn from its seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        cell = CELLS[task.cell](task.input_size + 1, config.hidden_size)
        network = ACT(
            cell,
            task.output_size,
            epsilon=config.epsilon,
            max_steps=config.max_steps,
            halt_bias=config.halt_bias,
            force_steps=config.force_steps,
            backend=backend,
        )
        if config.init_std is not None:
            draw_weights(network, config.init_std)
        return network


def draw_weights(network: ACT, std: float) -> None:
    """Draw every weight and bias anew from a normal distribution, but for the halting unit's bias.

    A cell of torch.nn has two biases where the paper's has one: the second is 0.
    """
    for name, p in network.named_parameters():
        if name == "cell.bias_hh":
            nn.init.zeros_(p)
        elif name != "halt.bias":
            nn.init.normal_(p, std=std)
