"""The loop over input steps and updates in one launch, forward and backward, without a word from the host.

A program has BR rows and BU units of one network; the CG programs of a row group exchange states (forward) and
derivatives (backward) through memory and wait for each other once an update. A row group ends an input step when its
last row has halted. A row that has halted goes on from a state of zeros, with weight 0. A slot of the tape is the BR
rows of an update of a row group.

The weights of a program stay on its multiprocessor: each is read once a call. A product over K = KS KB numbers is cut
into KS, one for each warp, and the parts are added at the end. In float32 each factor is the sum of two that tensor
cores multiply exactly, and the product of the two small ones is left out.
"""

import triton
import triton.language as tl

from pondertime.fused.triton_math import (
    gru_backward,
    gru_forward,
    lstm_backward,
    lstm_forward,
    rnn_backward,
    rnn_forward,
    sigmoid,
    tanh,
)
from pondertime.fused.triton_tape import (
    EXTRA,
    FLOAT32,
    GRU,
    HALF,
    LSTM,
    RNN_RELU,
    clear_slots,
    leave,
    row_sums,
    state_of,
    tape_parts,
    wait_for_all,
)


@triton.jit
def leading(x):
    """x cut to the 10 bits after the point that tensor cores see."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def product(a, w, rest, PRECISION: tl.constexpr):
    """a [KS, BR, KB] times w + rest [KS, KB, BU], summed over KS."""
    if PRECISION == FLOAT32:
        big = leading(a)
        acc = tl.dot(a - big, w, input_precision="tf32")
        acc = tl.dot(big, rest, acc, input_precision="tf32")
        acc = tl.dot(big, w, acc, input_precision="tf32")
    elif PRECISION == HALF:
        acc = tl.dot(a.to(tl.bfloat16), w)
    else:
        acc = tl.dot(a, w, input_precision="tf32")
    return tl.sum(acc, 0)


@triton.jit
def take_weight(at, inside, PRECISION: tl.constexpr):
    """A block of weights, and what tensor cores would not see of it."""
    w = tl.load(at, mask=inside, other=0.0)
    if PRECISION == HALF:
        w = w.to(tl.bfloat16)
    rest = w
    if PRECISION == FLOAT32:
        big = leading(w)
        rest = w - big
        w = big
    return w, rest


@triton.jit(do_not_specialize=["T", "limit", "capacity"])
def forward_kernel(
    xw, x, flag, flag_stride, flag_size, weight, bias_ih, bias_hh, halt, halt_bias, lengths, h_in, c_in,
    mean_out, h_out, c_out, steps_out, remainder, rho_out, cost_out, work, tape, counts, counters,
    T, B, H, X, limit, threshold, capacity, wide, mean_wide,
    CELL: tl.constexpr, GATES: tl.constexpr, SLOTS: tl.constexpr, RAGGED: tl.constexpr, KEEP: tl.constexpr,
    BIAS: tl.constexpr, FORCED: tl.constexpr, BR: tl.constexpr, BU: tl.constexpr, KS: tl.constexpr, KB: tl.constexpr,
    CG: tl.constexpr, CGP: tl.constexpr, PRECISION: tl.constexpr, XI: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Forward.

    ``mean_wide``: the width of a row of the mean, H or more; then a one comes after the state. ``wide``: that of the
    tape's prev, with the XI numbers of x_t. ``counts``: updates made by each row group, then N of all steps and rows;
    ``counters``: two for each row group, zeros before and after.
    ``work``: states [E, 4, B, H] (s^n in turns of two, then s_t in turns), the programs'
    shares of the logit [E, RG, 2, CG, BR].
    """
    g, rg, e = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups = tl.num_programs(1)
    r = tl.arange(0, BR)
    row = rg * BR + r
    real = row < B
    place = row.to(tl.int64) * H
    plane = tl.cast(B * H, tl.int64)
    xw += e.to(tl.int64) * T * B * X
    mean_out += e.to(tl.int64) * T * B * mean_wide
    weight += e.to(tl.int64) * GATES * H * H
    flag += e.to(tl.int64) * flag_size
    networks = tl.num_programs(2)
    states = work + e * 4 * plane
    parts = work + networks * 4 * plane + (e * groups + rg) * 2 * CG * BR
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
    f = flag + j * flag_stride
    f0 = tl.load(f, mask=column, other=0.0)
    f1, f2, f3 = f0, f0, f0
    if GATES > 1:
        f1 = tl.load(f + H * flag_stride, mask=column, other=0.0)
        f2 = tl.load(f + 2 * H * flag_stride, mask=column, other=0.0)
    if GATES > 3:
        f3 = tl.load(f + 3 * H * flag_stride, mask=column, other=0.0)
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
        at = xw + (t * B + row).to(tl.int64)[:, None] * X + j[None, :]
        x0 = tl.load(at, mask=ok, other=0.0) + b0[None, :]
        x1, x2, x3 = x0, x0, x0
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
        to = mean_out + (t * B + row).to(tl.int64) * mean_wide
        tl.store(to[:, None] + j[None, :], mean, mask=ok)
        tl.store(to + H, here.to(tl.float32), mask=real & (g == 0) & (mean_wide > H))
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
    tl.store(h_out + e * plane + own, s_t, mask=ok)
    if CELL == LSTM:
        tl.store(c_out + e * plane + own, c_t, mask=ok)
    tl.store(cost_out + e * B + row, cost, mask=real & (g == 0))
    tl.store(counts + e * groups + rg, u, mask=g == 0)
    leave(counter, CG)


@triton.jit(do_not_specialize=["T", "capacity", "longest", "stride_t", "stride_b"])
def backward_kernel(
    weight, halt, d_mean, d_h, d_c, d_remainder, stride_t, stride_b, d_xw, h_out, c_out, tape, counts, counters, dots,
    T, B, H, X, capacity, longest, wide,
    CELL: tl.constexpr, GATES: tl.constexpr, SLOTS: tl.constexpr, LAST: tl.constexpr, BY_X: tl.constexpr,
    FORCED: tl.constexpr, BR: tl.constexpr, BU: tl.constexpr, KS: tl.constexpr, KB: tl.constexpr, CG: tl.constexpr,
    CGP: tl.constexpr, PRECISION: tl.constexpr, XI: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Backward: ``gates`` become derivatives, slots without an update up to ``longest`` zeros.

    ``d_h``, ``d_c``: derivatives by the last state, where LAST; ``h_out``, ``c_out``: those by the first.
    ``stride_t``, ``stride_b``: of d_remainder. ``d_xw``: by W_x x_t, where BY_X.
    ``dots [E, capacity, RG, CG, BR]``: the programs' shares of G . s^n.
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
        G += tl.load(d_mean + at[:, None] * H + j[None, :], mask=ok & here[:, None], other=0.0)
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
