"""The memory of a segment of the plain calls, with all its views, used again by later segments of the same shape.

Making a view costs half a call, and fresh memory its first touch; so segments are lent and given back.
"""

from typing import Any

import torch
from torch import Tensor

from pondertime.fused.common import GRU, LSTM, CellKind

# Bytes that are kept for later, of all segments that nobody uses.
KEPT = 64 * 2**20


class Pool:
    """What nobody uses, by its shape, and how many bytes that is."""

    def __init__(self) -> None:
        self.free: dict[tuple[object, ...], list[Any]] = {}
        self.held = 0


pool = Pool()


class Memory:
    """Something that is lent and given back."""

    key: tuple[object, ...]
    nbytes: int

    def give_back(self) -> None:
        """Nobody needs what is in it any more."""
        if pool.held + self.nbytes <= KEPT:
            pool.held += self.nbytes
            pool.free.setdefault(self.key, []).append(self)


class Buffers(Memory):
    """States and activations of up to ``room`` updates of m rows.

    Without a way back (``keep``) all updates have their activations in the same place.
    """

    def __init__(self, kind: CellKind, like: Tensor, room: int, *, keep: bool) -> None:
        (leaves, m, H), self.kind, self.room, self.keep = like.shape, kind, room, keep
        if kind is LSTM and keep:
            # Beside the state before an update what its gates are multiplied by, in their order: g, c, 4 i, tanh c.
            self.record = like.new_empty(room + 1, m, 5, H)
            self.states = self.record[:, :, 0:3:2].permute(2, 0, 1, 3)
            self.tanh_g, self.tanh_c = self.record[:, :, 1].unbind(), self.record[:, :, 4].unbind()
        else:
            self.states = like.new_empty(leaves, room + 1, m, H)  # before the segment, then after each update
        self.at, self.h = self.states.unbind(1), self.states[0].unbind()
        self.after = self.states[0, 1:].flatten(0, 1)
        self.p = like.new_empty(room, m, 1)
        self.p_rows, self.p_array = self.p.unbind(), self.p.squeeze(2).numpy()
        self.parts: dict[int, Part] = {}
        self.nbytes = self.record.nbytes if kind is LSTM and keep else self.states.nbytes
        if kind.slots == 1:
            return
        # Of an LSTM i, f, g, o, which turn into derivatives on the way back; of a GRU r, z, U_n h + b, n.
        self.gates = like.new_empty(room if keep else 1, m, 4, H)
        self.nbytes += self.gates.nbytes
        flat = self.gates.flatten(2)
        # The sums of an update, [m, P] each.
        self.rows = (flat[:, :, : 3 * H] if kind is GRU else flat).expand(room, -1, -1).unbind()
        self.each_gate = [a.unbind(1) for a in self.gates.expand(room, -1, -1, -1).unbind()]
        if kind is GRU:
            self.sigmoids = [a[:, : 2 * H] for a in self.rows]
            return
        self.c, self.by_c = self.states[1].unbind(), self.gates[:, :, :3].unbind()
        if not keep:
            self.tanh_g = self.tanh_c = like.new_empty(m, H).expand(room, -1, -1).unbind()

    def part(self, size: int) -> "Part":
        """The first updates only."""
        if size not in self.parts:
            self.parts[size] = Part(self, size)
        return self.parts[size]


class Part:
    """Views of the first ``size`` updates of a segment."""

    def __init__(self, b: Buffers, size: int) -> None:
        self.size, self.rows = size, size * b.states.shape[2]
        self.before, self.after = (b.states[0, k : k + size].flatten(0, 1) for k in (0, 1))  # [size m, H]
        self.states, self.p = b.states[:, 1 : size + 1], b.p[:size]
        if b.kind is GRU:
            self.each_gate, self.past = b.gates[:size].unbind(2), b.states[0, :size]
        if b.kind is LSTM and b.keep:
            record, self.gates = b.record[:size], b.gates[:size]
            self.beside, self.i_4, self.tanh_c = record[:, :, 1:], record[:, :, 3], record[:, :, 4]
            self.i, self.f, _, self.o = self.gates.unbind(2)
            self.d = Sums(self.gates.flatten(2))


class Sums:
    """Derivatives by the sums of updates, ``[size, m, slots H]``."""

    def __init__(self, sums: Tensor) -> None:
        self.sums, self.flat, self.first = sums, sums.flatten(0, 1), sums[0]


class Back(Memory):
    """The derivatives by the states before and after ``size`` updates, and by their sums where these lie here."""

    def __init__(self, kind: CellKind, like: Tensor, size: int) -> None:
        leaves, m, H = like.shape
        self.states = like.new_empty(leaves, size + 1, m, H)
        self.at, self.h, self.after = self.states.unbind(1), self.states[0].unbind(), self.states[:, 1:]
        self.h_after, self.wide = self.states[0, 1:], self.states[-1].unsqueeze(2).unbind()
        logit = like.new_empty(size, m)
        self.logit, self.logit_flat, self.logit_array = logit.unsqueeze(2), logit.flatten(), logit.numpy()
        self.nbytes = self.states.nbytes * (4 if kind is GRU else 2)
        if kind.slots == 1:
            # The derivative by a state becomes that by the sums it was made of.
            self.d = Sums(self.h_after)
        elif kind is GRU:
            self.gates = like.new_empty(size, m, 4, H)
            self.each_gate, self.each, self.d = self.gates.unbind(2), self.gates.unbind(), Sums(self.gates.flatten(2))
            self.rows = self.d.sums[:, :, : 3 * H].unbind()
        else:
            self.c, self.f, self.through = self.states[1].unbind(), *like.new_empty(2, size, m, H).unbind()
            self.f_rows, self.through_rows = self.f.unbind(), self.through.unbind()


def lend(make: type[Any], kind: CellKind, like: Tensor, size: int, **options: bool) -> Any:
    """Memory for ``size`` updates of states ``[leaves, m, H]``."""
    key = (make, kind.name, like.shape, like.dtype, size, *options.values())
    try:
        memory = pool.free[key].pop()
    except (KeyError, IndexError):
        # Used again in whatever mode.
        with torch.inference_mode(False), torch.no_grad():
            memory = make(kind, like, size, **options)
        memory.key = key
        return memory
    pool.held -= memory.nbytes
    return memory


def forget() -> None:
    """Free what is kept for later."""
    pool.free.clear()
    pool.held = 0
