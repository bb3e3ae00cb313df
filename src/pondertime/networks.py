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
        return ACT(
            cell,
            task.output_size,
            epsilon=config.epsilon,
            max_steps=config.max_steps,
            halt_bias=config.halt_bias,
            force_steps=config.force_steps,
            backend=backend,
        )
