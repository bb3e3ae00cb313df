"""The fused path on a GPU in one launch forward and one backward, and how its work is cut."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pondertime.fused.common import Inputs, Outputs, Rules, Update
from pondertime.fused.triton_loop import backward_kernel, forward_kernel
from pondertime.fused.triton_run import Run

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
def blocks_for(device: torch.device, E: int, B: int, H: int, gates: int) -> Blocks | None:
    """Blocks with which all programs are on the device at once and keep their weights, None where there are none."""
    BR, HP = 16, max(16, 1 << (H - 1).bit_length())
    room, shared = 1, 200 * 1024
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        room = properties.multi_processor_count // (E * -(-B // BR))
        shared = properties.shared_memory_per_block_optin - RESERVED
    KS = min(4 if gates == 1 else 8, HP // 16)
    for BU in (16, 32, 64, 128) if gates == 1 else (8, 16, 32, 64):
        CG = -(-H // BU)
        if max(1, room) >= CG and 4 * HP * (2 * BU * gates + 2 * BR) <= shared:
            return Blocks(BR, BU, KS, HP // KS, CG)
    return None


def counters(device: torch.device) -> Tensor:
    """Zeros for the barriers of one launch at a time, which leaves them zeros."""
    key = (device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
    if key not in _counters:
        _counters[key] = torch.zeros(2 * MOST_GROUPS, dtype=torch.int32, device=device)
    return _counters[key]


def precise() -> bool:
    """Whether products are those of float32: what torch's own do, by either way to say so."""
    return torch.backends.cuda.matmul.fp32_precision != "tf32"


class LoopRun(Run):
    """One launch forward, one backward."""

    def __init__(self, inputs: Inputs, rules: Rules, blocks: Blocks, *, keep: bool, seen: bool = False) -> None:
        exact = precise()
        super().__init__(inputs, rules, keep=keep or seen, key=(blocks, exact))
        self.blocks, self.groups = blocks, -(-self.B // blocks.BR)
        self.sizes = {
            "BR": blocks.BR, "BU": blocks.BU, "KS": blocks.KS, "KB": blocks.KB, "CG": blocks.CG,
            "CGP": 1 << (blocks.CG - 1).bit_length(), "EXACT": exact,
        }  # fmt: skip
        self.launch: dict[str, Any] = {"num_warps": blocks.warps}
        if blocks.CG > 1:
            self.launch["launch_cooperative_grid"] = True
        self.grid = (blocks.CG, self.groups, self.E)
        if self.keep:
            self.capacity = self.guess(self.groups * blocks.BR)
        self.out: Any = self.read(self.forward())
        if seen:
            self.make_room()

    def forward(self) -> Outputs:
        E, T, B, H, k = self.E, self.T, self.B, self.H, self.blocks
        xw, out, users = self.project(), self.outputs(), self.users()
        self.counts = self.new(E * (self.groups + T * B), dtype=torch.int32)
        work = self.tape = self.new(E * (4 * B * H + 2 * self.groups * k.CG * k.BR))
        if self.keep:
            self.tape = self.new_tape(self.capacity * self.groups * k.BR)
        stride = users[0].stride(-1)
        meta = self.meta(RAGGED=users[6] is not None, KEEP=self.keep, BIAS=users[2] is not None) | self.sizes
        self.starter(
            forward_kernel, self.grid, meta, users, xw, users[0], stride, self.X * stride, *users[1:],
            *out[:3], out.steps, out.remainder, work, self.tape, self.counts, counters(self.device),
            T, B, H, self.X, self.limit, 1 - self.rules.epsilon, self.capacity, strides=(stride,), **self.launch,
        )()  # fmt: skip
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
        self.remember(longest)
        return longest

    def gradients(self, grads: tuple[Tensor | None, ...], *, x: bool) -> list[Tensor | None]:
        """Derivatives by all inputs; by x only where it is asked for. The tape is used up."""
        i, k, E, T, B, H = self.inputs, self.blocks, self.E, self.T, self.B, self.H
        longest = self.make_room()
        given, last = self.given(grads)
        d_xw, dots = self.new(E, T * B, self.X), self.new(E * self.capacity * self.groups * k.CG * k.BR)
        d_h, d_c = torch.empty_like(i.h), None if i.c is None else torch.empty_like(i.c)
        weights = tuple(a if a.is_contiguous() else a.contiguous() for a in (i.weight_hh, i.halt))
        self.starter(
            backward_kernel, self.grid, self.meta(LAST=last) | self.sizes, (*weights, *given[:4]), *weights, *given,
            d_xw, d_h, d_c, self.tape, self.counts, counters(self.device), dots,
            T, B, H, self.X, self.capacity, longest, **self.launch,
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
