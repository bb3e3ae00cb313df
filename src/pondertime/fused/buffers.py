"""The memory of a segment of the plain calls, with all its views, used again by later segments of the same shape.

Making a view costs half a call, and fresh memory its first touch; so segments are lent and given back.
"""

import torch
from torch import Tensor

from pondertime.fused.common import GRU, LSTM, CellKind

# Bytes that are kept for later, of all segments that nobody uses.
KEPT = 64 * 2**20


class Pool:
    """Segments that nobody uses, by their shape, and how many bytes they hold."""

    def __init__(self) -> None:
        self.free: dict[tuple[object, ...], list[Buffers]] = {}
        self.held = 0


pool = Pool()


class Buffers:
    """States and activations of up to ``room`` updates of m rows, and their derivatives on the way back.

    Without a way back (``keep``) all updates have their activations in the same place.
    """

    def __init__(self, key: tuple[object, ...], kind: CellKind, like: Tensor, room: int, keep: bool) -> None:
        (leaves, m, H), self.key, self.kind, self.room = like.shape, key, kind, room
        slots = room if keep else 1
        self.states = like.new_empty(leaves, room + 1, m, H)  # before the segment, then after each update
        self.at, self.h, self.after = self.states.unbind(1), self.states[0].unbind(), self.states[0, 1:].flatten(0, 1)
        self.nbytes = self.states.nbytes * (2 if keep else 1)
        self.parts: dict[int, Part] = {}
        self.grads_room = 0
        if kind.slots == 1:
            return
        self.gates = like.new_empty(slots, m, 4, H)  # of an LSTM i, f, g, o, of a GRU r, z, U_n h + b, n
        self.nbytes += (2 if keep else 1) * self.gates.nbytes
        flat = self.gates.flatten(2)
        # The sums of an update, [m, P] each.
        self.rows = (flat[:, :, : 3 * H] if kind is GRU else flat).expand(room, -1, -1).unbind()
        self.each_gate = [a.unbind(1) for a in self.gates.expand(room, -1, -1, -1).unbind()]
        if kind is LSTM:
            self.c, self.tanh_c = self.states[1].unbind(), like.new_empty(slots, m, H)
            self.tanh = self.tanh_c.expand(room, -1, -1).unbind()
        else:
            self.sigmoids = [a[:, : 2 * H] for a in self.rows]

    def part(self, size: int) -> "Part":
        """The first updates and their derivatives."""
        if size > self.grads_room:
            self.grads(size)
        if size not in self.parts:
            self.parts[size] = Part(self, size)
        return self.parts[size]

    def grads(self, size: int) -> None:
        """Memory for the derivatives of the first updates."""
        leaves, _, m, H = self.states.shape
        self.parts, self.grads_room = {}, size
        self.d_states = self.states.new_empty(leaves, size + 1, m, H)
        self.d_at, self.d_h = self.d_states.unbind(1), self.d_states[0].unbind()
        if self.kind.slots == 1:
            # The derivative by a state becomes that by the sums it was made of.
            self.d_sums = self.d_states[0, 1:]
            return
        self.d_gates = self.gates.new_empty(size, m, 4, H)
        self.d_sums = self.d_gates.flatten(2)
        self.d_rows = (self.d_sums[:, :, : 3 * H] if self.kind is GRU else self.d_sums).unbind()
        self.wide = self.d_states[-1].unsqueeze(2).unbind()
        if self.kind is GRU:
            self.d_each, self.z = self.d_gates.unbind(), self.gates[:, :, 1].unbind()
            return
        self.d_c, self.f = self.d_states[1].unbind(), self.gates[:, :, 1].unbind()
        self.d_o, self.by_c = self.d_gates[:, :, 3].unbind(), self.d_gates[:, :, :3].unbind()
        self.through = self.tanh_c.new_empty(size, m, H)
        self.through_rows = self.through.unbind()

    def give_back(self) -> None:
        """Nobody needs what is in it any more."""
        if pool.held + self.nbytes <= KEPT:
            pool.held += self.nbytes
            pool.free.setdefault(self.key, []).append(self)


class Part:
    """Views of the first ``size`` updates of a segment and of their derivatives."""

    def __init__(self, b: Buffers, size: int) -> None:
        self.size = size
        self.before, self.after = (b.states[0, k : k + size].flatten(0, 1) for k in (0, 1))  # [size m, H]
        self.states, self.d_states = b.states[:, 1 : size + 1], b.d_states[:, 1 : size + 1]
        self.d_h = self.d_states[0]
        self.d_sums = b.d_sums[:size]
        self.d_flat, self.d_first = self.d_sums.flatten(0, 1), self.d_sums[0].t()
        if b.kind.slots > 1:
            self.gates, self.d_gates = b.gates[:size].unbind(2), b.d_gates[:size].unbind(2)
            self.past = b.states[-1, :size]
        if b.kind is LSTM:
            self.tanh_c, self.through = b.tanh_c[:size], b.through[:size]


def lend(kind: CellKind, like: Tensor, room: int, *, keep: bool) -> Buffers:
    """Memory for a segment of ``room`` updates of states ``[leaves, m, H]``."""
    key = (kind.name, like.shape, like.dtype, room, keep)
    try:
        buffers = pool.free[key].pop()
    except (KeyError, IndexError):
        # Used again in whatever mode.
        with torch.inference_mode(False), torch.no_grad():
            return Buffers(key, kind, like, room, keep)
    pool.held -= buffers.nbytes
    return buffers


def forget() -> None:
    """Free what is kept for later."""
    pool.free.clear()
    pool.held = 0
