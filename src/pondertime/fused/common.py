"""What every fused path computes with: the shapes of a cell, its inputs and its results, E networks first."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pondertime.halting import NotANumber


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


class Rules(NamedTuple):
    """How the networks of a call halt."""

    kind: CellKind
    epsilon: float
    max_steps: int
    force_steps: int | None
    lengths: Tensor | None  # [E, B] int64, contiguous: read by their address; None: all of length T
    stacked: bool = False  # whether results have an axis E
    half: bool = False  # whether products are made in bfloat16
    fresh: bool = False  # whether the first state is zeros that nobody gave

    def front(self, E: int) -> tuple[int, ...]:
        """The axis before the others of a result."""
        return (E,) if self.stacked else ()


class Inputs(NamedTuple):
    """The tensors of a call, E networks first."""

    x: Tensor  # [E, T, B, I], or integers [E, T, B]
    weight_ih: Tensor  # [E, X, I + 1]: W_x, and the flag's column
    weight_hh: Tensor  # [E, P, H] W_h
    bias_ih: Tensor | None  # [E, X]
    bias_hh: Tensor | None  # [E, P]
    halt: Tensor  # [E, 1, H]
    halt_bias: Tensor  # [E, 1]
    h: Tensor  # [E, B, H]
    c: Tensor | None  # [E, B, H]
    weight_y: Tensor | None = None  # [E, O, H]; None: the mean state itself is read out
    bias_y: Tensor | None = None  # [E, O]


# The inputs but x, as a user knows them.
NAMES = (
    *(f"cell.{name}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")),
    *("halt.weight", "halt.bias", "state", "state", "output.weight", "output.bias"),
)


def check_inputs(i: Inputs, kind: CellKind) -> None:
    """Raise unless all tensors are alike and have the sizes that W_h says: they are read by their addresses."""
    *front, _, H = i.weight_hh.shape
    B, X, P, columns = i.h.shape[-2], kind.x_width * H, kind.gates * H, i.weight_ih.shape[-1]
    out = () if i.weight_y is None else i.weight_y.shape[-2:-1]
    sizes = (X, columns), (P, H), (X,), (P,), (1, H), (1,), (B, H), (B, H), (*out, H), out
    for name, a, size in zip(NAMES, i[1:], sizes, strict=True):
        if a is not None:
            check_like(name, a, (*front, *size), i.weight_hh.dtype, i.weight_hh.device)
    x = (*front, i.x.shape[len(front)], B, columns - 1)
    if i.x.is_floating_point():
        check_like("x", i.x, x, i.weight_hh.dtype, i.weight_hh.device)
    else:
        check_like("x", i.x, x[:-1], i.x.dtype, i.weight_hh.device)


def check_like(name: str, a: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if a.shape != shape or a.dtype != dtype or a.device != device:
        wanted, got = f"{list(shape)} {dtype} on {device}", f"{list(a.shape)} {a.dtype} on {a.device}"
        raise ValueError(f"{name}: expected {wanted} beside cell.weight_hh, got {got}")


def stream_of(device: torch.device) -> int:
    """The current stream, as Triton asks for it: quicker than a Stream."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def capturing(stream: int) -> bool:
    """Whether calls on the current stream, this one, are being recorded; none are on the default stream."""
    return stream != 0 and torch.cuda.is_current_stream_capturing()


def of_stream(kept: dict[int, Any], device: torch.device, make: Callable[[], Any]) -> Any:
    """Memory of the current stream: what is kept for it, or made now; a recording has its own."""
    stream = stream_of(device)
    if capturing(stream):
        return make()
    if stream not in kept:
        kept[stream] = make()
    return kept[stream]


def each(function: Callable[[Tensor], Tensor], tensors: Iterable[Tensor | None]) -> Inputs:
    """A function of every tensor that is there."""
    made: Any = (None if a is None else function(a) for a in tensors)
    return Inputs(*made)


class Outputs(NamedTuple):
    """The results of a call; of one network that is not stacked without the axis E."""

    y: Tensor  # [E, T, B, O]
    h: Tensor  # [E, B, H]
    c: Tensor | None
    steps: Tensor  # [E, T, B]
    remainder: Tensor  # [E, T, B]
    rho: Any = None  # [E, T, B]; None, and cost too: nobody has made them yet
    cost: Any = None  # [E, B]

    def whole(self) -> "Outputs":
        """With rho = N + R and its sum over a sequence."""
        if self.rho is not None:
            return self
        rho = self.steps + self.remainder
        return self._replace(rho=rho, cost=rho.sum(-2))


class Grads(NamedTuple):
    """Derivatives of the loss by the results; None: zeros."""

    y: Tensor | None
    h: Tensor | None = None
    c: Tensor | None = None
    remainder: Tensor | None = None

    @staticmethod
    def by_outputs(d_y: Any, d_h: Any, d_c: Any, d_remainder: Any, d_rho: Any, d_cost: Any, T: int) -> "Grads":
        """From those by all results: R is in rho and in the cost as well."""
        if d_cost is not None:
            d_cost = d_cost.unsqueeze(-2).expand(*d_cost.shape[:-1], T, d_cost.shape[-1])
        there = [a for a in (d_remainder, d_rho, d_cost) if a is not None]
        return Grads(d_y, d_h, d_c, sum(there[1:], there[0]) if there else None)

    def filled(self, i: Inputs, T: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """All of them as tensors; that by c where there is one."""
        *front, B, H = i.h.shape
        width = H if i.weight_y is None else i.weight_y.shape[-2]
        return (
            i.h.new_zeros(*front, T, B, width) if self.y is None else self.y,
            torch.zeros_like(i.h) if self.h is None else self.h,
            torch.zeros_like(i.h) if self.c is None and i.c is not None else self.c,
            i.h.new_zeros(*front, T, B) if self.remainder is None else self.remainder,
        )


class Update(NamedTuple):
    """One update of a trace: which row at which input step, and what came of it."""

    t: int
    n: int
    rows: Tensor
    prob: Tensor
    p: Tensor
    visible: Tensor


def look_up(i: Inputs) -> Tensor:
    """W_x x_t for integers: the columns of W_x they name, ``[E, T, B, X]``."""
    X, width = i.weight_ih.shape[-2:]
    table = i.weight_ih[..., :-1].transpose(-2, -1).reshape(-1, X)
    return torch.nn.functional.embedding(flat_places(i.x, width - 1, stacked=i.h.dim() == 3), table)


def by_look_up(i: Inputs, d_xw: Tensor, d_weight: Tensor) -> None:
    """Write the derivative by W_x, all but the flag's column, for integers."""
    X, width = i.weight_ih.shape[-2:]
    places = flat_places(i.x, width - 1, stacked=i.h.dim() == 3).reshape(-1, 1).expand(-1, X)
    columns = d_weight.new_zeros(d_weight.numel() // (X * width) * (width - 1), X)
    columns.scatter_add_(0, places, d_xw.reshape(-1, X))
    d_weight[..., :-1] = columns.view(*d_weight.shape[:-2], width - 1, X).transpose(-2, -1)


def flat_places(x: Tensor, features: int, *, stacked: bool) -> Tensor:
    """Integers as rows of one table of all networks' features."""
    if not stacked:
        return x.long()
    return x.long() + features * torch.arange(len(x), device=x.device).view(-1, 1, 1)


def padded(size: int) -> int:
    """The power of two that a side of a tile of a GPU's product is rounded up to."""
    return max(16, 1 << (size - 1).bit_length())


def nan_error(t: int, n: int, network: int = 0) -> NotANumber:
    error = NotANumber(f"expected numbers from the cell, got NaN at input step {t}, update {n}")
    error.network = network
    return error
