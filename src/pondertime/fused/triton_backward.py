"""The same loop backwards, in one launch: see ``triton_forward``."""

import triton
import triton.language as tl

from pondertime.fused.triton_math import (
    gru_backward,
    lstm_backward,
    rnn_backward,
    tanh,
)
from pondertime.fused.triton_products import product, take_weight
from pondertime.fused.triton_tape import (
    EXTRA,
    GRU,
    LSTM,
    RNN_RELU,
    clear_slots,
    leave,
    row_sums,
    state_of,
    tape_parts,
    wait_for_all,
)


@triton.jit(do_not_specialize=["T", "capacity", "longest", "stride_t", "stride_b"])
def backward_kernel(
    weight, halt, weight_y, d_mean, d_h, d_c, d_remainder, stride_t, stride_b, d_xw, h_out, c_out, tape, counts,
    counters, dots, T, B, H, X, capacity, longest, wide,
    CELL: tl.constexpr, GATES: tl.constexpr, SLOTS: tl.constexpr, LAST: tl.constexpr, BY_X: tl.constexpr,
    FORCED: tl.constexpr, BR: tl.constexpr, BU: tl.constexpr, KS: tl.constexpr, KB: tl.constexpr, CG: tl.constexpr,
    CGP: tl.constexpr, PRECISION: tl.constexpr, XI: tl.constexpr, BX: tl.constexpr, PROJECT: tl.constexpr,
    KX: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Backward: ``gates`` become derivatives, slots without an update up to ``longest`` zeros.

    ``d_mean``: derivatives by s_t, or by the read-out where OUT, its size, is not 0. ``d_h``, ``d_c``: by the last
    state, where LAST; ``h_out``, ``c_out``: by the first. ``stride_t``, ``stride_b``: of d_remainder. ``d_xw``: by
    W_x x_t, where BY_X. ``dots [E, capacity, RG, CG, BR]``: the programs' shares of G . s^n.
    """
    g, rg, e = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups = tl.num_programs(1)
    r = tl.arange(0, BR)
    row = rg * BR + r
    real = row < B
    weight += e.to(tl.int64) * GATES * H * H
    networks = tl.num_programs(2)
    counter = counters + 2 * (e * groups + rg)
    steps = counts + networks * groups
    all_rows = networks.to(tl.int64) * groups * capacity * BR
    prev, gates, prev_c, prob, weights = tape_parts(tape, all_rows, wide, H, CELL, SLOTS)
    u = tl.load(counts + e * groups + rg)
    j = g * BU + tl.arange(0, BU)
    column = j < H
    ok = real[:, None] & column[None, :]
    own = (e * B + row).to(tl.int64)[:, None] * H + j[None, :]
    inside = (r >= 0)[:, None] & column[None, :]
    width = SLOTS * H + EXTRA
    clear_slots(prev, gates, u, longest, capacity, e, rg, groups, g, j, H, wide, SLOTS, BR, BU, XI, BX)

    blocks = tl.arange(0, KS) * KB
    k = tl.arange(0, KB)
    k_left = blocks[:, None, None] + k[None, None, :]
    left_ok = real[None, :, None] & (k_left < H)
    k_right = blocks[:, None, None] + k[None, :, None]
    right = weight + k_right.to(tl.int64) * H + j[None, None, :]
    right_ok = column[None, None, :] & (k_right < H)
    w0, rest0 = take_weight(right, right_ok, PRECISION)
    w1, rest1, w2, rest2, w3, rest3 = w0, rest0, w0, rest0, w0, rest0
    if GATES > 1:
        w1, rest1 = take_weight(right + H * H, right_ok, PRECISION)
        w2, rest2 = take_weight(right + 2 * H * H, right_ok, PRECISION)
    if GATES > 3:
        w3, rest3 = take_weight(right + 3 * H * H, right_ok, PRECISION)
    w_halt = tl.load(halt + e * H + j, mask=column, other=0.0)
    G = tl.zeros([BR, BU], tl.float32)
    Gc = G
    if LAST:
        G = tl.load(d_h + own, mask=ok, other=0.0)
        if CELL == LSTM:
            Gc = tl.load(d_c + own, mask=ok, other=0.0)
    target = 0

    for back in range(T):
        t = T - 1 - back
        at = (e * T + t).to(tl.int64) * B + row
        N = tl.load(steps + at, mask=real, other=0)
        here = N > 0
        top = tl.max(N, 0)
        u -= top
        start = (e * capacity + u).to(tl.int64)
        if OUT == 0:
            G += tl.load(d_mean + at[:, None] * H + j[None, :], mask=ok & here[:, None], other=0.0)
        for o in tl.static_range(OUT):
            w_y = tl.load(weight_y + (e * OUT + o) * H + j, mask=column, other=0.0)
            d_y = tl.load(d_mean + at * OUT + o, mask=here, other=0.0)
            G += d_y[:, None] * w_y[None, :]
        r_t = tl.load(d_remainder + (e * T + t) * stride_t + row * stride_b, mask=real, other=0.0)
        x0 = tl.zeros([BR, BU], tl.float32)
        x1 = tl.zeros([BR, BU], tl.float32)
        x2 = tl.zeros([BR, BU], tl.float32)
        x3 = tl.zeros([BR, BU], tl.float32)
        D = tl.zeros([BR, BU], tl.float32)
        Dc = tl.zeros([BR, BU], tl.float32)
        end_dot = tl.zeros([BR], tl.float32)
        n = top
        slot = ((start + n - 1) * groups + rg) * BR + r
        run = ok & (n <= N)[:, None] & (n > 0)
        a0, a1, a2, a3, s0, s, c = state_of(
            gates + slot[:, None] * width + j[None, :], prev + slot[:, None] * wide + j[None, :],
            prev_c + slot[:, None] * H + j[None, :], run, H, CELL, SLOTS,
        )  # fmt: skip
        part = tl.sum(G * s, 1)
        if CELL == LSTM:
            part += tl.sum(Gc * c, 1)
        if not FORCED:
            tl.store(dots + (((start + n - 1) * groups + rg) * CG + g) * BR + r, part, mask=(r >= 0) & (n > 0))
        while n > 0:
            slot = ((start + n - 1) * groups + rg) * BR + r
            runs = real & (n <= N)
            run = ok & (n <= N)[:, None]
            p = tl.load(weights + slot, mask=runs, other=0.0)
            d_logit = tl.zeros([BR], tl.float32)
            if not FORCED:  # noqa: SIM102
                if n < top:
                    h = tl.load(prob + slot, mask=runs, other=0.0)
                    here_dots = dots + ((start + n - 1) * groups + rg) * CG * BR
                    dot = row_sums(here_dots, CG, BR, CGP)
                    end_dot = tl.where(n + 1 == N, row_sums(here_dots + groups * CG * BR, CG, BR, CGP), end_dot)
                    d_logit = tl.where(n < N, (dot - end_dot - r_t) * h * (1 - h), 0.0)
            dh = tl.where(run, p[:, None] * G + D + d_logit[:, None] * w_halt[None, :], 0.0)
            if CELL == LSTM:
                a0, a1, a2, a3, Dc = lstm_backward(dh, p[:, None] * Gc + Dc, a0, a1, a2, a3, s0, tanh(c))
            elif CELL == GRU:
                a0, a1, a2, a3, Dc = gru_backward(dh, a0, a1, a2, a3, s0)
            else:
                a0 = rnn_backward(dh, s, CELL == RNN_RELU)
            to = gates + slot[:, None] * width + j[None, :]
            a0 = tl.where(run, a0, 0.0)
            tl.store(to, a0, mask=inside)
            x0 += a0
            if SLOTS > 1:
                a1 = tl.where(run, a1, 0.0)
                a2 = tl.where(run, a2, 0.0)
                a3 = tl.where(run, a3, 0.0)
                Dc = tl.where(run, Dc, 0.0)
                tl.store(to + H, a1, mask=inside)
                tl.store(to + 2 * H, a2, mask=inside)
                tl.store(to + 3 * H, a3, mask=inside)
                x1 += a1
                x2 += a2
                x3 += a3
            if g == 0:
                tl.store(gates + (slot + groups * BR) * width + SLOTS * H, d_logit, mask=(r >= 0) & (n < top))
                tl.store(gates + slot * width + SLOTS * H, tl.zeros([BR], tl.float32), mask=(r >= 0) & (n == 1))
            # The update below: its activations, and its share of G . s^n.
            more = ok & (n - 1 <= N)[:, None] & (n > 1)
            below = slot - groups * BR
            a0, a1, a2, a3, s0, s, c = state_of(
                gates + below[:, None] * width + j[None, :], prev + below[:, None] * wide + j[None, :],
                prev_c + below[:, None] * H + j[None, :], more, H, CELL, SLOTS,
            )  # fmt: skip
            if not FORCED:
                part = tl.sum(G * s, 1)
                if CELL == LSTM:
                    part += tl.sum(Gc * c, 1)
                tl.store(dots + (((start + n - 2) * groups + rg) * CG + g) * BR + r, part, mask=(r >= 0) & (n > 1))
            target += CG
            wait_for_all(counter, target, CG)
            left = gates + (slot * width)[None, :, None] + k_left
            D = product(tl.load(left, mask=left_ok, other=0.0), w0, rest0, PRECISION)
            if GATES > 1:
                D += product(tl.load(left + H, mask=left_ok, other=0.0), w1, rest1, PRECISION)
                D += product(tl.load(left + 2 * H, mask=left_ok, other=0.0), w2, rest2, PRECISION)
            if GATES > 3:
                D += product(tl.load(left + 3 * H, mask=left_ok, other=0.0), w3, rest3, PRECISION)
            if CELL == GRU:
                D += Dc
            n -= 1
        G = tl.where(here[:, None], D, G)
        if CELL == LSTM:
            Gc = tl.where(here[:, None], Dc, Gc)
        if BY_X:
            to = d_xw + at[:, None] * X + j[None, :]
            tl.store(to, x0, mask=ok)
            if SLOTS > 1:
                tl.store(to + H, x1, mask=ok)
            if CELL == LSTM:
                tl.store(to + 2 * H, x2, mask=ok)
                tl.store(to + 3 * H, x3, mask=ok)
            elif CELL == GRU:
                tl.store(to + 2 * H, x3, mask=ok)
    tl.store(h_out + own, G, mask=ok)
    if CELL == LSTM:
        tl.store(c_out + own, Gc, mask=ok)
    leave(counter, CG)
