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
    """States and activations of up to ``room`` updates of m rows, and their derivatives on the way back."""

    def __init__(self, key: tuple[object, ...], kind: CellKind, like: Tensor, room: int) -> None:
        (leaves, m, H), self.key, self.kind, self.room = like.shape, key, kind, room
        self.states = like.new_empty(leaves, room + 1, m, H)  # before the segment, then after each update
        self.before, self.after, self.h = self.states[:, 0], self.states[:, 1:], self.states[0].unbind()
        if kind.slots == 1:
            self.sums = self.states[0, 1:]  # [room, m, P] the sums of an update; an RNN's become its state
        else:
            self.gates = like.new_empty(room, m, 4, H)  # of an LSTM i, f, g, o, of a GRU r, z, U_n h + b, n
            flat = self.gates.view(room, m, 4 * H)
            self.sums = flat[:, :, : 3 * H] if kind is GRU else flat
            self.rows = self.sums.unbind()
            self.each_gate = [a.unbind(1) for a in self.gates.unbind()]
        self.first, self.later = self.sums[0], self.sums[1:]
        if kind is LSTM:
            self.c, self.tanh_c = self.states[1].unbind(), like.new_empty(room, m, H)
            self.tanh = self.tanh_c.unbind()
        if kind is GRU:
            self.inner, self.sigmoids = like.new_empty(room, m, H), self.sums[:, :, : 2 * H].unbind()
        self.has_grads = False
        self.nbytes = 2 * (1 + kind.slots) * self.states.nbytes  # about, derivatives included

    def grads(self) -> None:
        """Memory for the derivatives, once."""
        if self.has_grads:
            return
        self.has_grads = True
        self.d_states = torch.empty_like(self.states)
        self.d_h = self.d_states[0].unbind()
        if self.kind.slots == 1:
            self.d_sums = torch.empty_like(self.sums)
            self.d_rows = self.d_sums.unbind()
            return
        self.d_gates = torch.empty_like(self.gates)
        self.d_sums = self.d_gates.flatten(2)
        self.d_rows = (self.d_sums[:, :, : 3 * self.gates.shape[3]] if self.kind is GRU else self.d_sums).unbind()
        if self.kind is GRU:
            self.wide, self.d_each = self.d_states[0].unsqueeze(2).unbind(), self.d_gates.unbind()
            self.z = self.gates[:, :, 1].unbind()
            return
        self.d_c, self.wide = self.d_states[1].unbind(), self.d_states[1].unsqueeze(2).unbind()
        self.d_o, self.by_c = self.d_gates[:, :, 3].unbind(), self.d_gates[:, :, :3].unbind()
        self.f = self.gates[:, :, 1].unbind()
        self.through = torch.empty_like(self.tanh_c)
        self.through_rows = self.through.unbind()

    def give_back(self) -> None:
        """Nobody needs what is in it any more."""
        if pool.held + self.nbytes <= KEPT:
            pool.held += self.nbytes
            pool.free.setdefault(self.key, []).append(self)


def lend(kind: CellKind, like: Tensor, room: int) -> Buffers:
    """Memory for a segment of ``room`` updates of states ``[leaves, m, H]``."""
    key = (kind, like.shape, like.dtype, like.device, room)
    try:
        buffers = pool.free[key].pop()
    except (KeyError, IndexError):
        return Buffers(key, kind, like, room)
    pool.held -= buffers.nbytes
    return buffers


def forget() -> None:
    """Free what is kept for later."""
    pool.free.clear()
    pool.held = 0
