"""The loop over input steps and updates on a GPU, forward and backward, without a word from the host.

A program has BR rows and every CG-th block of BU units of one network; the CG programs of a row group exchange
states (forward) and derivatives (backward) through memory and wait for each other once an update. A row group ends an
input step when its last row has halted. A row that has halted goes on from a state of zeros, with weight 0.

The tape has a slot of BR rows for each update of a row group. prev: s^{n-1}, a one, whether n is 1, then room.
gates: the activations, in the backward pass the derivatives by a; then the derivative by the logit of update n - 1.
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

RNN_RELU = tl.constexpr(1)
LSTM = tl.constexpr(2)
GRU = tl.constexpr(3)
# What a row of the tape has beside H and slots H numbers.
EXTRA = tl.constexpr(4)


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
def gates_product(source, weight, units, H, a0, a1, a2, a3, row, real, GATES: tl.constexpr, BK: tl.constexpr,
                  PREC: tl.constexpr):  # fmt: skip
    """a_g + s W_g^T for the gates of some units; ``source``, ``row``: where each row's s begins."""
    for k0 in range(0, H, BK):
        k = k0 + tl.arange(0, BK)
        s = tl.load(source + row[:, None] + k[None, :], mask=real[:, None] & (k < H)[None, :], other=0.0)
        at = weight + units[None, :] * H + k[:, None]
        inside = (units < H)[None, :] & (k < H)[:, None]
        a0 = tl.dot(s, tl.load(at, mask=inside, other=0.0), a0, input_precision=PREC)
        if GATES > 1:
            a1 = tl.dot(s, tl.load(at + H * H, mask=inside, other=0.0), a1, input_precision=PREC)
            a2 = tl.dot(s, tl.load(at + 2 * H * H, mask=inside, other=0.0), a2, input_precision=PREC)
        if GATES > 3:
            a3 = tl.dot(s, tl.load(at + 3 * H * H, mask=inside, other=0.0), a3, input_precision=PREC)
    return a0, a1, a2, a3


@triton.jit
def state_product(d, weight, units, P, H, acc, row, real, BK: tl.constexpr, PREC: tl.constexpr):
    """acc + d W for some units; ``d``, ``row``: where each row's derivatives by the gates begin."""
    for k0 in range(0, P, BK):
        k = k0 + tl.arange(0, BK)
        a = tl.load(d + row[:, None] + k[None, :], mask=real[:, None] & (k < P)[None, :], other=0.0)
        w = tl.load(
            weight + k[:, None] * H + units[None, :], mask=(k < P)[:, None] & (units < H)[None, :], other=0.0
        )
        acc = tl.dot(a, w, acc, input_precision=PREC)
    return acc


@triton.jit
def row_sums(parts, CG, BR: tl.constexpr, CGP: tl.constexpr):
    """The sums over programs of ``parts [CG, BR]``."""
    g, r = tl.arange(0, CGP), tl.arange(0, BR)
    return tl.sum(tl.load(parts + g[:, None] * BR + r[None, :], mask=(g < CG)[:, None], other=0.0), 0)


@triton.jit(do_not_specialize=["T", "limit", "capacity"])
def forward_kernel(
    xw, flag, flag_stride, flag_size, weight, bias_n, halt, halt_bias, lengths, h_in, c_in,
    mean, h_out, c_out, steps_out, remainder, states, cells, steps, prev, prev_c, gates, prob, weights, parts,
    used, report, counters,
    T, B, H, X, limit, threshold, capacity,
    CELL: tl.constexpr, GATES: tl.constexpr, SLOTS: tl.constexpr, RAGGED: tl.constexpr, KEEP: tl.constexpr,
    FORCED: tl.constexpr, BR: tl.constexpr, BU: tl.constexpr, BK: tl.constexpr, NB: tl.constexpr,
    CG: tl.constexpr, CGP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Forward. ``states [E, 4, B, H]``: s^n in turns of two, then s_t in turns; ``cells [E, 3, B, H]``: c^n, its mean
    of this step, c_t. ``weights``: p of the tape's rows. ``parts [E, RG, 2, CG, BR]``: shares of the logit."""
    g, rg, e = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups = tl.num_programs(1)
    r = tl.arange(0, BR)
    row = rg * BR + r
    real = row < B
    place = row.to(tl.int64) * H
    plane = tl.cast(B * H, tl.int64)
    xw += e.to(tl.int64) * T * B * X
    mean += e * T * plane
    weight += e.to(tl.int64) * GATES * H * H
    flag += e.to(tl.int64) * flag_size
    halt += e * H
    states += e * 4 * plane
    if CELL == LSTM:
        cells += e * 3 * plane
    parts += (e * groups + rg).to(tl.int64) * 2 * CG * BR
    counter = counters + e * groups + rg
    bias_h = tl.load(halt_bias + e)
    length = tl.where(real, T, 0)
    if RAGGED:
        length = tl.load(lengths + e * B + row, mask=real, other=0).to(tl.int32)
    for b in range(NB):
        j = (b * CG + g) * BU + tl.arange(0, BU)
        ok = real[:, None] & (j < H)[None, :]
        own = place[:, None] + j[None, :]
        given = e * plane + own
        tl.store(states + 3 * plane + own, tl.load(h_in + given, mask=ok, other=0.0), mask=ok)
        if CELL == LSTM:
            tl.store(cells + 2 * plane + own, tl.load(c_in + given, mask=ok, other=0.0), mask=ok)
    target = CG
    wait_for_all(counter, target, CG)
    u = 0
    for t in range(T):
        total = tl.zeros([BR], tl.float32)
        N = tl.zeros([BR], tl.int32)
        R = tl.zeros([BR], tl.float32)
        here = t < length
        running = here
        n = 0
        x_row = (t * B + row).to(tl.int64) * X
        while tl.max(running.to(tl.int32), 0) > 0:
            n += 1
            source = states + tl.where(n == 1, 2 + (t + 1) % 2, (n + 1) % 2) * plane
            made = states + (n % 2) * plane
            first = tl.where(n == 1, 1.0, 0.0)
            slot = ((e * capacity + u).to(tl.int64) * groups + rg) * BR + r
            kept = u < capacity
            part = tl.zeros([BR], tl.float32)
            for b in range(NB):
                j = (b * CG + g) * BU + tl.arange(0, BU)
                ok = real[:, None] & (j < H)[None, :]
                own = place[:, None] + j[None, :]
                at = x_row[:, None] + j[None, :]
                f = flag + j * flag_stride
                a0 = tl.load(xw + at, mask=ok, other=0.0) + first * tl.load(f, mask=j < H, other=0.0)[None, :]
                a1, a2, a3 = a0, a0, a0
                if GATES > 1:
                    f += H * flag_stride
                    a1 = tl.load(xw + at + H, mask=ok, other=0.0) + first * tl.load(f, mask=j < H, other=0.0)[None, :]
                    f += H * flag_stride
                    a2 = tl.load(xw + at + 2 * H, mask=ok, other=0.0)
                    a2 += first * tl.load(f, mask=j < H, other=0.0)[None, :]
                    a3 = a2
                if CELL == LSTM:
                    f += H * flag_stride
                    a3 = tl.load(xw + at + 3 * H, mask=ok, other=0.0)
                    a3 += first * tl.load(f, mask=j < H, other=0.0)[None, :]
                x_v = a2
                if CELL == GRU:
                    a2 = tl.zeros([BR, BU], tl.float32) + tl.load(bias_n + e * H + j, mask=j < H, other=0.0)[None, :]
                a0, a1, a2, a3 = gates_product(source, weight, j, H, a0, a1, a2, a3, place, real, GATES, BK, PREC)
                s0 = tl.load(source + own, mask=ok, other=0.0)
                c0 = s0
                if CELL == LSTM:
                    c0 = tl.load(cells + tl.where(n == 1, 2, 0) * plane + own, mask=ok, other=0.0)
                    a0, a1, a2, a3, c = lstm_forward(a0, a1, a2, a3, c0)
                    s = a3 * tanh(c)
                    tl.store(cells + own, tl.where(running[:, None], c, 0.0), mask=ok)
                elif CELL == GRU:
                    a0, a1, a3, s = gru_forward(a0, a1, a2, x_v, s0)
                else:
                    s = rnn_forward(a0, CELL == RNN_RELU)
                    a0 = s
                s = tl.where(running[:, None], s, 0.0)
                tl.store(made + own, s, mask=ok)
                part += tl.sum(tl.where(ok, s * tl.load(halt + j, mask=j < H, other=0.0)[None, :], 0.0), 1)
                if KEEP:
                    keep = (j < H)[None, :] & kept
                    # Numbers of rows that do not run meet a derivative of 0 and must be finite.
                    s0 = tl.where(running[:, None], s0, 0.0)
                    tl.store(prev + slot[:, None] * (H + EXTRA) + j[None, :], s0, mask=keep)
                    to = gates + slot[:, None] * (SLOTS * H + EXTRA) + j[None, :]
                    tl.store(to, a0, mask=keep)
                    if GATES > 1:
                        tl.store(to + H, a1, mask=keep)
                        tl.store(to + 2 * H, a2, mask=keep)
                        tl.store(to + 3 * H, a3, mask=keep)
                    if CELL == LSTM:
                        tl.store(prev_c + slot[:, None] * H + j[None, :], c0, mask=keep)
            tl.store(parts + (n % 2) * CG * BR + g * BR + r, part)
            target += CG
            wait_for_all(counter, target, CG)

            h = sigmoid(row_sums(parts + (n % 2) * CG * BR, CG, BR, CGP) + bias_h)
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
            for b in range(NB):
                j = (b * CG + g) * BU + tl.arange(0, BU)
                ok = real[:, None] & (j < H)[None, :]
                own = place[:, None] + j[None, :]
                to = mean + t * plane + own
                share = tl.where(running[:, None], p[:, None] * tl.load(made + own, mask=ok, other=0.0), 0.0)
                tl.store(to, share + tl.load(to, mask=ok & (n > 1), other=0.0), mask=ok)
                if CELL == LSTM:
                    to = cells + plane + own
                    share = tl.where(running[:, None], p[:, None] * tl.load(cells + own, mask=ok, other=0.0), 0.0)
                    tl.store(to, share + tl.load(to, mask=ok & (n > 1), other=0.0), mask=ok)
            if KEEP:
                mine = kept & (g == 0)
                tl.store(prob + slot, h, mask=mine)
                tl.store(weights + slot, tl.where(running, p, 0.0), mask=mine)
                tl.store(prev + slot * (H + EXTRA) + H, tl.where(slot >= 0, 1.0, 0.0), mask=mine)
                tl.store(prev + slot * (H + EXTRA) + H + 1, first + tl.zeros([BR], tl.float32), mask=mine)
            running = going
            u += 1
        tl.debug_barrier()
        for b in range(NB):
            j = (b * CG + g) * BU + tl.arange(0, BU)
            ok = real[:, None] & (j < H)[None, :]
            own = place[:, None] + j[None, :]
            to = mean + t * plane + own
            if n == 0:
                tl.store(to, tl.zeros([BR, BU], tl.float32), mask=ok)
            s = tl.load(to, mask=ok & (n > 0), other=0.0)
            old = tl.load(states + (2 + (t + 1) % 2) * plane + own, mask=ok, other=0.0)
            s = tl.where(here[:, None], s, old)
            tl.store(states + (2 + t % 2) * plane + own, s, mask=ok)
            if t == T - 1:
                tl.store(h_out + e * plane + own, s, mask=ok)
            if CELL == LSTM:
                old = tl.load(cells + 2 * plane + own, mask=ok, other=0.0)
                c = tl.where(here[:, None], tl.load(cells + plane + own, mask=ok & (n > 0), other=0.0), old)
                tl.store(cells + 2 * plane + own, c, mask=ok)
                if t == T - 1:
                    tl.store(c_out + e * plane + own, c, mask=ok)
        out = (e * T + t).to(tl.int64) * B + row
        tl.store(steps_out + out, N.to(tl.int64), mask=real & (g == 0))
        tl.store(steps + out, N, mask=real & (g == 0))
        tl.store(remainder + out, R, mask=real & (g == 0))
        target += CG
        wait_for_all(counter, target, CG)
    if g == 0:
        tl.store(used + e * groups + rg, u)
        tl.store(report + e * groups + rg, u)


@triton.jit
def state_of(gates, prev, prev_c, slot, j, ok, H, CELL: tl.constexpr, SLOTS: tl.constexpr):
    """The activations of an update and the state (s^n, c^n) made from them; zeros outside of ``ok``."""
    at = gates + slot[:, None] * (SLOTS * H + EXTRA) + j[None, :]
    a0 = tl.load(at, mask=ok, other=0.0)
    a1, a2, a3, s0, s, c = a0, a0, a0, a0, a0, a0
    if SLOTS > 1:
        a1 = tl.load(at + H, mask=ok, other=0.0)
        a2 = tl.load(at + 2 * H, mask=ok, other=0.0)
        a3 = tl.load(at + 3 * H, mask=ok, other=0.0)
    if CELL == LSTM:
        s0 = tl.load(prev_c + slot[:, None] * H + j[None, :], mask=ok, other=0.0)
        c = a1 * s0 + a0 * a2
        s = a3 * tanh(c)
    elif CELL == GRU:
        s0 = tl.load(prev + slot[:, None] * (H + EXTRA) + j[None, :], mask=ok, other=0.0)
        s = a3 + a1 * (s0 - a3)
    return a0, a1, a2, a3, s0, s, c


@triton.jit
def clear_slots(prev, gates, u, longest, capacity, e, rg, groups, g, j, H, SLOTS: tl.constexpr, BR: tl.constexpr,
                BU: tl.constexpr):  # fmt: skip
    """Zeros for the units j in the slots of a row group that hold no update."""
    r = tl.arange(0, BR)
    for empty in range(u, longest):
        slot = ((e * capacity + empty).to(tl.int64) * groups + rg) * BR + r
        ok = (r >= 0)[:, None] & (j < H)[None, :]
        zero = tl.zeros([BR, BU], tl.float32)
        tl.store(prev + slot[:, None] * (H + EXTRA) + j[None, :], zero, mask=ok)
        to = gates + slot[:, None] * (SLOTS * H + EXTRA) + j[None, :]
        for k in tl.static_range(SLOTS):
            tl.store(to + k * H, zero, mask=ok)
        if g == 0:
            tl.store(prev + slot * (H + EXTRA) + H, tl.zeros([BR], tl.float32))
            tl.store(prev + slot * (H + EXTRA) + H + 1, tl.zeros([BR], tl.float32))
            tl.store(gates + slot * (SLOTS * H + EXTRA) + SLOTS * H, tl.zeros([BR], tl.float32))


@triton.jit(do_not_specialize=["T", "capacity", "longest"])
def backward_kernel(
    weight, halt, d_mean, d_h, d_c, d_remainder, d_xw, steps, prev, prev_c, gates, prob, weights, dots, direct,
    used, counters,
    T, B, H, X, P, capacity, longest,
    CELL: tl.constexpr, GATES: tl.constexpr, SLOTS: tl.constexpr, FORCED: tl.constexpr,
    BR: tl.constexpr, BU: tl.constexpr, BK: tl.constexpr, NB: tl.constexpr, CG: tl.constexpr, CGP: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Backward: ``gates`` become derivatives, slots without an update up to ``longest`` zeros.

    ``d_h``, ``d_c`` come in as derivatives by the last state and go out as those by the first.
    ``dots [E, capacity, RG, CG, BR]``: shares of G . s^n. ``direct [E, B, H]``: what reaches s^{n-1} past the product.
    """
    g, rg, e = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups = tl.num_programs(1)
    r = tl.arange(0, BR)
    row = rg * BR + r
    real = row < B
    place = (e * B + row).to(tl.int64) * H
    weight += e.to(tl.int64) * GATES * H * H
    halt += e * H
    counter = counters + e * groups + rg
    u = tl.load(used + e * groups + rg)
    target = 0

    for b in range(NB):
        j = (b * CG + g) * BU + tl.arange(0, BU)
        clear_slots(prev, gates, u, longest, capacity, e, rg, groups, g, j, H, SLOTS, BR, BU)

    for back in range(T):
        t = T - 1 - back
        column = (e * T + t).to(tl.int64) * B + row
        N = tl.load(steps + column, mask=real, other=0)
        here = N > 0
        top = tl.max(N, 0)
        u -= top
        start = (e * capacity + u).to(tl.int64)
        for b in range(NB):
            j = (b * CG + g) * BU + tl.arange(0, BU)
            ok = real[:, None] & (j < H)[None, :]
            to = d_h + place[:, None] + j[None, :]
            G = tl.load(d_mean + column[:, None] * H + j[None, :], mask=ok & here[:, None], other=0.0)
            tl.store(to, G + tl.load(to, mask=ok, other=0.0), mask=ok)
            for k in tl.static_range(SLOTS):
                if (CELL != GRU) or (k < 3):
                    tl.store(d_xw + column[:, None] * X + k * H + j[None, :], tl.zeros([BR, BU], tl.float32), mask=ok)
        tl.debug_barrier()
        r_t = tl.load(d_remainder + column, mask=real, other=0.0)
        if not FORCED:
            for n in range(1, top + 1):
                slot = ((start + n - 1) * groups + rg) * BR + r
                part = tl.zeros([BR], tl.float32)
                for b in range(NB):
                    j = (b * CG + g) * BU + tl.arange(0, BU)
                    ok = (real & (n <= N))[:, None] & (j < H)[None, :]
                    a0, a1, a2, a3, s0, s, c = state_of(gates, prev, prev_c, slot, j, ok, H, CELL, SLOTS)
                    own = place[:, None] + j[None, :]
                    part += tl.sum(tl.load(d_h + own, mask=ok, other=0.0) * s, 1)
                    if CELL == LSTM:
                        part += tl.sum(tl.load(d_c + own, mask=ok, other=0.0) * c, 1)
                tl.store(dots + (((start + n - 1) * groups + rg) * CG + g) * BR + r, part)
            target += CG
            wait_for_all(counter, target, CG)
        end_dot = tl.zeros([BR], tl.float32)
        if not FORCED:
            q = tl.arange(0, CGP)
            last = ((start + N - 1) * groups + rg) * CG
            end_dot = tl.sum(
                tl.load(
                    dots + (last[None, :] + q[:, None]) * BR + r[None, :],
                    mask=(q < CG)[:, None] & here[None, :],
                    other=0.0,
                ),
                0,
            )

        for m in range(top):
            n = top - m
            slot = ((start + n - 1) * groups + rg) * BR + r
            run = real & (n <= N)
            p = tl.load(weights + slot, mask=run, other=0.0)
            d_logit = tl.zeros([BR], tl.float32)
            if not FORCED:
                h = tl.load(prob + slot, mask=run, other=0.0)
                dot = row_sums(dots + ((start + n - 1) * groups + rg) * CG * BR, CG, BR, CGP)
                d_logit = tl.where(n < N, (dot - end_dot - r_t) * h * (1 - h), 0.0)
            if g == 0:
                if n < top:
                    tl.store(gates + (slot + groups * BR) * (SLOTS * H + EXTRA) + SLOTS * H, d_logit)
                if n == 1:
                    tl.store(gates + slot * (SLOTS * H + EXTRA) + SLOTS * H, tl.zeros([BR], tl.float32))
            for b in range(NB):
                j = (b * CG + g) * BU + tl.arange(0, BU)
                ok = run[:, None] & (j < H)[None, :]
                own = place[:, None] + j[None, :]
                G = tl.load(d_h + own, mask=ok, other=0.0)
                dh = p[:, None] * G + d_logit[:, None] * tl.load(halt + j, mask=j < H, other=0.0)[None, :]
                if n < top:
                    # Rows that end here met zeros in the slot above.
                    above = (slot + groups * BR) * (SLOTS * H + EXTRA)
                    dh = state_product(gates, weight, j, P, H, dh, above, real, BK, PREC)
                a0, a1, a2, a3, s0, s, c = state_of(gates, prev, prev_c, slot, j, ok, H, CELL, SLOTS)
                if CELL == LSTM:
                    dc = p[:, None] * tl.load(d_c + own, mask=ok, other=0.0)
                    dc += tl.load(direct + own, mask=ok & (n < N)[:, None], other=0.0)
                    a0, a1, a2, a3, dc = lstm_backward(dh, dc, a0, a1, a2, a3, s0, tanh(c))
                    tl.store(direct + own, dc, mask=ok)
                elif CELL == GRU:
                    dh += tl.load(direct + own, mask=ok & (n < N)[:, None], other=0.0)
                    a0, a1, a2, a3, past = gru_backward(dh, a0, a1, a2, a3, s0)
                    tl.store(direct + own, past, mask=ok)
                else:
                    a0 = rnn_backward(dh, s, CELL == RNN_RELU)
                live = run[:, None]
                inside = (r >= 0)[:, None] & (j < H)[None, :]
                to = gates + slot[:, None] * (SLOTS * H + EXTRA) + j[None, :]
                by_x = d_xw + column[:, None] * X + j[None, :]
                tl.store(to, tl.where(live, a0, 0.0), mask=inside)
                tl.store(by_x, a0 + tl.load(by_x, mask=ok, other=0.0), mask=ok)
                if SLOTS > 1:
                    tl.store(to + H, tl.where(live, a1, 0.0), mask=inside)
                    tl.store(to + 2 * H, tl.where(live, a2, 0.0), mask=inside)
                    tl.store(to + 3 * H, tl.where(live, a3, 0.0), mask=inside)
                    tl.store(by_x + H, a1 + tl.load(by_x + H, mask=ok, other=0.0), mask=ok)
                if CELL == LSTM:
                    tl.store(by_x + 2 * H, a2 + tl.load(by_x + 2 * H, mask=ok, other=0.0), mask=ok)
                    tl.store(by_x + 3 * H, a3 + tl.load(by_x + 3 * H, mask=ok, other=0.0), mask=ok)
                elif CELL == GRU:
                    tl.store(by_x + 2 * H, a3 + tl.load(by_x + 2 * H, mask=ok, other=0.0), mask=ok)
            target += CG
            wait_for_all(counter, target, CG)

        if top > 0:
            slot = (start * groups + rg) * BR + r
            for b in range(NB):
                j = (b * CG + g) * BU + tl.arange(0, BU)
                ok = (real & here)[:, None] & (j < H)[None, :]
                own = place[:, None] + j[None, :]
                D = tl.zeros([BR, BU], tl.float32)
                if CELL == GRU:
                    D = tl.load(direct + own, mask=ok, other=0.0)
                D = state_product(gates, weight, j, P, H, D, slot * (SLOTS * H + EXTRA), real, BK, PREC)
                tl.store(d_h + own, D, mask=ok)
                if CELL == LSTM:
                    tl.store(d_c + own, tl.load(direct + own, mask=ok, other=0.0), mask=ok)
        tl.debug_barrier()
