"""The fused path on a GPU in one launch forward and one backward, and how its work is cut."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pondertime.fused.common import GRU, Inputs, Outputs, Rules, Update
from pondertime.fused.triton_loop import backward_kernel, forward_kernel
from pondertime.fused.triton_run import EXTRAS, Plan, Run, plan_of
from pondertime.fused.triton_tape import FLOAT32, HALF, TF32

# Bytes of a program's shared memory that are not for weights and states.
RESERVED = 24 * 1024
# Zeros for barriers, for each device and stream.
_counters: dict[tuple[torch.device, int], Tensor] = {}
# Row groups that may wait for each other at once: no more than programs fit a device.
MOST_GROUPS = 1024


@dataclass(frozen=True)
class Blocks:
    """How the loop is cut: BR rows and BU units a program, CG programs a row group, KS parts of KB in a product."""

    BR: int
    BU: int
    KS: int
    KB: int
    CG: int
    warps: int = 4


@functools.cache
def blocks_for(device: torch.device, E: int, B: int, H: int, gates: int, precision: int) -> Blocks | None:
    """Blocks with which all programs are on the device at once and keep their weights, None where there are none."""
    BR, HP = 16, max(16, 1 << (H - 1).bit_length())
    room, shared = 1, 200 * 1024
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        room = properties.multi_processor_count // (E * -(-B // BR))
        shared = properties.shared_memory_per_block_optin - RESERVED
    # Of a weight: itself and its rest, itself, or half of it.
    size = {FLOAT32.value: 8, TF32.value: 4, HALF.value: 2}[precision]
    KS = min(4 if gates == 1 else 8, HP // 16)
    for BU in (16, 32, 64, 128) if gates == 1 else (8, 16, 32, 64):
        CG = -(-H // BU)
        if max(1, room) >= CG and size * HP * (BU * gates + BR) <= shared:
            return Blocks(BR, BU, KS, HP // KS, CG)
    return None


def counters(device: torch.device) -> Tensor:
    """Zeros for the barriers of one launch at a time, which leaves them zeros."""
    key = (device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
    if key not in _counters:
        _counters[key] = torch.zeros(2 * MOST_GROUPS, dtype=torch.int32, device=device)
    return _counters[key]


class LoopPlan:
    """How the loop of a plan is cut, for a pass that keeps a tape and one that does not."""

    def __init__(self, plan: Plan, blocks: Blocks, *, keep: bool) -> None:
        # x on the tape: its product comes with that of the states. A GRU's input sees other derivatives than its state.
        small = plan.floating and 0 < plan.features <= plan.H
        self.inside = plan.features if keep and small and plan.kind is not GRU else 0
        self.extra = -(-(3 + self.inside) // 4) * 4
        self.groups = -(-plan.B // blocks.BR)
        self.sizes = {
            "BR": blocks.BR, "BU": blocks.BU, "KS": blocks.KS, "KB": blocks.KB, "CG": blocks.CG,
            "CGP": 1 << (blocks.CG - 1).bit_length(), "PRECISION": plan.precision, "XI": self.inside,
            "BX": 1 << (-(-max(4, self.inside) // blocks.CG) - 1).bit_length(),
        }  # fmt: skip
        self.options: dict[str, Any] = {"num_warps": blocks.warps}
        if blocks.CG > 1:
            self.options["launch_cooperative_grid"] = True
        self.grid = (blocks.CG, self.groups, plan.E)


class LoopRun(Run):
    """One launch forward, one backward."""

    def __init__(self, inputs: Inputs, rules: Rules, blocks: Blocks, *, keep: bool, seen: bool = False) -> None:
        plan = plan_of(inputs, rules, blocks, keep or seen)
        super().__init__(inputs, rules, plan, keep=keep or seen)
        if plan.cut is None:
            plan.cut = LoopPlan(plan, blocks, keep=self.keep)
        self.blocks, self.cut = blocks, plan.cut
        self.inside, self.extra, self.groups = self.cut.inside, self.cut.extra, self.cut.groups
        if self.keep:
            self.capacity = self.guess(self.groups * blocks.BR)
        self.out: Any = self.read(self.forward())
        if seen:
            self.make_room()

    def forward(self) -> Outputs:
        plan, E, T, B, H, k = self.plan, self.E, self.T, self.B, self.H, self.blocks
        wide = H if self.inputs.weight_y is None else H + EXTRAS
        xw, out, users = self.project(), self.outputs(width=wide, zero=False), self.users()
        out = out._replace(rho=torch.empty_like(out.remainder), cost=self.new(*plan.front, B))
        self.counts = self.new(E * (self.groups + T * B), dtype=torch.int32)
        work = self.tape = self.new(E * (4 * B * H + 2 * self.groups * k.CG * k.BR))
        if self.keep:
            self.tape = self.new_tape(self.capacity * self.groups * k.BR)
        stride, x = users[0].stride(-1), self.x if self.inside else None
        meta = plan.meta(self.cut.sizes, RAGGED=plan.ragged, KEEP=self.keep, BIAS=plan.biased)
        self.starter(
            forward_kernel, self.cut.grid, meta, (*users, x), xw, x, users[0], stride, self.X * stride, *users[1:],
            *out, work, self.tape, self.counts, counters(self.device),
            T, B, H, self.X, plan.limit, plan.threshold, self.capacity, H + self.extra, wide,
            strides=(stride,), **self.cut.options,
        )()  # fmt: skip
        if wide > H:
            out = out._replace(y=out.y[..., : H + 1])
        return out

    @property
    def rows(self) -> int:
        """Updates of the longest row group; waits for the device."""
        return max(self.counts[: self.E * self.groups].tolist())

    def make_room(self) -> int:
        """Run again with a longer tape if it was too short; returns the updates of the longest row group."""
        longest = self.rows
        if longest > self.capacity:
            self.capacity = longest
            self.forward()
        self.plan.updates = longest
        return longest

    def gradients(self, grads: tuple[Tensor | None, ...], *, x: bool) -> list[Tensor | None]:
        """Derivatives by all inputs; by x only where it is asked for. The tape is used up."""
        i, k, E, T, B, H = self.inputs, self.blocks, self.E, self.T, self.B, self.H
        longest = self.make_room()
        given, last = self.given(grads)
        by_x = x or not self.inside
        d_xw = self.new(*self.plan.front, T * B, self.X) if by_x else None
        dots = self.new(E * self.capacity * self.groups * k.CG * k.BR)
        d_h, d_c = torch.empty_like(i.h), None if i.c is None else torch.empty_like(i.c)
        weights = tuple(a if a.is_contiguous() else a.contiguous() for a in (i.weight_hh, i.halt))
        self.starter(
            backward_kernel, self.cut.grid, self.plan.meta(self.cut.sizes, LAST=last, BY_X=by_x),
            (*weights, *given[:4]), *weights, *given, d_xw, d_h, d_c, self.tape, self.counts, counters(self.device),
            dots, T, B, H, self.X, self.capacity, longest, H + self.extra, **self.cut.options,
        )()  # fmt: skip
        slot = self.groups * k.BR
        return self.by_tape(self.capacity * slot, longest * slot, d_xw, d_h, d_c, x=x)

    def trace(self) -> list[Update]:
        """Every update of the first network."""
        BR, groups = self.blocks.BR, self.groups
        shape, rows = (self.capacity, groups, BR), self.capacity * groups * BR
        prob, p = (a[0].view(shape) for a in self.parts(rows)[3:])
        visible = self.visible(rows).reshape(*shape, self.H)
        steps = torch.zeros(self.T, groups * BR, dtype=torch.int64)
        steps[:, : self.B] = self.counts[self.E * groups :][: self.T * self.B].view(self.T, self.B).cpu()
        longest = steps.view(self.T, groups, BR).amax(2)
        start = longest.cumsum(0) - longest
        updates = []
        for t in range(self.T):
            for n in range(1, int(longest[t].max()) + 1):
                rows = (steps[t] >= n).nonzero().squeeze(1)
                places = (start[t][rows // BR] + n - 1, rows // BR, rows % BR)
                at = tuple(index.to(self.device) for index in places)
                updates.append(Update(t, n, rows.to(self.device), prob[at], p[at], visible[at]))
        return updates
