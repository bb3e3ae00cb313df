"""The fused path on a GPU in one launch forward and one backward, and how its work is cut."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pondertime.fused.common import KINDS, Grads, Inputs, Outputs, Rules, Update, of_stream, padded
from pondertime.fused.triton_backward import backward_kernel
from pondertime.fused.triton_forward import forward_kernel
from pondertime.fused.triton_plan import Plan
from pondertime.fused.triton_run import EXTRAS, Run, contiguous, is_small
from pondertime.fused.triton_tape import FLOAT32, HALF, TF32
from pondertime.fused.triton_weights import weights_kernel

# Bytes of a program's shared memory that are not for weights and states.
RESERVED = 24 * 1024
# Zeros for barriers, for each device and stream.
_counters: dict[torch.device, dict[int, Tensor]] = {}
# Sizes up to which the kernels project and read out.
MOST_PROJECTED, MOST_READ_OUT = 128, 16
# Row groups that may wait for each other at once: no more than programs fit a device.
MOST_GROUPS = 1024
# The side of a tile of the derivatives by the weights; up to how many rows, at one update a step, they are a loop over.
TILE, FEW_ROWS = 64, 1024


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
def processors(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a program may fill with weights and states."""
    if device.type != "cuda":
        return 1, 200 * 1024
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin - RESERVED


# Bytes that a number of a product takes: itself and its rest, itself, or half of it.
BYTES = {FLOAT32.value: 8, TF32.value: 4, HALF.value: 2}


@functools.cache
def blocks_for(device: torch.device, E: int, B: int, H: int, gates: int, precision: int) -> Blocks | None:
    """Blocks with which all programs are on the device at once and keep their weights, None where there are none."""
    BR, HP, (count, shared) = 16, padded(H), processors(device)
    room = max(1, count // (E * -(-B // BR)))
    KS = min(4 if gates == 1 else 8, HP // 16)
    for BU in (16, 32, 64, 128) if gates == 1 else (8, 16, 32, 64):
        CG = -(-H // BU)
        if room >= CG and BYTES[precision] * HP * (BU * gates + BR) <= shared:
            return Blocks(BR, BU, KS, HP // KS, CG)
    return None


def counters(device: torch.device) -> Tensor:
    """Zeros for the barriers of one launch at a time, which leaves them zeros."""
    kept = _counters.setdefault(device, {})
    return of_stream(kept, device, lambda: torch.zeros(2 * MOST_GROUPS, dtype=torch.int32, device=device))


class LoopPlan:
    """How the loop of a plan is cut, and what of the work around it the kernels do themselves."""

    def __init__(self, plan: Plan, blocks: Blocks, *, keep: bool) -> None:
        self.blocks = blocks
        self.groups, features = -(-plan.B // blocks.BR), plan.features
        self.inside = plan.taped if keep else 0
        self.extra = -(-(3 + self.inside) // 4) * 4
        # W_x x_t, where there is room for its weights beside the others.
        length = max(16 * blocks.KS, padded(features))
        size = BYTES[plan.precision] * (padded(plan.H) + length) * (blocks.BU * plan.kind.gates + blocks.BR)
        self.project = plan.floating and 0 < features <= MOST_PROJECTED and size <= processors(plan.device)[1]
        # The read-out, where it is small.
        self.out = plan.out if plan.out <= MOST_READ_OUT else 0
        self.sizes = {
            "BR": blocks.BR, "BU": blocks.BU, "KS": blocks.KS, "KB": blocks.KB, "CG": blocks.CG,
            "CGP": 1 << (blocks.CG - 1).bit_length(), "PRECISION": plan.precision, "XI": self.inside,
            "BX": 1 << (-(-max(4, self.inside) // blocks.CG) - 1).bit_length(), "PROJECT": self.project,
            "KX": length // blocks.KS, "OUT": self.out,
        }  # fmt: skip
        self.options: dict[str, Any] = {"num_warps": blocks.warps}
        if blocks.CG > 1:
            self.options["launch_cooperative_grid"] = True
        self.grid = (blocks.CG, self.groups, plan.E)
        self.slot = self.groups * blocks.BR  # rows of the tape that an update of all row groups takes
        shares = (1 + self.out) * 2 * self.slot * blocks.CG
        self.work = plan.E * (4 * plan.B * plan.H + shares)
        self.counts = plan.E * (self.groups + plan.T * plan.B)
        self.scratch: dict[int, tuple[Tensor, Any]] = {}  # by stream
        # The mean state is made where somebody wants it: the caller, the read-out, or its derivative.
        self.mean: tuple[int, ...] | None = None
        if plan.out == 0:
            self.mean = (*plan.front, plan.T, plan.B, plan.H)
        elif self.out == 0 or keep:
            self.mean = (*plan.front, plan.T * plan.B, plan.H + EXTRAS)
        # The derivatives by the weights come from a kernel of their own where its loop is short.
        short = plan.T * self.slot <= FEW_ROWS and is_small(plan, self.slot)
        self.own = short and self.inside > 0 and plan.out == self.out
        if self.own:
            self.lay_out(plan)
        self.forward = plan.meta(
            self.sizes, RAGGED=plan.ragged, KEEP=keep, MEAN=self.mean is not None, BIAS=plan.biased,
            BIAS_Y=plan.biased_out,
        )  # fmt: skip

    def lay_out(self, plan: Plan) -> None:
        """How the derivatives by the weights are made, and where they lie: shape, strides and first number of each."""
        H, S, rows, columns = plan.H, plan.S, plan.S + 1 + self.out, plan.H + self.extra
        self.tiles = -(-rows // TILE), -(-columns // TILE), plan.E
        self.weights = {
            "CELL": KINDS.index(plan.kind), "SLOTS": plan.kind.slots, "BR": self.blocks.BR,
            "PRECISION": plan.precision, "XI": self.inside, "OUT": self.out, "RG": 1 << (self.groups - 1).bit_length(),
            "BM": min(TILE, padded(rows)), "BN": min(TILE, padded(columns)), "BK": 32,
        }  # fmt: skip
        shapes = ((S, self.inside + 1), (S, H), (S,), (S,), (1, H), (1,), (self.out, H), (self.out,))
        self.places, self.total = [], sum(math.prod(shape) for shape in shapes)
        at = 0
        for shape in shapes:
            strides = (self.total,)[: len(plan.front)] + (shape[-1], 1)[-len(shape) :]
            self.places.append(((*plan.front, *shape), strides, at))
            at += math.prod(shape)


class LoopRun(Run):
    """One launch forward, one backward."""

    def __init__(self, inputs: Inputs, rules: Rules, plan: Plan, *, keep: bool, seen: bool = False) -> None:
        super().__init__(inputs, rules, plan, keep=keep)
        self.cut = plan.cut
        self.blocks, self.reads = self.cut.blocks, self.cut.out > 0
        self.inside, self.extra, self.groups = self.cut.inside, self.cut.extra, self.cut.groups
        if self.keep:
            self.capacity = self.guess(self.cut.slot)
        out = self.forward()
        self.out: Any = out if self.cut.out or not plan.out else self.read(out)
        if seen:
            self.make_room()

    def forward(self) -> Outputs:
        plan, cut, i, T, B, H = self.plan, self.cut, self.inputs, self.T, self.B, self.H
        y, mean, wide = None, None, H + EXTRAS if plan.out else H
        if cut.mean is not None:
            mean = self.new(*cut.mean)
        if cut.out:
            half = plan.half and not plan.front
            y = self.new(*plan.front, T, B, cut.out, dtype=torch.bfloat16 if half else torch.float32)
        out = self.outputs(mean if y is None else y, zero=False, whole=True)
        work, counts = self.scratch()
        self.tape, self.counts = work, counts
        if counts is None:
            self.tape, self.counts = self.new_tape(self.capacity * cut.slot), self.new(cut.counts, dtype=torch.int32)
        x = contiguous(i.x)[0] if self.inside or cut.project else None
        xw = None if cut.project else self.project()
        given = (i.weight_ih, i.weight_hh, i.bias_ih, i.bias_hh, i.halt, i.halt_bias, self.lengths, i.h, i.c)
        given = contiguous(*given, *((i.weight_y, i.bias_y) if cut.out else (None, None)))
        self.plan.starter(
            forward_kernel, cut.grid, cut.forward, (*given, x), xw, x, given[0], plan.features + 1, plan.features,
            *given[1:], y, mean, *out[1:], work, self.tape, self.counts, counters(self.device),
            T, B, H, self.X, plan.limit, plan.threshold, self.capacity, H + self.extra, wide, **cut.options,
        )()  # fmt: skip
        if plan.out and mean is not None:
            self.mean = mean
        return out

    def scratch(self) -> tuple[Tensor, Any]:
        """Memory that a launch uses and no one after it, so that the next on its stream has the same: numbers, and
        counts where no way back needs them."""

        def make() -> tuple[Tensor, Any]:
            return self.new(self.cut.work), None if self.keep else self.new(self.cut.counts, dtype=torch.int32)

        return of_stream(self.cut.scratch, self.device, make)

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

    def backward(self, d: Grads, *, x: bool) -> Inputs:
        plan, cut, T, H = self.plan, self.cut, self.T, self.H
        if not cut.own:
            return super().backward(d, x=x)
        # The tape had room for whatever was needed: the host need not know what that was.
        d_y, mean = None, None
        if cut.out:
            d_y = self.new(self.E, T, self.B, cut.out, zero=True) if d.y is None else d.y.contiguous().float()
            mean, d = self.mean, d._replace(y=d_y)
        d_xw, d_h, d_c = self.loop_back(d, 0, x=x)
        made = self.new(self.E * cut.total)
        self.plan.starter(
            weights_kernel, cut.tiles, cut.weights, (d_y,), self.tape, self.counts, mean, d_y, made,
            T, self.B, H, self.capacity, H + self.extra, H + EXTRAS, cut.total, num_warps=4,
        )()  # fmt: skip
        w_x, w_h, b_x, b_h, halt, halt_bias, w_y, b_y = (made.as_strided(*place) for place in cut.places)
        biases = (b_x, b_h) if plan.biased else (None, None)
        read_out = w_y if cut.out else None, b_y if plan.biased_out else None
        found: Any = (self.by_x(d_xw) if x else None, w_x, w_h, *biases, halt, halt_bias, d_h, d_c, *read_out)
        return Inputs(*found)

    def gradients(self, d: Grads, *, x: bool) -> list[Tensor | None]:
        """Derivatives by all inputs; by x only where it is asked for. The tape is used up."""
        longest, slot = self.make_room(), self.cut.slot
        through = self.loop_back(d, longest, x=x)
        return self.by_tape(self.capacity * slot, [(0, self.E, longest * slot)], *through, x=x)

    def loop_back(self, d: Grads, longest: int, *, x: bool) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Derivatives on the tape, by W_x x_t where they are asked for, and by the first state; slots before
        ``longest`` that hold no update become zeros."""
        i, E, T, B, H = self.inputs, self.E, self.T, self.B, self.H
        given, last = self.given(d)
        by_x = x or not self.inside
        d_xw = self.new(*self.plan.front, T * B, self.X) if by_x else None
        dots = self.new(E * self.capacity * self.cut.slot * self.blocks.CG)
        d_h, d_c = torch.empty_like(i.h), None if i.c is None else torch.empty_like(i.c)
        weights = contiguous(i.weight_hh, i.halt, i.weight_y if self.cut.out else None)
        self.plan.starter(
            backward_kernel, self.cut.grid, self.plan.meta(self.cut.sizes, LAST=last, BY_X=by_x),
            (*weights, *given[:4]), *weights, *given, d_xw, d_h, d_c, self.tape, self.counts, counters(self.device),
            dots, T, B, H, self.X, self.capacity, longest, H + self.extra, **self.cut.options,
        )()  # fmt: skip
        return d_xw, d_h, d_c

    def trace(self) -> list[Update]:
        """Every update of the first network."""
        BR, groups = self.blocks.BR, self.groups
        shape, rows = (self.capacity, groups, BR), self.capacity * self.cut.slot
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
