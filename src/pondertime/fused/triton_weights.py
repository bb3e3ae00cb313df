"""The derivatives by all weights of an RNN or an LSTM from the tape of a small loop, in one launch, each laid out like
its weight: how many updates there were the host need not know.

The same product over the tape as ``Run.by_tape`` makes, of gates [rows, S + 1] and prev [rows, H + 3 + XI]; below it, a
row for each number of the read-out, that of the derivatives by the read-out and the mean states.
"""

import triton
import triton.language as tl

from pondertime.fused.triton_products import leading
from pondertime.fused.triton_tape import EXTRA, FLOAT32, HALF, tape_parts


@triton.jit
def added(acc, a, b, PRECISION: tl.constexpr):
    """acc + a^T b, for a [K, M] and b [K, N].

    Tensor cores round sums towards 0: in float32 they add up no more than K numbers.
    """
    a = tl.trans(a)
    if PRECISION == FLOAT32:
        big_a = leading(a)
        big_b = leading(b)
        part = tl.dot(a - big_a, big_b, input_precision="tf32")
        part = tl.dot(big_a, b - big_b, part, input_precision="tf32")
        return acc + tl.dot(big_a, big_b, part, input_precision="tf32")
    if PRECISION == HALF:
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    return tl.dot(a, b, acc, input_precision="tf32")


@triton.jit(do_not_specialize=["T", "capacity"])
def weights_kernel(
    tape, counts, mean, d_y, made, T, B, H, capacity, wide, mean_wide, total,
    CELL: tl.constexpr, SLOTS: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr, XI: tl.constexpr,
    OUT: tl.constexpr, RG: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile of the product. ``made [E, total]``: by W_x with the flag's column, W_h, b_x, b_h, the halting unit's
    weight and bias, W_y and b_y; RG: the row groups, rounded up."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.program_id(1) * BN + tl.arange(0, BN)
    e, networks = tl.program_id(2), tl.num_programs(2)
    S, groups = SLOTS * H, tl.cdiv(B, BR)
    slot = groups * BR
    rows = networks.to(tl.int64) * slot * capacity
    prev, gates, _, _, _ = tape_parts(tape, rows, wide, H, CELL, SLOTS)
    prev += e.to(tl.int64) * slot * capacity * wide
    gates += e.to(tl.int64) * slot * capacity * (S + EXTRA)
    each = tl.arange(0, RG)
    longest = tl.max(tl.load(counts + e * groups + each, mask=each < groups, other=0), 0)
    used = H + 3 + XI
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, longest * slot, BK):
        q = start + tl.arange(0, BK)
        # Slots after a row group's last update hold anything.
        there = q // slot < tl.load(counts + e * groups + q // BR % groups)
        q = q.to(tl.int64)
        a = tl.load(gates + q[:, None] * (S + EXTRA) + m[None, :], mask=there[:, None] & (m <= S)[None, :], other=0.0)
        b = tl.load(prev + q[:, None] * wide + k[None, :], mask=there[:, None] & (k < used)[None, :], other=0.0)
        acc = added(acc, a, b, PRECISION)
    if OUT > 0:  # noqa: SIM102
        if (tl.program_id(0) + 1) * BM > S + 1:
            o = m - (S + 1)
            wanted = (o >= 0) & (o < OUT)
            mean += e.to(tl.int64) * T * B * mean_wide
            d_y += e.to(tl.int64) * T * B * OUT
            for start in range(0, T * B, BK):
                q = start + tl.arange(0, BK)
                there = q < T * B
                q = q.to(tl.int64)
                here = tl.load(mean + q * mean_wide + H, mask=there, other=0.0) > 0
                a = tl.load(d_y + q[:, None] * OUT + o[None, :], mask=here[:, None] & wanted[None, :], other=0.0)
                state = mean + q[:, None] * mean_wide + k[None, :]
                b = tl.load(state, mask=there[:, None] & (k <= H)[None, :], other=0.0)
                acc = added(acc, a, b, PRECISION)

    # Where the columns of a row lie: s, a one, x and the flag, a one.
    made += e.to(tl.int64) * total
    by_h = S * (XI + 1)
    by_bias = by_h + S * H
    by_halt = by_bias + 2 * S
    by_y = by_halt + H + 1
    row, column = m[:, None], k[None, :]
    to = by_h + row * H + column
    to = tl.where(column == H, by_bias + row, to)
    to = tl.where(column > H, row * (XI + 1) + column - H - 1, to)
    to = tl.where(column == H + 2 + XI, by_bias + S + row, to)
    to = tl.where(row == S, by_halt + column, to)
    if OUT > 0:
        o = row - (S + 1)
        to = tl.where(o >= 0, tl.where(column == H, by_y + OUT * H + o, by_y + o * H + column), to)
    ok = (row < S) & (column < used) | (row >= S) & (row <= S + OUT) & (column <= H)
    tl.store(made + to, acc, mask=ok)
