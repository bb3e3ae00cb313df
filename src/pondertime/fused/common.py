"""What every fused path computes with: the shapes of a cell, its inputs and its results, E networks first."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn


class CellKind(NamedTuple):
    """The numbers of a cell, in units of H."""

    name: str
    x_width: int  # of W_x x_t
    slots: int  # activations kept of an update
    gates: int  # rows of W_h
    leaves: int  # tensors of the state


RNN_TANH = CellKind("rnn_tanh", 1, 1, 1, 1)
RNN_RELU = CellKind("rnn_relu", 1, 1, 1, 1)
LSTM = CellKind("lstm", 4, 4, 4, 2)
GRU = CellKind("gru", 3, 4, 3, 1)
KINDS = (RNN_TANH, RNN_RELU, LSTM, GRU)


def kind_of(cell: nn.Module) -> CellKind:
    """The kind of one of torch.nn's cells."""
    if isinstance(cell, nn.RNNCell):
        return RNN_TANH if cell.nonlinearity == "tanh" else RNN_RELU
    return LSTM if isinstance(cell, nn.LSTMCell) else GRU


@dataclass(frozen=True)
class Rules:
    """How the networks of a call halt."""

    kind: CellKind
    epsilon: float
    max_steps: int
    force_steps: int | None
    lengths: Tensor | None  # [E, B] int64, None: all of length T


class Inputs(NamedTuple):
    """The tensors of a call, E networks first."""

    xw: Tensor  # [E, T, B, X] W_x x_t + b
    flag: Tensor  # [E, X] the flag's column of W_x
    weight: Tensor  # [E, P, H] W_h
    bias_n: Tensor | None  # [E, H] the bias of a GRU's U_n h
    halt: Tensor  # [E, H]
    halt_bias: Tensor  # [E]
    h: Tensor  # [E, B, H]
    c: Tensor | None  # [E, B, H]


def each(function: Callable[[Tensor], Tensor], tensors: Iterable[Tensor | None]) -> Inputs:
    """A function of every tensor that is there."""
    made: Any = (None if a is None else function(a) for a in tensors)
    return Inputs(*made)


class Outputs(NamedTuple):
    """The results of a call."""

    mean: Tensor  # [E, T, B, H] mean of the visible state
    h: Tensor  # [E, B, H]
    c: Tensor | None
    steps: Tensor  # [E, T, B]
    remainder: Tensor  # [E, T, B]


class Update(NamedTuple):
    """One update of a trace: which row at which input step, and what came of it."""

    t: int
    n: int
    rows: Tensor
    prob: Tensor
    p: Tensor
    visible: Tensor


class NotANumber(RuntimeError):
    """The cell gave NaN."""


def nan_error(t: int, n: int) -> NotANumber:
    return NotANumber(f"expected numbers from the cell, got NaN at input step {t}, update {n}")
