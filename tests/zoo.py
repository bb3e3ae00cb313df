"""Cells and small networks that the tests share, and one loss that looks at everything they return."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import pondertime as pt

KINDS = ["rnn_tanh", "rnn_relu", "gru", "lstm", "memory"]
SLOTS, WIDTH = 3, 2


class MemoryCell(nn.Module):
    """A cell with a memory matrix and its usage in a nested state; the maths is that of ``oracle.memory``."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.key = nn.Linear(hidden_size, WIDTH)
        self.mix = nn.Linear(input_size + WIDTH + hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, WIDTH)

    def forward(self, x: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        hidden, (slots, used) = state["hidden"], state["memory"]
        weight = torch.softmax(torch.einsum("bsw,bw->bs", slots, self.key(hidden)) - used, 1)
        read = torch.einsum("bs,bsw->bw", weight, slots)
        hidden = torch.tanh(self.mix(torch.cat([x, read, hidden], 1)))
        value = torch.tanh(self.value(hidden))
        slots = (1 - weight).unsqueeze(2) * slots + torch.einsum("bs,bw->bsw", weight, value)
        return {"hidden": hidden, "memory": (slots, used / 2 + weight)}


class BatchNormCell(nn.Module):
    """A cell that mixes the rows of a batch."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size = input_size
        self.cell = nn.RNNCell(input_size, hidden_size)
        self.norm = nn.BatchNorm1d(hidden_size)

    def forward(self, x: Tensor, state: Tensor | None) -> Tensor:
        return self.norm(self.cell(x, state))


def random_state(kind: str, B: int, H: int) -> Any:
    """A float64 state of the named cell."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(B, *shape, dtype=torch.float64)

    if kind == "lstm":
        return draw(H), draw(H)
    if kind == "memory":
        return {"hidden": draw(H), "memory": (draw(SLOTS, WIDTH), draw(SLOTS))}
    return draw(H)


def make_cell(kind: str, inputs: int, hidden: int) -> nn.Module:
    """A cell for so many features and the flag."""
    if kind.startswith("rnn"):
        return nn.RNNCell(inputs + 1, hidden, nonlinearity=kind.removeprefix("rnn_"))
    return {"gru": nn.GRUCell, "lstm": nn.LSTMCell, "memory": MemoryCell}[kind](inputs + 1, hidden)


def initial_memory(cell: MemoryCell, B: int) -> dict[str, Any]:
    zeros = cell.key.weight.new_zeros
    return {"hidden": zeros(B, cell.hidden_size), "memory": (zeros(B, SLOTS, WIDTH), zeros(B, SLOTS))}


SPEC = pt.CellSpec(visible=lambda state: state["hidden"], initial_state=initial_memory)


def make(kind: str, inputs: int = 3, hidden: int = 4, outputs: int | None = 2, **options: Any) -> Any:
    """A float64 network with halting units that differ much from row to row, so that N does."""
    spec = SPEC if kind == "memory" else None
    options = {"dtype": torch.float64, "halt_bias": -1.0, **options}
    net = pt.ACT(make_cell(kind, inputs, hidden), outputs, spec=spec, **options)
    with torch.no_grad():
        net.halt.weight.mul_(2)
    return net


def weighted(tree: Any, seed: int = 0) -> Tensor:
    """A loss: the sum of all floating tensors in a tree, each number with a random weight of its own."""
    generator = np.random.default_rng(seed)  # not torch's, which vmap refuses
    total = torch.zeros((), dtype=torch.float64)
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            total = total + (leaf * torch.from_numpy(generator.standard_normal(leaf.shape))).sum()
    return total


def gradients(net: nn.Module, tree: Any) -> list[Tensor]:
    """The gradients of ``weighted`` of a network's results by all its parameters."""
    return list(torch.autograd.grad(weighted(tree), list(net.parameters())))


def differentiate(net: pt.ACT, x: Tensor, state: Any = None, lengths: Any = None) -> tuple[Any, dict[str, Any]]:
    """What a network returns, and the gradients of ``weighted`` of it by all that it was made from."""
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    state = None if state is None else tree_map(lambda leaf: leaf.detach().clone().requires_grad_(), state)
    result = net(x, state, lengths)
    states: list[Tensor] = [] if state is None else tree_leaves(state)
    sources = {"x": x} if x.requires_grad else {}
    sources |= {f"state{i}": leaf for i, leaf in enumerate(states)} | dict(net.named_parameters())
    grads = torch.autograd.grad(weighted(result), list(sources.values()))
    return result, dict(zip(sources, grads, strict=True))
