"""The fused path on a GPU: memory, launches, and what is left to library products.

``LoopRun`` has one launch forward and one backward, where a program's weights fit its multiprocessor; ``TickRun``
serves the rest. Both are a ``Run``. The tensors of a call have an axis E only where the rules say stacked.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pondertime.fused.common import (
    GRU,
    KINDS,
    LSTM,
    Grads,
    Inputs,
    Outputs,
    Rules,
    by_look_up,
    by_read_out,
    look_up,
    read_out,
)
from pondertime.fused.triton_tape import EXTRA

# Updates that calls of a shape needed last time.
_updates: dict[tuple[Any, ...], int] = {}
# Kernels by what they were built for, and their constants.
_built: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
# A tape of no more bytes than this has room for the largest number of updates.
SMALL_TAPE = 2**27
EXTRAS = EXTRA.value


class Run:
    """A forward pass, and what its backward pass needs."""

    tape: Tensor
    mean: Tensor
    steps: Tensor | None

    def __init__(self, inputs: Inputs, rules: Rules, *, keep: bool, key: tuple[Any, ...]) -> None:
        self.inputs, self.rules, self.keep = inputs, rules, keep
        self.B, self.H = inputs.h.shape[-2:]
        self.E, self.T = (inputs.x.shape[0], inputs.x.shape[1]) if rules.stacked else (1, inputs.x.shape[0])
        self.device, self.kind = inputs.h.device, rules.kind
        self.limit = min(rules.force_steps or rules.max_steps, 2**31 - 1)
        self.X, self.S, self.P = (k * self.H for k in (self.kind.x_width, self.kind.slots, self.kind.gates))
        self.key = (self.E, self.B, self.H, self.kind.name, rules.force_steps is None, self.device, *key)
        self.lengths = None if rules.lengths is None else rules.lengths.to(self.device).contiguous()
        self.capacity = 0

    def fronted(self) -> Inputs:
        """The read-out with an axis E in front."""
        i = self.inputs
        if self.rules.stacked or i.weight_y is None:
            return i
        return i._replace(weight_y=i.weight_y.unsqueeze(0), bias_y=None if i.bias_y is None else i.bias_y.unsqueeze(0))

    def read(self, out: Outputs) -> Outputs:
        """The results with the read-out in place of the mean state, which is kept for the way back."""
        if self.inputs.weight_y is None:
            return out
        shape = (self.E, self.T, self.B)
        self.mean = out.y.view(*shape, self.H)
        self.steps = None if self.lengths is None else out.steps.view(shape).clone()
        y = read_out(self.fronted(), self.mean, self.steps)
        return out._replace(y=y.view(*out.y.shape[:-1], -1).clone() if self.keep else y.view(*out.y.shape[:-1], -1))

    def backward(self, d: Grads, *, x: bool) -> Inputs:
        """Derivatives by every input, by x only where it is asked for. The tape is used up."""
        i, d_mean, d_weight, d_bias = self.inputs, d.y, None, None
        if i.weight_y is not None and d.y is None:
            d_weight, d_bias = torch.zeros_like(i.weight_y), None if i.bias_y is None else torch.zeros_like(i.bias_y)
        elif i.weight_y is not None and d.y is not None:
            d_y = d.y.reshape(self.E, self.T, self.B, -1)
            d_mean, d_weight, d_bias = by_read_out(self.fronted(), d_y, self.mean, self.steps)
            d_weight = d_weight if self.rules.stacked or d_weight is None else d_weight[0]
            d_bias = d_bias if self.rules.stacked or d_bias is None else d_bias[0]
        made: Any = [*self.gradients((d_mean, d.h, d.c, None, d.remainder), x=x), d_weight, d_bias]
        return Inputs(*made)

    def gradients(self, grads: tuple[Tensor | None, ...], *, x: bool) -> list[Tensor | None]:
        """Derivatives by every input but the read-out's, from those by the mean state, h, c, (nothing) and R."""
        raise NotImplementedError

    def new(self, *shape: int, zero: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
        return (torch.zeros if zero else torch.empty)(*shape, device=self.device, dtype=dtype)

    def guess(self, rows: int) -> int:
        """Updates that a tape of so many rows an update has room for."""
        most = self.T * self.limit
        each = 4 * self.E * rows * self.H * (self.kind.slots + self.kind.leaves)
        if self.rules.force_steps is not None or most * each <= SMALL_TAPE:
            return most
        return min(most, int(1.1 * self.remembered(8 * self.T)) + 2)

    def remembered(self, otherwise: int) -> int:
        """Updates that such a call needed last time."""
        return _updates.get((self.T, self.limit, *self.key), otherwise)

    def remember(self, updates: int) -> None:
        _updates[(self.T, self.limit, *self.key)] = updates

    def starter(
        self, kernel: Any, grid: tuple[int, ...], meta: dict[str, Any], users: tuple[Tensor | None, ...], *args: Any,
        strides: tuple[int, ...] = (), **options: Any,
    ) -> Callable[..., None]:  # fmt: skip
        """What starts a kernel with these arguments after the given ones.

        One that was built before for the same numbers is started without Triton's look at every argument. What it was
        built for includes how the users' tensors are aligned.
        """
        aligned = tuple(a is None or a.data_ptr() % 16 == 0 for a in users)
        key = (kernel, aligned, strides, *self.key, *meta.values())

        def start(*front: Any) -> None:
            if key in _built:
                built, constants = _built[key]
                built[grid](*front, *args, *constants)
                return
            built = kernel[grid](*front, *args, **meta, **options)
            if built is not None:  # the interpreter builds nothing
                _built[key] = built, tuple(meta.values())

        return start

    def meta(self, **options: Any) -> dict[str, Any]:
        """What all kernels are made for, in the order of their parameters."""
        kind = self.kind
        made = {"CELL": KINDS.index(kind), "GATES": kind.gates, "SLOTS": kind.slots}
        return made | options | {"FORCED": self.rules.force_steps is not None}

    def project(self) -> Tensor:
        """W_x x_t for all t, without biases."""
        i = self.inputs
        if not i.x.is_floating_point():
            return look_up(i)
        weight = i.weight_ih[..., :-1]
        if not self.rules.stacked:
            return torch.mm(i.x.reshape(self.T * self.B, -1), weight.t())
        return torch.bmm(i.x.reshape(self.E, self.T * self.B, -1), weight.transpose(1, 2))

    def outputs(self) -> Outputs:
        """Memory for the results; zeros at padding."""
        front, zero = (self.E,) if self.rules.stacked else (), self.lengths is not None
        T, B, H = self.T, self.B, self.H
        return Outputs(
            self.new(*front, T, B, H, zero=zero),
            self.new(*front, B, H),
            self.new(*front, B, H) if self.kind is LSTM else None,
            self.new(*front, T, B, dtype=torch.int64, zero=zero),
            self.new(*front, T, B, zero=zero),
        )

    def users(self) -> tuple[Any, ...]:
        """The flag's column and the other tensors of the caller that a forward pass reads."""
        i = self.inputs
        given = (i.weight_hh, i.bias_ih, i.bias_hh, i.halt, i.halt_bias, self.lengths, i.h, i.c)
        return i.weight_ih[..., -1], *(a if a is None or a.is_contiguous() else a.contiguous() for a in given)

    def new_tape(self, rows: int) -> Tensor:
        widths = self.H + self.S + (self.kind.leaves - 1) * self.H + 2 * EXTRAS + 2
        return self.new(self.E * rows * widths)

    def parts(self, rows: int) -> list[Tensor]:
        """prev, gates, c^{n-1}, h^n and p^n of a tape of so many rows, ``[E, rows, width]``."""
        made, at = [], 0
        for width in (self.H + EXTRAS, self.S + EXTRAS, (self.kind.leaves - 1) * self.H, 1, 1):
            made.append(self.tape.as_strided((self.E, rows, width), (rows * width, width, 1), at))
            at += self.E * rows * width
        return made

    def visible(self, rows: int) -> Tensor:
        """s^n of the first network's rows of the tape, before they are used up."""
        prev, gates, prev_c = (a[0] for a in self.parts(rows)[:3])
        a = [gates[:, k * self.H : (k + 1) * self.H] for k in range(self.kind.slots)]
        if self.kind is LSTM:
            return a[3] * torch.tanh(a[1] * prev_c + a[0] * a[2])
        return a[3] + a[1] * (prev[:, : self.H] - a[3]) if self.kind is GRU else a[0]

    def given(self, grads: tuple[Tensor | None, ...]) -> tuple[tuple[Any, ...], bool]:
        """The caller's derivatives by mean, h, c and remainder, the strides of the last, and whether h, c have any."""
        i, shape = self.inputs, (self.E, self.T, self.B)
        d_mean, d_h, d_c, _, d_remainder = grads
        d_mean = self.new(*shape, self.H, zero=True) if d_mean is None else d_mean.contiguous()
        if d_remainder is None:
            d_remainder = self.new(*shape, zero=True)
        elif self.E > 1:
            d_remainder = d_remainder.contiguous()
        last = d_h is not None or d_c is not None
        if last:
            d_h = torch.zeros_like(i.h) if d_h is None else d_h.contiguous()
            if i.c is not None:
                d_c = torch.zeros_like(i.c) if d_c is None else d_c.contiguous()
        return (d_mean, d_h, d_c, d_remainder, *d_remainder.stride()[-2:]), last

    def by_tape(
        self, rows: int, used: int, d_xw: Tensor, d_h: Tensor, d_c: Tensor | None, *, x: bool
    ) -> list[Tensor | None]:
        """Derivatives by all inputs, from the derivatives on the tape and those by W_x x_t and by the first state.

        One product over the tape gives those by W_h, w, b (twice: each bias has its own), b_h and the flag's column.
        """
        i, E, H, S, P = self.inputs, self.E, self.H, self.S, self.P
        tall, wide = H + EXTRAS, S + EXTRAS
        prev = self.tape.as_strided((E, used, H + 3), (rows * tall, tall, 1), 0)
        gates = self.tape.as_strided((E, S + 1, used), (rows * wide, 1, wide), E * rows * tall)
        made = torch.mm(gates[0], prev[0]) if E == 1 else torch.bmm(gates, prev)
        front = (E,) if self.rules.stacked else ()

        def part(shape: tuple[int, ...], strides: tuple[int, ...], at: int) -> Tensor:
            return made.as_strided((*front, *shape), ((S + 1) * (H + 3),)[: len(front)] + strides, at)

        flag, bias = part((S,), (H + 3,), H + 1), part((S,), (H + 3,), H)
        if self.kind is GRU:
            flag, bias = (torch.cat([a[..., : 2 * H], a[..., 3 * H :]], -1) for a in (flag, bias))
        d_weight, d_x = self.by_input(d_xw, flag, x=x)
        end = S * (H + 3)
        biased = i.bias_ih is not None
        return [
            d_x, d_weight, part((P, H), (H + 3, 1), 0), bias if biased else None,
            part((P,), (H + 3,), H + 2) if biased else None, part((1, H), (H + 3, 1), end), part((1,), (1,), end + H),
            d_h, d_c,
        ]  # fmt: skip

    def by_input(self, d_xw: Tensor, flag: Tensor, *, x: bool) -> tuple[Tensor, Tensor | None]:
        """Derivatives by W_x and the flag's column, and by x."""
        i, E, X, d_x = self.inputs, self.E, self.X, None
        size = i.weight_ih.shape[-1]
        d_weight = self.new(E, X, size)
        d_weight[:, :, -1] = flag
        if i.x.is_floating_point():
            rows = i.x.reshape(E, self.T * self.B, size - 1)
            if E == 1:
                torch.mm(d_xw[0].t(), rows[0], out=d_weight[0, :, :-1])
            else:
                d_weight[:, :, :-1] = torch.bmm(d_xw.transpose(1, 2), rows)
            if x:
                d_x = torch.bmm(d_xw, i.weight_ih.view(E, X, size)[:, :, :-1])
        else:
            by_look_up(i, d_xw, d_weight)
        return d_weight.view(i.weight_ih.shape), None if d_x is None else d_x.view(i.x.shape)


def make(inputs: Inputs, rules: Rules, *, keep: bool, seen: bool = False) -> Run:
    """Run forward in the way that serves these sizes."""
    from pondertime.fused.triton_loop_run import LoopRun, blocks_for
    from pondertime.fused.triton_tick_run import TickRun

    device = inputs.h.device
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        # Triton starts kernels on the current device.
        with torch.cuda.device(device):
            return make(inputs, rules, keep=keep, seen=seen)
    E, (B, H), kind = inputs.x.shape[0] if rules.stacked else 1, inputs.h.shape[-2:], rules.kind
    blocks = blocks_for(device, E, B, H, kind.gates)
    if blocks is None:
        return TickRun(inputs, rules, keep=keep, seen=seen)
    return LoopRun(inputs, rules, blocks, keep=keep, seen=seen)
