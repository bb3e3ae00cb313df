"""The loop over input steps and updates in one launch forward, without a word from the host.

A program has BR rows and BU units of one network; the CG programs of a row group exchange states (forward) and
derivatives (backward) through memory and wait for each other once an update. A row group ends an input step when its
last row has halted. A row that has halted goes on from a state of zeros, with weight 0. A slot of the tape is the BR
rows of an update of a row group. The weights of a program stay on its multiprocessor: each is read once a call.
"""

import triton
import triton.language as tl

from pondertime.fused.triton_math import (
    gru_forward,
    lstm_forward,
    rnn_forward,
    sigmoid,
    tanh,
)
from pondertime.fused.triton_products import by_weight, product, take_weight
from pondertime.fused.triton_tape import (
    EXTRA,
    GRU,
    LSTM,
    RNN_RELU,
    leave,
    row_sums,
    tape_parts,
    wait_for_all,
)


@triton.jit(do_not_specialize=["T", "limit", "capacity"])
def forward_kernel(
    xw, x, weight_ih, ih_stride, size, weight, bias_ih, bias_hh, halt, halt_bias, lengths, h_in, c_in, weight_y, bias_y,
    y_out, mean_out, h_out, c_out, steps_out, remainder, rho_out, cost_out, work, tape, counts, counters,
    T, B, H, X, limit, threshold, capacity, wide, mean_wide,
    CELL: tl.constexpr, GATES: tl.constexpr, SLOTS: tl.constexpr, RAGGED: tl.constexpr, KEEP: tl.constexpr,
    MEAN: tl.constexpr, BIAS: tl.constexpr, BIAS_Y: tl.constexpr, FORCED: tl.constexpr, BR: tl.constexpr,
    BU: tl.constexpr, KS: tl.constexpr, KB: tl.constexpr, CG: tl.constexpr, CGP: tl.constexpr,
    PRECISION: tl.constexpr, XI: tl.constexpr, BX: tl.constexpr, PROJECT: tl.constexpr,
    KX: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Forward.

    ``xw``: W_x x_t; where PROJECT it is made here, of KS KX features, of which there are ``size``. ``y_out``: the
    read-out, where OUT, its size, is not 0. ``mean_out``: s_t, where MEAN, in rows of ``mean_wide``, H or more; then a
    one comes after the state. ``wide``: the width of the tape's prev, with the XI numbers of x_t. ``counts``: updates
    made by each row group, then N of all steps and rows; ``counters``: two for each row group, zeros before and after.
    ``work``: states [E, 4, B, H] (s^n in turns of two, then s_t in turns), the programs' shares of the logit
    [E, RG, 2, CG, BR], and of the read-out [E, RG, 2, OUT, CG, BR].
    """
    g, rg, e = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups = tl.num_programs(1)
    r = tl.arange(0, BR)
    row = rg * BR + r
    real = row < B
    place = row.to(tl.int64) * H
    plane = tl.cast(B * H, tl.int64)
    if not PROJECT:
        xw += e.to(tl.int64) * T * B * X
    if MEAN:
        mean_out += e.to(tl.int64) * T * B * mean_wide
    weight += e.to(tl.int64) * GATES * H * H
    weight_ih += e.to(tl.int64) * X * ih_stride
    flag = weight_ih + size
    networks = tl.num_programs(2)
    states = work + e * 4 * plane
    parts = work + networks * 4 * plane + (e * groups + rg) * 2 * CG * BR
    y_parts = work + networks * (4 * plane + groups * 2 * CG * BR) + (e * groups + rg) * 2 * OUT * CG * BR
    counter = counters + 2 * (e * groups + rg)
    steps = counts + networks * groups
    all_rows = networks.to(tl.int64) * groups * capacity * BR
    prev, gates, prev_c, prob, weights = tape_parts(tape, all_rows, wide, H, CELL, SLOTS)
    bias_h = tl.load(halt_bias + e)
    length = tl.where(real, T, 0)
    if RAGGED:
        length = tl.load(lengths + e * B + row, mask=real, other=0).to(tl.int32)

    j = g * BU + tl.arange(0, BU)
    column = j < H
    ok = real[:, None] & column[None, :]
    own = place[:, None] + j[None, :]
    blocks = tl.arange(0, KS) * KB
    k = tl.arange(0, KB)
    # Where a product's left side lies, [KS, BR, KB], and its right side, [KS, KB, BU].
    left = place[None, :, None] + (blocks[:, None, None] + k[None, None, :])
    left_ok = real[None, :, None] & (blocks[:, None, None] + k[None, None, :] < H)
    k_right = blocks[:, None, None] + k[None, :, None]
    right = weight + j[None, None, :] * H + k_right
    right_ok = column[None, None, :] & (k_right < H)
    w0, rest0 = take_weight(right, right_ok, PRECISION)
    w1, rest1, w2, rest2, w3, rest3 = w0, rest0, w0, rest0, w0, rest0
    if GATES > 1:
        w1, rest1 = take_weight(right + H * H, right_ok, PRECISION)
        w2, rest2 = take_weight(right + 2 * H * H, right_ok, PRECISION)
    if GATES > 3:
        w3, rest3 = take_weight(right + 3 * H * H, right_ok, PRECISION)
    f = flag + j * ih_stride
    f0 = tl.load(f, mask=column, other=0.0)
    f1, f2, f3 = f0, f0, f0
    if GATES > 1:
        f1 = tl.load(f + H * ih_stride, mask=column, other=0.0)
        f2 = tl.load(f + 2 * H * ih_stride, mask=column, other=0.0)
    if GATES > 3:
        f3 = tl.load(f + 3 * H * ih_stride, mask=column, other=0.0)
    w_halt = tl.load(halt + e * H + j, mask=column, other=0.0)
    b0 = tl.zeros([BU], tl.float32)
    b1, b2, b3, b_n = b0, b0, b0, b0
    if BIAS:
        b_ih = bias_ih + e * X + j
        b_hh = bias_hh + e * GATES * H + j
        b0 = tl.load(b_ih, mask=column, other=0.0) + tl.load(b_hh, mask=column, other=0.0)
        if GATES > 1:
            b1 = tl.load(b_ih + H, mask=column, other=0.0) + tl.load(b_hh + H, mask=column, other=0.0)
            b2 = tl.load(b_ih + 2 * H, mask=column, other=0.0)
            b_n = tl.load(b_hh + 2 * H, mask=column, other=0.0)
        if CELL == LSTM:
            b2 += b_n
            b3 = tl.load(b_ih + 3 * H, mask=column, other=0.0) + tl.load(b_hh + 3 * H, mask=column, other=0.0)

    s_t = tl.load(h_in + e * plane + own, mask=ok, other=0.0)
    c_t = s_t
    if CELL == LSTM:
        c_t = tl.load(c_in + e * plane + own, mask=ok, other=0.0)
    full = tl.load(h_in + e * plane + left, mask=left_ok, other=0.0)
    xk = tl.arange(0, KS)[:, None, None] * KX + tl.arange(0, KX)[None, None, :]
    xw_k = tl.arange(0, KS)[:, None, None] * KX + tl.arange(0, KX)[None, :, None]
    w_x = weight_ih + j[None, None, :] * ih_stride + xw_k
    x_ok = column[None, None, :] & (xw_k < size)
    i = g * BX + tl.arange(0, BX)
    given_x = tl.zeros([BR, BX], tl.float32)
    cost = tl.zeros([BR], tl.float32)
    target = 0
    u = 0
    for t in range(T):
        total = tl.zeros([BR], tl.float32)
        N = tl.zeros([BR], tl.int32)
        R = tl.zeros([BR], tl.float32)
        mean = tl.zeros([BR, BU], tl.float32)
        mean_c = tl.zeros([BR, BU], tl.float32)
        here = t < length
        running = here
        x0 = tl.zeros([BR, BU], tl.float32)
        x1, x2, x3 = x0, x0, x0
        if PROJECT:
            features = x + ((e * T + t).to(tl.int64) * B + row)[None, :, None] * size + xk
            full_x = tl.load(features, mask=real[None, :, None] & (xk < size), other=0.0)
            x0 = b0[None, :] + by_weight(full_x, w_x, x_ok, PRECISION)
            if GATES > 1:
                x1 = b1[None, :] + by_weight(full_x, w_x + H * ih_stride, x_ok, PRECISION)
                x2 = b2[None, :] + by_weight(full_x, w_x + 2 * H * ih_stride, x_ok, PRECISION)
            if GATES > 3:
                x3 = b3[None, :] + by_weight(full_x, w_x + 3 * H * ih_stride, x_ok, PRECISION)
        else:
            at = xw + (t * B + row).to(tl.int64)[:, None] * X + j[None, :]
            x0 = tl.load(at, mask=ok, other=0.0) + b0[None, :]
            if GATES > 1:
                x1 = tl.load(at + H, mask=ok, other=0.0) + b1[None, :]
                x2 = tl.load(at + 2 * H, mask=ok, other=0.0) + b2[None, :]
            if GATES > 3:
                x3 = tl.load(at + 3 * H, mask=ok, other=0.0) + b3[None, :]
        if XI > 0:
            at = x + ((e * T + t).to(tl.int64) * B + row)[:, None] * XI + i[None, :]
            given_x = tl.load(at, mask=real[:, None] & (i < XI)[None, :], other=0.0)
        s0, c0 = s_t, c_t
        n = 0
        while tl.max(running.to(tl.int32), 0) > 0:
            n += 1
            made = states + (n % 2) * plane
            first = tl.where(n == 1, 1.0, 0.0)
            slot = ((e * capacity + u).to(tl.int64) * groups + rg) * BR + r
            kept = u < capacity
            live = running[:, None]
            a0 = x0 + first * f0[None, :] + product(full, w0, rest0, PRECISION)
            a1, a2, a3, c = a0, a0, a0, c0
            if CELL == LSTM:
                a1 = x1 + first * f1[None, :] + product(full, w1, rest1, PRECISION)
                a2 = x2 + first * f2[None, :] + product(full, w2, rest2, PRECISION)
                a3 = x3 + first * f3[None, :] + product(full, w3, rest3, PRECISION)
                a0, a1, a2, a3, c = lstm_forward(a0, a1, a2, a3, c0)
                s = a3 * tanh(c)
            elif CELL == GRU:
                a1 = x1 + first * f1[None, :] + product(full, w1, rest1, PRECISION)
                a2 = b_n[None, :] + product(full, w2, rest2, PRECISION)
                a0, a1, a3, s = gru_forward(a0, a1, a2, x2 + first * f2[None, :], s0)
            else:
                s = rnn_forward(a0, CELL == RNN_RELU)
                a0 = s
            s = tl.where(live, s, 0.0)
            tl.store(made + own, s, mask=ok)
            part = tl.sum(tl.where(ok, s * w_halt[None, :], 0.0), 1)
            tl.store(parts + (n % 2) * CG * BR + g * BR + r, part)
            target += CG
            wait_for_all(counter, target, CG)

            # What the next update needs is fetched before it is known whether there is one.
            full = tl.load(made + left, mask=left_ok, other=0.0)
            h = sigmoid(row_sums(parts + (n % 2) * CG * BR, CG, BR, CGP) + bias_h)
            if KEEP:
                keep = column[None, :] & kept
                # Numbers of rows that do not run meet a derivative of 0 and must be finite.
                tl.store(prev + slot[:, None] * wide + j[None, :], tl.where(live, s0, 0.0), mask=keep)
                if XI > 0:
                    to = prev + slot[:, None] * wide + H + 1 + i[None, :]
                    tl.store(to, given_x, mask=(i < XI)[None, :] & kept)
                to = gates + slot[:, None] * (SLOTS * H + EXTRA) + j[None, :]
                tl.store(to, a0, mask=keep)
                if GATES > 1:
                    tl.store(to + H, a1, mask=keep)
                    tl.store(to + 2 * H, a2, mask=keep)
                    tl.store(to + 3 * H, a3, mask=keep)
                if CELL == LSTM:
                    tl.store(prev_c + slot[:, None] * H + j[None, :], c0, mask=keep)
            if FORCED:
                h = tl.where(n == limit, 1.0, 0.0) + tl.zeros([BR], tl.float32)
                going = running & (n < limit)
                p = h
                last = tl.zeros([BR], tl.float32) + 1.0
            else:
                going = running & (total + h < threshold) & (n < limit)
                last = 1 - total
                p = tl.where(going, h, last)
            N = tl.where(running, n, N)
            R = tl.where(running & (going == 0), last, R)
            total += h
            mean += tl.where(live, p[:, None] * s, 0.0)
            if CELL == LSTM:
                mean_c += tl.where(live, p[:, None] * c, 0.0)
            if KEEP:
                mine = kept & (g == 0)
                tl.store(prob + slot, h, mask=mine)
                tl.store(weights + slot, tl.where(running, p, 0.0), mask=mine)
                ones = tl.zeros([BR], tl.float32) + 1.0
                tl.store(prev + slot * wide + H, ones, mask=mine)
                tl.store(prev + slot * wide + H + 1 + XI, first * ones, mask=mine)
                tl.store(prev + slot * wide + H + 2 + XI, ones, mask=mine)
            s0 = s
            c0 = tl.where(live, c, 0.0)
            running = going
            u += 1
        if MEAN:
            to = mean_out + (t * B + row).to(tl.int64) * mean_wide
            tl.store(to[:, None] + j[None, :], mean, mask=ok)
            tl.store(to + H, here.to(tl.float32), mask=real & (g == 0) & (mean_wide > H))
        shares = y_parts + (t % 2) * OUT * CG * BR
        for o in tl.static_range(OUT):
            w_y = tl.load(weight_y + (e * OUT + o) * H + j, mask=column, other=0.0)
            tl.store(shares + (o * CG + g) * BR + r, tl.sum(mean * w_y[None, :], 1))
        s_t = tl.where(here[:, None], mean, s_t)
        if CELL == LSTM:
            c_t = tl.where(here[:, None], mean_c, c_t)
        out = (e * T + t).to(tl.int64) * B + row
        tl.store(steps_out + out, N.to(tl.int64), mask=real & (g == 0))
        tl.store(steps + out, N, mask=real & (g == 0))
        tl.store(remainder + out, R, mask=real & (g == 0))
        rho = N.to(tl.float32) + R
        tl.store(rho_out + out, rho, mask=real & (g == 0))
        cost += rho
        if t < T - 1:
            given = states + (2 + t % 2) * plane
            tl.store(given + own, s_t, mask=ok)
            target += CG
            wait_for_all(counter, target, CG)
            full = tl.load(given + left, mask=left_ok, other=0.0)
        elif OUT > 0:
            target += CG
            wait_for_all(counter, target, CG)
        for o in tl.static_range(OUT):
            if g == o % CG:
                y = row_sums(shares + o * CG * BR, CG, BR, CGP)
                if BIAS_Y:
                    y += tl.load(bias_y + e * OUT + o)
                tl.store(y_out + out * OUT + o, tl.where(here, y, 0.0), mask=real)
    tl.store(h_out + e * plane + own, s_t, mask=ok)
    if CELL == LSTM:
        tl.store(c_out + e * plane + own, c_t, mask=ok)
    tl.store(cost_out + e * B + row, cost, mask=real & (g == 0))
    tl.store(counts + e * groups + rg, u, mask=g == 0)
    leave(counter, CG)
