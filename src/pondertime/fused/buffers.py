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
        self.grads_room = 0
        # About, derivatives included.
        self.nbytes = like.nbytes * (room + 1) * (2 * (1 + kind.slots) if keep else 1)
        if kind.slots == 1:
            return
        self.gates = like.new_empty(room if keep else 1, m, 4, H)  # of an LSTM i, f, g, o, of a GRU r, z, U_n h + b, n
        flat = self.gates.flatten(2)
        # The sums of an update, [m, P] each.
        self.rows = (flat[:, :, : 3 * H] if kind is GRU else flat).expand(room, -1, -1).unbind()
        self.each_gate = [a.unbind(1) for a in self.gates.expand(room, -1, -1, -1).unbind()]
        if kind is GRU:
            self.sigmoids = [a[:, : 2 * H] for a in self.rows]
            return
        self.c = self.states[1].unbind()
        if not keep:
            self.tanh_g = self.tanh_c = like.new_empty(m, H).expand(room, -1, -1).unbind()

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
        self.d_logit = self.p.new_empty(size, m)
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
        self.through = self.gates.new_empty(size, m, H)
        self.through_rows = self.through.unbind()

    def give_back(self) -> None:
        """Nobody needs what is in it any more."""
        if pool.held + self.nbytes <= KEPT:
            pool.held += self.nbytes
            pool.free.setdefault(self.key, []).append(self)


class Part:
    """Views of the first ``size`` updates of a segment and of their derivatives."""

    def __init__(self, b: Buffers, size: int) -> None:
        self.size, self.rows = size, size * b.states.shape[2]
        self.before, self.after = (b.states[0, k : k + size].flatten(0, 1) for k in (0, 1))  # [size m, H]
        self.states, self.d_states = b.states[:, 1 : size + 1], b.d_states[:, 1 : size + 1]
        self.p, self.d_h, self.d_sums = b.p[:size], self.d_states[0], b.d_sums[:size]
        self.d_flat = self.d_sums.flatten(0, 1)
        d_logit = b.d_logit[:size]
        self.d_logit, self.d_logit_flat, self.d_logit_array = d_logit.unsqueeze(2), d_logit.flatten(), d_logit.numpy()
        if b.kind is GRU:
            self.gates, self.d_gates = b.gates[:size].unbind(2), b.d_gates[:size].unbind(2)
            self.past = b.states[0, :size]
        if b.kind is LSTM:
            record = b.record[:size]
            self.beside, self.gates, self.d_gates = record[:, :, 1:], b.gates[:size], b.d_gates[:size]
            self.i, self.i_4, self.o = self.gates[:, :, 0], record[:, :, 3], self.gates[:, :, 3]
            self.tanh_c, self.through = record[:, :, 4], b.through[:size]


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
