"""What the kernels share: the tape, sums and barriers of programs that work together.

A row of the tape is one update of one row of the batch. prev: s^{n-1}, a one, x_t where the loop keeps it, whether n is
1, a one, then room.
gates: the activations, in the backward pass the derivatives by a; then the derivative by the logit of update n - 1,
then room.
Rows without an update are zeros by the end of the backward pass, so that one product over the tape gives the
derivatives by the weights; ``triton_weights`` does without the slots that no row of a group needs.
"""

import triton
import triton.language as tl

from pondertime.fused.triton_math import tanh

RNN_RELU = tl.constexpr(1)
LSTM = tl.constexpr(2)
GRU = tl.constexpr(3)
# What a row of gates has beside slots H numbers, and of prev beside H where x is not among them.
EXTRA = tl.constexpr(4)
# How products are made.
TF32 = tl.constexpr(0)
FLOAT32 = tl.constexpr(1)
HALF = tl.constexpr(2)


@triton.jit
def wait_for_all(counter, target, CG: tl.constexpr):
    """A barrier of the programs of a row group: what one wrote before it, all see after it."""
    tl.debug_barrier()
    if CG > 1:
        tl.atomic_add(counter, 1, sem="release", scope="gpu")
        seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
        while seen < target:
            seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
        tl.debug_barrier()


@triton.jit
def leave(counter, CG: tl.constexpr):
    """The last program of a row group leaves its two counters as it found them."""
    if CG > 1:  # noqa: SIM102
        if tl.atomic_add(counter + 1, 1, sem="acq_rel", scope="gpu") == CG - 1:
            tl.store(counter, 0)
            tl.store(counter + 1, 0)


@triton.jit
def tape_parts(tape, rows, wide, H, CELL: tl.constexpr, SLOTS: tl.constexpr):
    """Where prev, with rows of the width ``wide``, gates, c^{n-1}, h^n and p^n begin on a tape of so many rows."""
    gates = tape + rows * wide
    prev_c = gates + rows * (SLOTS * H + EXTRA)
    prob = prev_c
    if CELL == LSTM:
        prob += rows * H
    return tape, gates, prev_c, prob, prob + rows


@triton.jit
def state_of(gates, prev, prev_c, ok, H, CELL: tl.constexpr, SLOTS: tl.constexpr):
    """The activations of updates, what the cell's derivative needs of s^{n-1}, and (s^n, c^n); zeros outside of ``ok``.

    The three say where the first activation, s^{n-1} and c^{n-1} lie.
    """
    a0 = tl.load(gates, mask=ok, other=0.0)
    a1, a2, a3, s0, s, c = a0, a0, a0, a0, a0, a0
    if SLOTS > 1:
        a1 = tl.load(gates + H, mask=ok, other=0.0)
        a2 = tl.load(gates + 2 * H, mask=ok, other=0.0)
        a3 = tl.load(gates + 3 * H, mask=ok, other=0.0)
    if CELL == LSTM:
        s0 = tl.load(prev_c, mask=ok, other=0.0)
        c = a1 * s0 + a0 * a2
        s = a3 * tanh(c)
    elif CELL == GRU:
        s0 = tl.load(prev, mask=ok, other=0.0)
        s = a3 + a1 * (s0 - a3)
    return a0, a1, a2, a3, s0, s, c


@triton.jit
def clear_slots(prev, gates, u, longest, capacity, e, rg, groups, g, j, H, wide, SLOTS: tl.constexpr, BR: tl.constexpr,
                BU: tl.constexpr, XI: tl.constexpr, BX: tl.constexpr):  # fmt: skip
    """Zeros for the units j, and for a program's share of x, in the slots of a row group that hold no update."""
    r = tl.arange(0, BR)
    i = g * BX + tl.arange(0, BX)
    for empty in range(u, longest):
        slot = ((e * capacity + empty).to(tl.int64) * groups + rg) * BR + r
        ok = (r >= 0)[:, None] & (j < H)[None, :]
        zero = tl.zeros([BR, BU], tl.float32)
        tl.store(prev + slot[:, None] * wide + j[None, :], zero, mask=ok)
        if XI > 0:
            to = prev + slot[:, None] * wide + H + 1 + i[None, :]
            tl.store(to, tl.zeros([BR, BX], tl.float32), mask=(r >= 0)[:, None] & (i < XI)[None, :])
        to = gates + slot[:, None] * (SLOTS * H + EXTRA) + j[None, :]
        for k in tl.static_range(SLOTS):
            tl.store(to + k * H, zero, mask=ok)
        if g == 0:
            tl.store(prev + slot * wide + H, tl.zeros([BR], tl.float32))
            tl.store(prev + slot * wide + H + 1 + XI, tl.zeros([BR], tl.float32))
            tl.store(prev + slot * wide + H + 2 + XI, tl.zeros([BR], tl.float32))
            tl.store(gates + slot * (SLOTS * H + EXTRA) + SLOTS * H, tl.zeros([BR], tl.float32))


@triton.jit
def row_sums(parts, CG, BR: tl.constexpr, CGP: tl.constexpr):
    """The sums over programs of ``parts [CG, BR]``."""
    g, r = tl.arange(0, CGP), tl.arange(0, BR)
    return tl.sum(tl.load(parts + g[:, None] * BR + r[None, :], mask=(g < CG)[:, None], other=0.0), 0)
