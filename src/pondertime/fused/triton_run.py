"""The fused path on a GPU: memory, launches, and what is left to library products.

``LoopRun`` has one launch forward and one backward, where a program's weights fit its multiprocessor; ``ClusterRun``
has one forward, where no way back is asked for; ``TickRun`` serves the rest. All are a ``Run``. The tensors of a call
have an axis E only where the rules say stacked.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pondertime.fused.common import GRU, LSTM, Grads, Inputs, Outputs, Rules, by_look_up, look_up
from pondertime.fused.triton_plan import Plan, plan_of
from pondertime.fused.triton_tape import EXTRA

# A tape of no more bytes than this has room for the largest number of updates.
SMALL_TAPE = 2**27
EXTRAS = EXTRA.value


# (first network, the one after the last, rows of the tape)
Used = Sequence[tuple[int, int, int]]


class Run:
    """A forward pass, and what its backward pass needs."""

    tape: Tensor
    mean: Tensor  # s_t in rows for the read-out; where it has columns more, the first of them holds ones
    present: Tensor | None = None  # whether there is an input, [E, T, B, 1]
    reads: bool = False  # whether the kernels make the read-out
    extra: int = EXTRAS  # numbers of a row of the tape's prev beside H
    inside: int = 0  # features of x that are among them
    aside: bool = False  # whether prev lies elsewhere
    roomy: int = 1  # how many times a small tape still is

    def __init__(self, inputs: Inputs, rules: Rules, plan: Plan, *, keep: bool) -> None:
        if not inputs.h.is_contiguous() or not (inputs.c is None or inputs.c.is_contiguous()):
            # Memory is made like them.
            inputs = inputs._replace(h=inputs.h.contiguous(), c=None if inputs.c is None else inputs.c.contiguous())
        self.inputs, self.rules, self.plan, self.keep = inputs, rules, plan, keep
        self.E, self.T, self.B, self.H, self.X, self.S = plan.E, plan.T, plan.B, plan.H, plan.X, plan.S
        self.device, self.lengths = plan.device, rules.lengths
        if self.lengths is not None:
            self.lengths = self.lengths.to(self.device).contiguous()
        self.capacity = 0

    def new(self, *shape: int, zero: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
        h = self.inputs.h  # of its kind, and sizes one by one: quicker than by name and as a tuple
        made = h.new_empty(*shape) if dtype is torch.float32 else h.new_empty(*shape, dtype=dtype)
        return made.zero_() if zero else made

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """The product of matrices, each network's own, in the precision of the call."""
        product: Any = torch.mm if a.dim() == 2 else torch.bmm
        if not self.plan.half:
            return product(a, b)
        a, b = shortened(a), shortened(b)
        return product(a, b, out_dtype=torch.float32) if a.is_cuda else product(a, b).float()

    def flat(self, a: Tensor, width: int) -> Tensor:
        """``[.., T, B, width]`` as rows, ``[.., T B, width]``."""
        return a.reshape(*self.plan.front, self.T * self.B, width)

    def read(self, out: Outputs) -> Outputs:
        """The results with the read-out in place of the mean state."""
        i, plan = self.inputs, self.plan
        assert i.weight_y is not None
        mean, weight, bias = self.mean[..., : self.H], i.weight_y.transpose(-2, -1), i.bias_y
        if plan.half and not plan.front:
            # As autocast does; of stacked networks in float32.
            mean, weight, bias = mean.bfloat16(), weight.bfloat16(), None if bias is None else bias.bfloat16()
        size = weight.shape[-1]
        # The caller's, wherever the run has its own memory from.
        y = Run.new(self, *plan.front, self.T, self.B, size, dtype=mean.dtype)
        to = y.view(*plan.front, self.T * self.B, size)
        if bias is None:
            (torch.mm if mean.dim() == 2 else torch.bmm)(mean, weight, out=to)
        elif mean.dim() == 2:
            torch.addmm(bias, mean, weight, out=to)
        else:
            torch.baddbmm(bias.unsqueeze(1), mean, weight, out=to)
        return out._replace(y=self.masked(y))

    def masked(self, a: Tensor) -> Tensor:
        """With zeros at padding."""
        if self.lengths is None:
            return a
        if self.present is None:
            steps = torch.arange(self.T, device=self.device).view(-1, 1, 1)
            self.present = steps < self.lengths.view(-1, 1, self.B, 1)
        return torch.where(self.present, a.view(self.E, self.T, self.B, -1), 0).view(a.shape)

    def backward(self, d: Grads, *, x: bool) -> Inputs:
        """Derivatives by every input, by x only where it is asked for. The tape is used up."""
        d_mean, *by_read_out = self.by_read_out(d.y)
        made: Any = [*self.gradients(d._replace(y=d_mean), x=x), *by_read_out]
        return Inputs(*made)

    def by_read_out(self, d_y: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Derivatives by the mean state and by the weights of the read-out, from those by the output."""
        i, d_mean, d_weight, d_bias = self.inputs, d_y, None, None
        if i.weight_y is not None and d_y is None:
            d_weight, d_bias = torch.zeros_like(i.weight_y), None if i.bias_y is None else torch.zeros_like(i.bias_y)
        elif i.weight_y is not None and d_y is not None:
            d_y = self.flat(self.masked(d_y.contiguous()), d_y.shape[-1])
            d_mean = d_y.float() if self.reads else self.multiply(d_y, i.weight_y)
            by_weight = self.multiply(d_y.transpose(-2, -1), self.mean[..., : self.H + 1])
            d_weight = by_weight[..., : self.H]
            if i.bias_y is not None:
                d_bias = d_y.float().sum(-2) if by_weight.shape[-1] == self.H else by_weight[..., self.H]
        return d_mean, d_weight, d_bias

    def gradients(self, d: Grads, *, x: bool) -> list[Tensor | None]:
        """Derivatives by every input but the read-out's, from those by the mean state (or by the read-out, where the
        kernels make it), h, c and R."""
        raise NotImplementedError

    def guess(self, rows: int) -> int:
        """Updates that a tape of so many rows an update has room for."""
        plan = self.plan
        most = plan.T * plan.limit
        if is_small(plan, rows, self.roomy):
            return most
        return min(most, int(1.1 * (plan.updates or 8 * plan.T)) + 2)

    def project(self) -> Tensor:
        """W_x x_t for all t, without biases."""
        i = self.inputs
        if not self.plan.floating:
            return look_up(i)
        return self.multiply(self.x, i.weight_ih[..., :-1].transpose(-2, -1))

    @property
    def x(self) -> Tensor:
        """The input's rows, one after the other."""
        x = self.flat(self.inputs.x, self.plan.features)
        return x if x.is_contiguous() else x.contiguous()

    def outputs(self, mean: Any, *, zero: bool, whole: bool = False) -> Outputs:
        """Memory for the results beside the mean state; ``whole``: for rho and the cost too."""
        front, T, B, H = self.plan.front, self.T, self.B, self.H
        return Outputs(
            mean,
            self.new(*front, B, H),
            self.new(*front, B, H) if self.plan.kind is LSTM else None,
            self.new(*front, T, B, dtype=torch.int64, zero=zero),
            self.new(*front, T, B, zero=zero),
            self.new(*front, T, B) if whole else None,
            self.new(*front, B) if whole else None,
        )

    @property
    def wide(self) -> int:
        """Numbers of a row of prev on the tape."""
        return 0 if self.aside else self.H + self.extra

    def new_tape(self, rows: int) -> Tensor:
        widths = self.wide + self.S + (self.plan.kind.leaves - 1) * self.H + EXTRAS + 2
        return self.new(self.E * rows * widths)

    def parts(self, rows: int) -> list[Tensor]:
        """prev, gates, c^{n-1}, h^n and p^n of a tape of so many rows, ``[E, rows, width]``."""
        made, at = [], 0
        for width in (self.wide, self.S + EXTRAS, (self.plan.kind.leaves - 1) * self.H, 1, 1):
            made.append(self.tape.as_strided((self.E, rows, width), (rows * width, width, 1), at))
            at += self.E * rows * width
        return made

    def visible(self, rows: int) -> Tensor:
        """s^n of the first network's rows of the tape, before they are used up."""
        prev, gates, prev_c = (a[0] for a in self.parts(rows)[:3])
        kind = self.plan.kind
        a = [gates[:, k * self.H : (k + 1) * self.H] for k in range(kind.slots)]
        if kind is LSTM:
            return a[3] * torch.tanh(a[1] * prev_c + a[0] * a[2])
        return a[3] + a[1] * (prev[:, : self.H] - a[3]) if kind is GRU else a[0]

    def given(self, d: Grads) -> tuple[tuple[Any, ...], bool]:
        """The caller's derivatives by mean, h, c and remainder, the strides of the last, and whether h, c have any."""
        i, shape = self.inputs, (self.E, self.T, self.B)
        d_mean, d_h, d_c, d_remainder = d
        width = i.weight_y.shape[-2] if self.reads and i.weight_y is not None else self.H
        d_mean = self.new(*shape, width, zero=True) if d_mean is None else d_mean.contiguous()
        if d_remainder is None:
            d_remainder = self.new(*shape, zero=True)
        elif self.E > 1:
            # With strides that say so: an axis of length 1 may have any.
            d_remainder = d_remainder.contiguous().view(-1).view(shape)
        last = d_h is not None or d_c is not None
        if last:
            d_h = torch.zeros_like(i.h) if d_h is None else d_h.contiguous()
            if i.c is not None:
                d_c = torch.zeros_like(i.c) if d_c is None else d_c.contiguous()
        return (d_mean, d_h, d_c, d_remainder, *d_remainder.stride()[-2:]), last

    def by_tape(
        self, rows: int, used: Used, d_xw: Tensor | None, d_h: Tensor, d_c: Tensor | None, *, x: bool
    ) -> list[Tensor | None]:
        """Derivatives by all inputs, from the derivatives on the tape and those by W_x x_t and by the first state.

        One product over the tape gives those by W_h, w, b (twice: each bias has its own), b_h and the flag's column,
        and by W_x where x is on the tape. ``used``: from the first network of each group to the one after its last,
        how many of the tape's rows they need.
        """
        plan, H, S, width = self.plan, self.H, self.S, self.H + self.extra
        front, kind = plan.front, plan.kind
        products = []
        for group in used:
            gates, prev = self.factors(rows, *group)
            products.append(self.multiply(gates.transpose(-2, -1), prev))
        made = products[0] if len(products) == 1 else torch.cat(products)

        def part(shape: tuple[int, ...], strides: tuple[int, ...], at: int) -> Tensor:
            return made.as_strided((*front, *shape), made.stride()[: len(front)] + strides, at)

        d_x = self.by_x(d_xw) if x else None
        if self.inside:
            d_weight, bias = part((S, self.inside + 1), (width, 1), H + 1), part((S,), (width,), H)
        else:
            flag, bias = part((S,), (width,), H + 1), part((S,), (width,), H)
            if kind is GRU:
                flag, bias = (torch.cat([a[..., : 2 * H], a[..., 3 * H :]], -1) for a in (flag, bias))
            d_weight = self.by_input(d_xw, flag)
        end = S * width
        return [
            d_x, d_weight, part((plan.P, H), (width, 1), 0), bias if plan.biased else None,
            part((plan.P,), (width,), H + 2 + self.inside) if plan.biased else None, part((1, H), (width, 1), end),
            part((1,), (1,), end + H), d_h, d_c,
        ]  # fmt: skip

    def factors(self, rows: int, first: int, end: int, some: int) -> tuple[Tensor, Tensor]:
        """The derivatives, S + 1 a row or more, and prev in the first rows of the tape, of some of the networks."""
        front, E, width, wide = self.plan.front, self.E, self.H + self.extra, self.S + EXTRAS
        size, a, b = ((end - first,), (rows * wide,), (rows * width,)) if front else ((), (), ())
        gates = self.tape.as_strided((*size, some, self.S + 1), (*a, wide, 1), rows * (E * width + first * wide))
        return gates, self.tape.as_strided((*size, some, width), (*b, width, 1), rows * first * width)

    def by_x(self, d_xw: Any) -> Tensor:
        """The derivative by x."""
        return self.multiply(d_xw, self.inputs.weight_ih[..., :-1]).view(self.inputs.x.shape)

    def by_input(self, d_xw: Any, flag: Tensor) -> Tensor:
        """The derivative by W_x and the flag's column."""
        i = self.inputs
        d_weight = torch.empty_like(i.weight_ih)
        d_weight[..., -1] = flag
        if self.plan.floating:
            d_weight[..., :-1] = self.multiply(d_xw.transpose(-2, -1), self.x)
        else:
            by_look_up(i, d_xw, d_weight)
        return d_weight


def is_small(plan: Plan, rows: int, roomy: int = 1) -> bool:
    """Whether a tape of so many rows an update has room for the largest number of updates."""
    each = 4 * plan.E * rows * plan.H * (plan.kind.slots + plan.kind.leaves)
    return plan.forced or plan.T * plan.limit * each <= roomy * SMALL_TAPE


def aligned(size: int) -> int:
    """So many numbers that the next row of bfloat16 begins where the fast products want it."""
    return -(-size // 8) * 8


def shortened(a: Tensor) -> Tensor:
    """A matrix in bfloat16, in the same order of rows and columns."""
    if a.stride(-1) != 1 and a.stride(-2) == 1:
        return shortened(a.transpose(-2, -1)).transpose(-2, -1)
    if a.dtype == torch.bfloat16 and a.stride(-1) == 1 and a.stride(-2) % 8 == 0:
        return a
    *front, size = a.shape
    made = a.new_empty(*front, aligned(size), dtype=torch.bfloat16)[..., :size]
    return made.copy_(a)


def contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    for a in tensors:
        if a is not None and not a.is_contiguous():
            return tuple(None if a is None else a.contiguous() for a in tensors)
    return tensors


def make(inputs: Inputs, rules: Rules, *, keep: bool, seen: bool = False, again: bool = False) -> Run:
    """Run forward in the way that serves these sizes; ``again``: many steps are made with the run."""
    device = inputs.h.device
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        # Triton starts kernels on the current device.
        with torch.cuda.device(device):
            return make(inputs, rules, keep=keep, seen=seen, again=again)
    plan = plan_of(inputs, rules, keep or seen)
    if plan.run is None:
        choose(plan, keep=keep or seen)
    served: Any = plan.recorded if again else plan.run
    return served(inputs, rules, plan, keep=keep or seen, seen=seen)


def choose(plan: Plan, *, keep: bool) -> None:
    """Decide how calls of a plan are served: by the loop where its weights fit, else by ticks."""
    from pondertime.fused import triton_cluster_run, triton_loop_run, triton_recorded

    size = None if keep else triton_cluster_run.cluster_for(plan)
    if size is not None:
        plan.run = plan.recorded = triton_cluster_run.serve
        plan.cut = triton_cluster_run.ClusterPlan(plan, size)
        return
    blocks = triton_loop_run.blocks_for(plan.device, plan.E, plan.B, plan.H, plan.kind.gates, plan.precision)
    if blocks is None:
        plan.run, plan.recorded = triton_recorded.serve, triton_recorded.RecordedRun
        return
    plan.cut = triton_loop_run.LoopPlan(plan, blocks, keep=keep)
    plan.run = plan.recorded = triton_loop_run.LoopRun
