"""The fused path on a GPU: memory and launches of the kernels in ``triton_loop``, one forward and one backward."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from pondertime.fused.common import GRU, KINDS, LSTM, Inputs, Outputs, Rules, Sums, Update, project
from pondertime.fused.triton_loop import EXTRA, backward_kernel, forward_kernel
from pondertime.fused.triton_resident import resident_backward, resident_forward

# Updates of a row group that calls of a shape needed last time.
_updates: dict[tuple[Any, ...], int] = {}
# Bytes of a multiprocessor's shared memory that weights and states may take.
SHARED = 200 * 1024
# Kernels by what they were built for.
_built: dict[tuple[Any, ...], Any] = {}
# A tape of no more bytes than this has room for the largest number of updates.
SMALL_TAPE = 2**27
EXTRAS = EXTRA.value


@dataclass(frozen=True)
class Blocks:
    """How the work is cut: BR rows, BU units and BK numbers of a product at a time, CG programs a row group.

    KS: parts of a product whose weights stay in registers; 0: they are read at every update.
    """

    BR: int
    BU: int
    BK: int
    CG: int
    warps: int = 4
    stages: int = 3
    KS: int = 0


@functools.cache
def multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@functools.cache
def blocks_for(device: torch.device, E: int, B: int, H: int, gates: int) -> Blocks:
    """Enough programs to fill the device, all of them resident at once where they wait for each other."""
    if device.type != "cuda":
        return Blocks(16, 16, 32, 1)
    BR, HP = 16, max(16, triton.next_power_of_2(H))
    room = max(1, multiprocessors(device.index or 0) // (E * triton.cdiv(B, BR)))
    for BU in (32 if gates == 1 else 16, 8 if HP > 128 else 32, 64, 128):
        CG = triton.cdiv(H, BU)
        if CG <= room and 4 * HP * (2 * BU * gates + 2 * BR) <= SHARED:
            KS = min(8, HP // 16)
            return Blocks(BR, BU, HP // KS, CG, warps=8, KS=KS)
    CG = min(room, triton.cdiv(H, 16))
    return Blocks(BR, 16, 64, CG)


def precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


class Run:
    """A forward pass of E networks, and what its backward pass needs."""

    def __init__(
        self,
        inputs: Inputs,
        rules: Rules,
        *,
        keep: bool,
        seen: bool = False,
        blocks: Blocks | None = None,
        prec: str | None = None,
    ) -> None:
        self.inputs, self.rules, self.keep = inputs, rules, keep or seen
        self.E, self.T, self.B, self.H = *inputs.x.shape[:3], inputs.h.shape[2]
        self.device = inputs.h.device
        self.blocks = blocks or blocks_for(self.device, self.E, self.B, self.H, rules.kind.gates)
        self.groups = triton.cdiv(self.B, self.blocks.BR)
        self.limit = min(rules.force_steps or rules.max_steps, 2**31 - 1)
        self.prec = prec or precision()
        self.shape = (self.E, self.T, self.B, self.H, rules.kind, self.limit, self.blocks)
        self.capacity = self.guess() if self.keep else 0
        self.out: Any = self.forward()
        if seen:
            self.make_room()

    def guess(self) -> int:
        """Updates of a row group that the tape has room for."""
        most, kind = self.T * self.limit, self.rules.kind
        each = 4 * self.E * self.groups * self.blocks.BR * self.H * (kind.slots + kind.leaves)
        if self.rules.force_steps is not None or most * each <= SMALL_TAPE:
            return most
        return min(most, _updates.get(self.shape, 8 * self.T))

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device)

    def meta(self, **options: Any) -> dict[str, Any]:
        """What both kernels are made for, in the order of their parameters."""
        k, kind = self.blocks, self.rules.kind
        made: dict[str, Any] = dict(CELL=KINDS.index(kind), GATES=kind.gates, SLOTS=kind.slots, **options)
        made |= dict(FORCED=self.rules.force_steps is not None, BR=k.BR, BU=k.BU)
        size = dict(CG=k.CG, CGP=triton.next_power_of_2(k.CG))
        if k.KS:
            return made | dict(KS=k.KS, KB=k.BK) | size | dict(EXACT=self.prec != "tf32")
        return made | dict(BK=k.BK, NB=triton.cdiv(triton.cdiv(self.H, k.BU), k.CG)) | size | dict(PREC=self.prec)

    def launch(self, kernel: Any, options: dict[str, Any], users: tuple[Tensor | None, ...], *args: Any) -> None:
        """Start a kernel. A kernel that was built before for the same numbers is started without Triton's look at
        every argument; what it was built for includes how the users' tensors are aligned."""
        k, grid = self.blocks, (self.blocks.CG, self.groups, self.E)
        aligned = tuple(a is None or a.data_ptr() % 16 == 0 for a in users)
        key = (kernel, self.shape, self.X, self.prec, self.rules.force_steps, self.device, aligned, *options.values())
        if key in _built:
            built, constants = _built[key]
            built[grid](*args, *constants)
            return
        meta = self.meta(**options)
        launcher = {"launch_cooperative_grid": True} if k.CG > 1 else {}
        built = kernel[grid](*args, **meta, num_warps=k.warps, num_stages=k.stages, **launcher)
        if built is not None:  # the interpreter builds nothing
            _built[key] = built, tuple(meta.values())

    def forward(self) -> Outputs:
        i, rules, E, T, B, H = self.inputs, self.rules, self.E, self.T, self.B, self.H
        kind, k = rules.kind, self.blocks
        xw, bias_n = project(i, kind)
        xw = xw.contiguous()
        self.X, front = xw.shape[3], rules.front(E)
        mean, h, remainder = self.new(*front, T, B, H), self.new(*front, B, H), self.new(*front, T, B)
        c = self.new(*front, B, H) if kind is LSTM else None
        steps_out = self.new(*front, T, B, dtype=torch.int64)
        self.steps = self.new(E, T, B, dtype=torch.int32)
        rows = E * self.capacity * self.groups * k.BR
        self.prev, self.gates = self.new(rows, H + EXTRAS), self.new(rows, kind.slots * H + EXTRAS)
        self.prev_c = self.new(rows if kind is LSTM else 0, H)
        self.prob, self.p = self.new(rows), self.new(rows)
        self.counts = torch.zeros(3, E * self.groups, dtype=torch.int32, device=self.device)
        self.used = self.counts[0]
        # A kernel writes to the host's memory by itself, and nobody waits for it yet.
        cuda = self.device.type == "cuda"
        self.seen_used = torch.empty(self.used.shape, dtype=torch.int32, pin_memory=cuda) if self.keep else self.used
        flag = i.weight_ih[:, :, -1]
        lengths = None if rules.lengths is None else rules.lengths.to(self.device)
        private = [self.new(E, 4, B, H)]
        if not k.KS:
            private.append(self.new(E, 3, B, H) if kind is LSTM else None)
        users = (
            flag, i.weight_hh.contiguous(), bias_n, i.halt.contiguous(), i.halt_bias, lengths, i.h.contiguous(),
            None if i.c is None else i.c.contiguous(),
        )  # fmt: skip
        self.launch(
            resident_forward if k.KS else forward_kernel,
            {"RAGGED": lengths is not None, "KEEP": self.keep},
            users,
            xw, flag, flag.stride(1), flag.stride(0), *users[1:], mean, h, c, steps_out, remainder, *private,
            self.steps, self.prev, self.prev_c, self.gates, self.prob, self.p,
            self.new(E, self.groups, 2, k.CG, k.BR), self.used, self.seen_used, self.counts[1],
            T, B, H, self.X, self.limit, 1 - rules.epsilon, self.capacity,
        )  # fmt: skip
        self.event = None
        if self.keep and cuda:
            self.event = torch.cuda.Event()
            self.event.record()
        return Outputs(mean, h, c, steps_out, remainder)

    @property
    def rows(self) -> int:
        """Updates of the longest row group."""
        if self.event is not None:
            self.event.synchronize()
        return int(self.seen_used.max())

    def make_room(self) -> int:
        """Run again with a longer tape if it was too short; returns the slots in use."""
        longest = self.rows
        if longest > self.capacity:
            self.capacity = longest
            self.forward()
        if self.T * self.limit > self.capacity:
            _updates[self.shape] = int(1.1 * longest) + 2
        return longest

    def backward(self, d_mean: Tensor, d_h: Tensor, d_c: Tensor | None, d_remainder: Tensor) -> Sums:
        """The sums of the backward pass. The tape is used up."""
        i, kind, k, E, B, H = self.inputs, self.rules.kind, self.blocks, self.E, self.B, self.H
        longest = self.make_room()
        d_h = d_h.clone(memory_format=torch.contiguous_format)
        d_c = None if d_c is None else d_c.clone(memory_format=torch.contiguous_format)
        d_xw = self.new(E, self.T, B, self.X)
        private = [self.new(E, self.capacity, self.groups, k.CG, k.BR)]
        sizes = [self.T, B, H, self.X]
        if not k.KS:
            private.append(self.new(E, B, H) if kind.slots > 1 else None)
            sizes.append(kind.gates * H)
        users = (i.weight_hh.contiguous(), i.halt.contiguous(), d_mean.contiguous(), d_h, d_c, d_remainder.contiguous())
        self.launch(
            resident_backward if k.KS else backward_kernel, {}, users, *users,
            d_xw, self.steps, self.prev, self.prev_c, self.gates, self.prob, self.p, *private,
            self.used, self.counts[2], *sizes, self.capacity, longest,
        )  # fmt: skip
        rows = longest * self.groups * k.BR
        prev, gates = (a.view(E, -1, a.shape[1])[:, :rows] for a in (self.prev, self.gates))
        prev, gates, S = prev[:, :, : H + 2], gates[:, :, : kind.slots * H + 1], kind.slots * H
        made = torch.mm(gates[0].t(), prev[0])[None] if E == 1 else torch.bmm(gates.transpose(1, 2), prev)
        flag, bias_n = made[:, :S, H + 1], None
        if kind is GRU:
            flag, bias_n = torch.cat([flag[:, : 2 * H], flag[:, 3 * H :]], 1), made[:, 2 * H : 3 * H, H]
        return Sums(
            d_xw, flag, made[:, : kind.gates * H, :H], bias_n, made[:, S:, :H], made[:, S, H : H + 1], d_h, d_c,
        )  # fmt: skip

    def trace(self) -> list[Update]:
        """Every update of the first network."""
        kind, H, BR, groups = self.rules.kind, self.H, self.blocks.BR, self.groups
        shape = (self.capacity, groups, BR)
        prev, gates, prob, p = (
            a.view(self.E, -1, a.shape[-1])[0] if a.dim() == 2 else a.view(self.E, -1)[0]
            for a in (self.prev, self.gates, self.prob, self.p)
        )
        a = [gates[:, k * H : (k + 1) * H] for k in range(kind.slots)]
        visible = a[0]
        if kind is LSTM:
            prev_c = self.prev_c.view(self.E, -1, H)[0]
            visible = a[3] * torch.tanh(a[1] * prev_c + a[0] * a[2])
        elif kind is GRU:
            visible = a[3] + a[1] * (prev[:, :H] - a[3])
        visible, prob, p = visible.reshape(*shape, H), prob.view(shape), p.view(shape)
        steps = torch.zeros(self.T, groups * BR, dtype=torch.int64)
        steps[:, : self.B] = self.steps[0].cpu()
        longest = steps.view(self.T, groups, BR).amax(2)
        start = longest.cumsum(0) - longest
        updates = []
        for t in range(self.T):
            for n in range(1, int(longest[t].max()) + 1):
                rows = (steps[t] >= n).nonzero().squeeze(1)
                at = (start[t][rows // BR] + n - 1, rows // BR, rows % BR)
                at = tuple(index.to(self.device) for index in at)
                updates.append(Update(t, n, rows.to(self.device), prob[at], p[at], visible[at]))
        return updates
