"""The fused path on a GPU for large states: a library product and a kernel a tick, the host looks once in a while."""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from pondertime.fused.common import GRU, Grads, Inputs, Outputs, Rules, Update
from pondertime.fused.triton_plan import Plan
from pondertime.fused.triton_run import Run, contiguous
from pondertime.fused.triton_ticks import tick_backward, tick_forward

# Ticks between two looks at who still runs, after those that were needed last time.
TICKS = 8


def key(d: Grads) -> tuple[bool, ...]:
    """Which derivatives there are."""
    return tuple(a is not None for a in d)


class TickRun(Run):
    """One product and one launch for each tick and direction."""

    def __init__(self, inputs: Inputs, rules: Rules, plan: Plan, *, keep: bool, seen: bool = False) -> None:
        super().__init__(inputs, rules, plan, keep=keep)
        self.sizes = {"H": self.H, "X": self.X, "BH": triton.next_power_of_2(self.H)}
        self.launch: dict[str, Any] = {"num_warps": 4 if self.H <= 512 else 16}
        if self.keep:
            self.capacity = self.guess(self.B)
        out = self.forward()
        if self.keep and self.ticks > self.capacity:
            self.capacity = self.room(self.ticks)
            out = self.forward()
        self.out: Any = self.read(out) if plan.out else out
        plan.updates = self.ticks

    def product(self, a: Tensor, weight: Tensor, out: Tensor) -> None:
        multiply: Any = torch.bmm if a.dim() == 3 else torch.mm
        if a.dtype == out.dtype:
            multiply(a, weight, out=out)
        else:
            multiply(a, weight, out_dtype=out.dtype, out=out)

    def fixed(self, a: Any) -> Any:
        """What the kernels read of a tensor."""
        return a

    def room(self, ticks: int) -> int:
        """Updates that a longer tape has room for, when so many are needed."""
        return ticks

    def repeat(self, kind: Any, ticks: int, tick: Callable[[], None]) -> None:
        """Make some ticks of one kind."""
        for _ in range(ticks):
            tick()

    def forward(self) -> Outputs:
        plan, E, T, B, H, cuda = self.plan, self.E, self.T, self.B, self.H, self.device.type == "cuda"
        mean = self.new(*plan.front, *((T * B,) if plan.out else (T, B)), H, zero=plan.ragged)
        xw, out, i = self.fixed(self.project()), self.outputs(mean, zero=plan.ragged), self.inputs
        flag = self.fixed(i.weight_ih[..., -1].contiguous())  # a column read by every row at every tick
        bias = None
        if i.bias_ih is not None and i.bias_hh is not None:
            bias = i.bias_ih + i.bias_hh
            if plan.kind is GRU:
                bias[..., 2 * H :] = i.bias_ih[..., 2 * H :]
        bias_n = i.bias_hh if plan.kind is GRU else None
        users = [self.fixed(a) for a in contiguous(bias, bias_n, i.halt, i.halt_bias, self.lengths, i.h, i.c)]
        self.counts = self.new(E * B * (3 + 2 * self.capacity), dtype=torch.int32)
        self.counts[: 3 * E * B].zero_()
        work = self.tape = self.new(3 * E * B * H + E * B)
        if self.keep:
            self.tape = self.new_tape(self.capacity * B)
        report = self.report()
        state, weight, short = work[: E * B * H].view(*plan.front, B, H), i.weight_hh.transpose(-1, -2), None
        if plan.half:
            # What the products see of the states.
            short = state = self.new(*plan.front, B, H, dtype=torch.bfloat16)
            weight = weight.bfloat16()
        weight = self.fixed(weight)
        state.copy_(i.h)
        made = self.new(*plan.front, B, plan.P, dtype=torch.float32 if cuda else state.dtype)
        meta = plan.meta(self.sizes, RAGGED=plan.ragged, KEEP=self.keep, BIAS=plan.biased, SHORT=plan.half)
        start = self.starter(
            tick_forward, (B, E, 1), meta, (flag, *users), made, xw, flag, *users,
            *out[:5], work, short, self.tape, self.counts, report,
            T, B, plan.limit, plan.threshold, self.capacity, **self.launch,
        )  # fmt: skip

        def tick() -> None:
            self.product(state, weight, made)
            start()

        wanted = plan.updates or T
        while True:
            self.repeat("forward", wanted, tick)
            if cuda:
                torch.cuda.current_stream().synchronize()
            if int(report.min()) > 0:
                break
            wanted = TICKS
        self.ticks = int(report.max())
        if plan.out:
            self.mean = mean
        return out

    def report(self) -> Tensor:
        """Ticks that each row needed, on the host, where the device writes them."""
        return torch.zeros(self.E * self.B, dtype=torch.int32, pin_memory=self.device.type == "cuda")

    def gradients(self, d: Grads, *, x: bool) -> list[Tensor | None]:
        """Derivatives by all inputs; by x only where it is asked for. The tape is used up."""
        i, E, T, B, H = self.inputs, self.E, self.T, self.B, self.H
        given, last = self.given(d)
        plan = self.plan
        d_xw = self.new(*plan.front, T * B, self.X, zero=plan.ragged)
        work, rows = self.new(3 * E * B * H + E * B), self.capacity * B
        weight = self.fixed(i.weight_hh.bfloat16() if plan.half else i.weight_hh.contiguous())
        halt, lengths = self.fixed(i.halt.contiguous()), self.fixed(self.lengths)
        d_mean, d_h, d_c, d_remainder = (self.fixed(a) for a in given[:4])
        given = (d_mean, d_h, d_c, d_remainder, *d_remainder.stride()[-2:])
        # What the products see of the derivatives.
        short = self.new(*plan.front, B, plan.P, dtype=weight.dtype)
        made = self.new(*plan.front, B, H, dtype=torch.float32 if i.h.is_cuda else weight.dtype)
        start = self.starter(
            tick_backward, (B, E, 1), plan.meta(self.sizes, RAGGED=plan.ragged, LAST=last, SHORT=True),
            (halt, lengths, *given[:4]), made, halt, lengths, *given,
            d_xw, work, short, self.tape, self.counts, T, B, self.capacity, **self.launch,
        )  # fmt: skip
        self.counts[2 * E * B : 3 * E * B].fill_(self.ticks)

        def tick() -> None:
            start()
            self.product(short, weight, made)

        self.repeat(key(d), self.ticks, tick)
        past = work[2 * E * B * H : 3 * E * B * H].view(made.shape)
        d_h = made + past if plan.kind is GRU else made.clone()
        return self.by_tape(rows, self.ticks * B, d_xw, d_h.to(i.h.dtype), None if i.c is None else past.clone(), x=x)

    def trace(self) -> list[Update]:
        """Every update of the first network."""
        B, C = self.B, self.capacity
        info = self.counts[3 * self.E * B :].view(2, self.E, C, B)[:, 0, : self.ticks].cpu()
        t, n = info[0].long() - 1, info[1].long().abs()
        prob, p = (a[0].view(C, B) for a in self.parts(C * B)[3:])
        visible = self.visible(C * B).reshape(C, B, self.H)
        updates = []
        for step in range(self.T):
            for m in range(1, int(n[t == step].max()) + 1):
                tick, rows = ((t == step) & (n == m)).nonzero().to(self.device).unbind(1)
                order = rows.argsort()
                tick, rows = tick[order], rows[order]
                updates.append(Update(step, m, rows, prob[tick, rows], p[tick, rows], visible[tick, rows]))
        return updates
