"""The fused path on a GPU for large states: a library product and a kernel a tick, the host looks once in a while."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from pondertime.fused.common import GRU, Grads, Inputs, Outputs, Rules, Update
from pondertime.fused.triton_plan import Plan
from pondertime.fused.triton_run import EXTRAS, Run, aligned, contiguous
from pondertime.fused.triton_ticks import tick_backward, tick_forward

# Ticks between two looks at who still runs, after those that were needed last time.
TICKS = 8
# Stacked networks are in so many blocks; those at the end that are done are left out of a tick.
BLOCKS = 8


def block(networks: int) -> int:
    """Networks that are left out together."""
    return -(-networks // BLOCKS)


Groups = list[tuple[int, int, int]]


def alike(ticks: list[int]) -> Groups:
    """Networks one after the other that need about as many ticks: the first, the one after the last, how many."""
    groups: Groups = []
    size = block(len(ticks))
    for first in range(0, len(ticks), size):
        end, most = min(first + size, len(ticks)), max(ticks[first : first + size])
        if groups and 2 * min(most, groups[-1][2]) >= max(most, groups[-1][2]):
            first, _, before = groups.pop()
            most = max(most, before)
        groups.append((first, end, most))
    return groups


def product(a: Tensor, weight: Tensor, out: Tensor, first: int) -> None:
    """The product of the first networks."""
    multiply: Any = torch.bmm if a.dim() == 3 else torch.mm
    if a.dim() == 3 and first < len(a):
        a, weight, out = a[:first], weight[:first], out[:first]
    if a.dtype == out.dtype:
        multiply(a, weight, out=out)
    else:
        multiply(a, weight, out_dtype=out.dtype, out=out)


class Back(NamedTuple):
    """A backward pass: how many ticks the networks make, what makes one of the first networks, what they write to."""

    groups: Groups
    tick: Callable[[int], None]
    d_xw: Tensor | None
    made: Tensor  # [.., B, HP], by s_0 in the end
    past: Tensor  # [.., B, H], by c_0

    @property
    def wanted(self) -> list[int]:
        """The ticks of each network."""
        return [ticks for first, end, ticks in self.groups for _ in range(first, end)]


class TickRun(Run):
    """One product and one launch for each tick and direction."""

    results: Outputs  # with the mean state in place of the read-out
    out: Any  # with the read-out
    tick: Callable[[int], None]  # makes one of the first networks
    report: Tensor  # the ticks that each row needed, on the host, where the device writes them
    needed: list[int]  # and each network
    lasting: bool = False  # whether it makes steps after the first

    def __init__(self, inputs: Inputs, rules: Rules, plan: Plan, *, keep: bool, seen: bool = False) -> None:
        super().__init__(inputs, rules, plan, keep=keep)
        half, H = plan.half, self.H
        # x on the tape, where its rows are the products' own: no sum over the updates of a step is written down.
        self.inside = plan.taped if half and keep else 0
        # Of rows that products see: the state's, and the tape's.
        self.HP = aligned(H) if half else H
        self.widths = (aligned(H + 3 + self.inside), aligned(self.S + 1)) if half else (H + EXTRAS, self.S + EXTRAS)
        self.extra = self.widths[0] - H
        self.aside = half and plan.kind is not GRU  # whose derivatives need s^{n-1} in float32
        self.sizes: dict[str, Any] = {
            "H": H, "X": self.X, "BH": triton.next_power_of_2(H), "HP": self.HP, "SHORT": half, "WIDE": self.wide,
            "PW": self.widths[0], "GW": self.widths[1], "XI": self.inside,
            "BX": triton.next_power_of_2(self.inside + 3),
        }  # fmt: skip
        self.launch: dict[str, Any] = {"num_warps": 4 if self.H <= 512 else 16}
        if self.keep:
            self.capacity = self.guess(self.B)
        self.complete()
        if not self.lasting:
            del self.results, self.tick  # they hold what the caller gets, which holds this run

    def complete(self) -> None:
        """A forward pass; again, if the tape was too short for it."""
        self.forward()
        if self.keep and max(self.needed) > self.capacity:
            self.capacity = self.room(max(self.needed))
            self.forward()
        self.plan.updates = max(self.needed)

    def whole(self) -> Outputs:
        """The results with the read-out."""
        return self.read(self.results) if self.plan.out else self.results

    def fixed(self, a: Any) -> Any:
        """What the kernels read of a tensor."""
        return a

    def room(self, ticks: int) -> int:
        """Updates that a longer tape has room for, when so many are needed."""
        return ticks

    def repeat(self, kind: Any, wanted: list[int], tick: Callable[[int], None]) -> None:
        """Make so many ticks for each network, or more; ``tick`` makes one for the first networks."""
        for _ in range(max(wanted)):
            tick(self.E)

    def weights(self) -> Tensor:
        """W_h as the products see it, [.., P, HP]."""
        weight = self.inputs.weight_hh
        if not self.plan.half:
            return self.fixed(weight.contiguous())
        made = self.new(*weight.shape[:-1], self.HP, zero=self.HP > self.H, dtype=torch.bfloat16)
        made[..., : self.H].copy_(weight)
        return made

    def forward(self) -> None:
        self.begin()
        self.advance()

    def begin(self) -> None:
        """All that comes before the first tick."""
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
        self.counts = self.new(E * B * (4 + 2 * self.capacity), dtype=torch.int32)
        self.counts[: 3 * E * B].zero_()
        work = self.tape = self.new(3 * E * B * H + E * B)
        x_in, short_tape = None, (None, None)
        if self.keep:
            self.tape = self.new_tape(self.capacity * B)
            if plan.half:
                short_tape = tuple(self.new(E, self.capacity * B, w, dtype=torch.bfloat16) for w in self.widths)
            if self.inside:
                x_in = self.fixed(self.x)
        self.short_tape: Any = short_tape
        self.report, self.weight = self.new_report(), self.weights()
        # A tick must not hold the run that holds it.
        tape, counts, report, capacity, launch = self.tape, self.counts, self.report, self.capacity, self.launch
        state, short = work[: E * B * H].view(*plan.front, B, H), None
        if plan.half:
            # What the products see of the states.
            short = state = self.new(*plan.front, B, self.HP, zero=True, dtype=torch.bfloat16)
        state[..., :H].copy_(i.h)
        made = self.new(*plan.front, B, plan.P, dtype=torch.float32 if cuda else state.dtype)
        meta = plan.meta(self.sizes, RAGGED=plan.ragged, KEEP=self.keep, BIAS=plan.biased)
        transposed = self.weight.transpose(-1, -2)

        @cache
        def start(first: int) -> Callable[[], None]:
            return plan.starter(
                tick_forward, (B, first, 1), meta, (flag, *users, x_in), made, xw, flag, *users,
                *out[:5], work, short, tape, x_in, short_tape[0], counts, report,
                E, T, B, plan.limit, plan.threshold, capacity, **launch,
            )  # fmt: skip

        def tick(first: int) -> None:
            product(state, transposed, made, first)
            start(first)()

        self.results, self.tick = out, tick
        if plan.out:
            self.mean = mean

    def advance(self) -> None:
        """Ticks until no row runs."""
        wanted, seen = self.plan.ticks or [self.T] * self.E, self.report.view(self.E, self.B)
        while True:
            try:
                self.repeat("forward", wanted, self.tick)
                if not self.lasting:
                    self.out = self.whole().whole()  # while the ticks are made, though there may be more of them
            finally:
                if self.device.type == "cuda":
                    torch.cuda.current_stream().synchronize()  # nobody writes to the report after this
            if int(seen.min()) > 0:
                break
            wanted = torch.where(seen.amin(1) > 0, 0, TICKS).tolist()
        self.needed = self.plan.ticks = seen.amax(1).tolist()

    def new_report(self) -> Tensor:
        return torch.zeros(self.E * self.B, dtype=torch.int32, pin_memory=self.device.type == "cuda")

    def gradients(self, d: Grads, *, x: bool) -> list[Tensor | None]:
        """Derivatives by all inputs; by x only where it is asked for. The tape is used up."""
        back = self.begin_back(d, alike(self.needed), x=x)
        self.repeat("backward", back.wanted, back.tick)
        return self.end_back(back, x=x)

    def begin_back(self, d: Grads, groups: Groups, *, x: bool) -> Back:
        """All of a backward pass that comes before its first tick."""
        plan, i, E, T, B, H = self.plan, self.inputs, self.E, self.T, self.B, self.H
        given, last = self.given(d)
        by_x = x or not self.inside
        d_xw = self.new(*plan.front, T * B, self.X, zero=plan.ragged) if by_x else None
        work = self.new(3 * E * B * H + E * B)
        halt, lengths = self.fixed(i.halt.contiguous()), self.fixed(self.lengths)
        weight, tape, counts, capacity, launch = self.weight, self.tape, self.counts, self.capacity, self.launch
        d_mean, d_h, d_c, d_remainder = (self.fixed(a) for a in given[:4])
        given = (d_mean, d_h, d_c, d_remainder, *d_remainder.stride()[-2:])
        # What the products see of the derivatives.
        short = self.new(*plan.front, B, plan.P, dtype=weight.dtype)
        made = self.new(*plan.front, B, self.HP, dtype=torch.float32 if i.h.is_cuda else short.dtype)
        meta, short_tape = plan.meta(self.sizes, RAGGED=plan.ragged, LAST=last, BY_X=by_x), self.short_tape
        to_make = counts[3 * E * B : 4 * E * B].view(E, B)
        for first, end, ticks in groups:
            to_make[first:end] = ticks

        @cache
        def start(first: int) -> Callable[[], None]:
            return plan.starter(
                tick_backward, (B, first, 1), meta, (halt, lengths, *given[:4]), made, halt, lengths, *given,
                d_xw, work, short, tape, *short_tape, counts, E, T, B, capacity, **launch,
            )  # fmt: skip

        def tick(first: int) -> None:
            start(first)()
            product(short, weight, made, first)

        return Back(groups, tick, d_xw, made, work[2 * E * B * H : 3 * E * B * H].view(*plan.front, B, H))

    def end_back(self, back: Back, *, x: bool) -> list[Tensor | None]:
        """What comes after its last tick."""
        i, B, made, past = self.inputs, self.B, back.made[..., : self.H], back.past
        d_h = made + past if self.plan.kind is GRU else made.clone()
        used = [(first, end, ticks * B) for first, end, ticks in back.groups]
        d_c = None if i.c is None else past.clone()
        return self.by_tape(self.capacity * B, used, back.d_xw, d_h.to(i.h.dtype), d_c, x=x)

    def factors(self, rows: int, first: int, end: int, some: int) -> tuple[Tensor, Tensor]:
        if not self.plan.half:
            return super().factors(rows, first, end, some)
        prev, gates = (a[first:end, :some] if self.plan.front else a[0, :some] for a in self.short_tape)
        return gates, prev

    def trace(self) -> list[Update]:
        """Every update of the first network."""
        B, C = self.B, self.capacity
        info = self.counts[4 * self.E * B :].view(2, self.E, C, B)[:, 0, : self.needed[0]].cpu()
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
