"""The loop on a GPU for large states: one library product and one kernel a tick, and no row waits for another.

At a tick every row makes its next update, of whatever input step it has come to; a row that halts begins its next
step at the next tick. So T steps take as many ticks as the row with the most updates makes in all. A program has one
row. The tape has the rows [E, capacity, B], laid out as ``triton_tape`` says.
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
from pondertime.fused.triton_tape import EXTRA, GRU, LSTM, RNN_RELU, state_of, tape_parts


@triton.jit
def take(at, inside):
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["E", "T", "B", "limit", "capacity"])
def tick_forward(
    product, xw, flag, bias, bias_n, halt, halt_bias, lengths, h_in, c_in,
    mean, h_out, c_out, steps_out, remainder, work, short, tape, x_in, prev_short, counts, report,
    E, T, B, limit, threshold, capacity,
    CELL: tl.constexpr, GATES: tl.constexpr, SLOTS: tl.constexpr, RAGGED: tl.constexpr, KEEP: tl.constexpr,
    BIAS: tl.constexpr, FORCED: tl.constexpr, H: tl.constexpr, X: tl.constexpr, BH: tl.constexpr,
    HP: tl.constexpr, SHORT: tl.constexpr, WIDE: tl.constexpr, PW: tl.constexpr, GW: tl.constexpr, XI: tl.constexpr,
    BX: tl.constexpr,
):  # fmt: skip
    """One update of a row.

    ``bias``: b_ih + b_hh; of a GRU's candidate b_ih alone, and ``bias_n`` is b_hh.
    There are programs for the first networks, or for all E. ``product``: W_h s^{n-1} [E, B, P]; where SHORT, of the
    states in ``short`` [E, B, HP], in bfloat16. ``work``: s^{n-1}, c^{n-1} and the mean of c so far [3, E, B, H], the
    halting sum [E, B]. ``counts``: input steps that a row has finished, updates of the one it is at, ticks made forward
    and still to make backward [4, E, B], then t + 1 and n of each row of the tape, n below 0 where the row halts,
    t + 1 = 0 where it does nothing. ``report``: the ticks a row needed, 0 while it runs. ``mean``, ``steps_out`` and
    ``remainder`` come in as zeros where rows differ in length. ``x_in``: the XI features of x that go on the tape.
    """
    b, e = tl.program_id(0), tl.program_id(1)
    rows = E * B
    row = e * B + b
    t = tl.load(counts + row)
    n = tl.load(counts + rows + row) + 1
    tick = tl.load(counts + 2 * rows + row)
    plane = tl.cast(rows, tl.int64) * H
    total = tl.load(work + 3 * plane + row, mask=n > 1, other=0.0)
    tl.debug_barrier()  # all threads have read what one of them writes
    tl.store(counts + 2 * rows + row, tick + 1)
    length = T
    if RAGGED:
        length = tl.load(lengths + row).to(tl.int32)
    slot = (tl.cast(e, tl.int64) * capacity + tick) * B + b
    tape_rows = tl.cast(rows, tl.int64) * capacity
    info = counts + 4 * rows
    kept = tick < capacity
    if KEEP:
        tl.store(info + slot, tl.where(t < length, t + 1, 0), mask=kept)
    if t < length:
        j = tl.arange(0, BH)
        ok = j < H
        own = row.to(tl.int64) * H + j
        first = tl.where(n == 1, 1.0, 0.0)
        begin = (t == 0) & (n == 1)
        s0 = tl.where(begin, take(h_in + own, ok & begin), take(work + own, ok & (begin == 0)))
        x = xw + ((e * T + t).to(tl.int64) * B + b) * X + j
        a = product + row.to(tl.int64) * GATES * H + j
        f = flag + e.to(tl.int64) * X + j
        begins = ok & (n == 1)
        x0 = take(x, ok) + take(f, begins)
        x1, x2, x3, q = x0, x0, x0, x0
        if GATES > 1:
            x1 = take(x + H, ok) + take(f + H, begins)
            x2 = take(x + 2 * H, ok) + take(f + 2 * H, begins)
            q = take(a + 2 * H, ok)
        if GATES > 3:
            x3 = take(x + 3 * H, ok) + take(f + 3 * H, begins)
        if BIAS:
            own_bias = bias + e * X + j
            x0 += take(own_bias, ok)
            if GATES > 1:
                x1 += take(own_bias + H, ok)
                x2 += take(own_bias + 2 * H, ok)
            if GATES > 3:
                x3 += take(own_bias + 3 * H, ok)
            if CELL == GRU:
                q += take(bias_n + e * GATES * H + 2 * H + j, ok)
        a0 = x0 + take(a, ok)
        a1, a2, a3, c, c0 = a0, q, a0, a0, a0
        if GATES > 1:
            a1 = x1 + take(a + H, ok)
        if CELL == LSTM:
            c0 = tl.where(begin, take(c_in + own, ok & begin), take(work + plane + own, ok & (begin == 0)))
            a0, a1, a2, a3, c = lstm_forward(a0, a1, x2 + q, x3 + take(a + 3 * H, ok), c0)
            s = a3 * tanh(c)
        elif CELL == GRU:
            a0, a1, a3, s = gru_forward(a0, a1, q, x2, s0)
        else:
            s = rnn_forward(a0, CELL == RNN_RELU)
            a0 = s
        s = tl.where(ok, s, 0.0)
        h = sigmoid(tl.sum(s * take(halt + e * H + j, ok), 0) + tl.load(halt_bias + e))
        if FORCED:
            h = tl.where(n == limit, 1.0, 0.0)
            going = n < limit
            p = h
            last = 1.0
        else:
            going = (total + h < threshold) & (n < limit)
            last = 1 - total
            p = tl.where(going, h, last)
        to = mean + ((e * T + t).to(tl.int64) * B + b) * H + j
        m = p * s + take(to, ok & (n > 1))
        tl.store(to, m, mask=ok)
        tl.store(work + own, tl.where(going, s, m), mask=ok)
        if SHORT:
            tl.store(short + row.to(tl.int64) * HP + j, tl.where(going, s, m), mask=ok)
        end = (t == length - 1) & (going == 0)
        tl.store(h_out + own, m, mask=ok & end)
        if CELL == LSTM:
            m = p * c + take(work + 2 * plane + own, ok & (n > 1))
            tl.store(work + 2 * plane + own, m, mask=ok)
            tl.store(work + plane + own, tl.where(going, c, m), mask=ok)
            tl.store(c_out + own, m, mask=ok & end)
        if KEEP:
            prev, gates, prev_c, prob, weights = tape_parts(tape, tape_rows, WIDE, H, CELL, SLOTS)
            tl.store(info + tape_rows + slot, tl.where(going, n, -n), mask=kept)
            seen = prev_short + slot * PW if SHORT else prev + slot * PW
            tl.store(seen + j, s0, mask=ok & kept)
            if SHORT and CELL == GRU:
                tl.store(prev + slot * WIDE + j, s0, mask=ok & kept)
            tl.store(seen + H, 1.0, mask=kept)
            if XI > 0:
                i = tl.arange(0, BX)
                own_x = take(x_in + ((e * T + t).to(tl.int64) * B + b) * XI + i, i < XI)
                tl.store(seen + H + 1 + i, own_x, mask=(i < XI) & kept)
            tl.store(seen + H + 1 + XI, first, mask=kept)
            tl.store(seen + H + 2 + XI, 1.0, mask=kept)
            to = gates + slot * (SLOTS * H + EXTRA) + j
            tl.store(to, a0, mask=ok & kept)
            if GATES > 1:
                tl.store(to + H, a1, mask=ok & kept)
                tl.store(to + 2 * H, a2, mask=ok & kept)
                tl.store(to + 3 * H, a3, mask=ok & kept)
            if CELL == LSTM:
                tl.store(prev_c + slot * H + j, c0, mask=ok & kept)
            tl.store(prob + slot, h, mask=kept)
            tl.store(weights + slot, p, mask=kept)
        out = (e * T + t).to(tl.int64) * B + b
        tl.store(steps_out + out, n.to(tl.int64), mask=going == 0)
        tl.store(remainder + out, last, mask=going == 0)
        tl.store(work + 3 * plane + row, total + h)
        tl.store(counts + row, tl.where(going, t, t + 1))
        tl.store(counts + rows + row, tl.where(going, n, 0))
        tl.store(report + row, tick + 1, mask=end)


@triton.jit(do_not_specialize=["E", "T", "B", "capacity", "stride_t", "stride_b"])
def tick_backward(
    product, halt, lengths, d_mean, d_h, d_c, d_remainder, stride_t, stride_b, d_xw, work, short, tape, prev_short,
    gates_short, counts, E, T, B, capacity,
    CELL: tl.constexpr, GATES: tl.constexpr, SLOTS: tl.constexpr, RAGGED: tl.constexpr, LAST: tl.constexpr,
    BY_X: tl.constexpr, FORCED: tl.constexpr, H: tl.constexpr, X: tl.constexpr, BH: tl.constexpr, HP: tl.constexpr,
    SHORT: tl.constexpr, WIDE: tl.constexpr, PW: tl.constexpr, GW: tl.constexpr, XI: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """One update of a row backwards: its slot gets derivatives, or zeros where there is no update.

    The ticks to make go down to 0; beyond that nothing happens. ``short`` [E, B, P] gets the derivatives that the
    product sees, in its own type. Unless SHORT they take the place of the activations on the tape; else they go to
    ``gates_short``, in rows of GW, beside ``prev_short`` in rows of PW: what the product over the tape sees.
    ``product`` [E, B, HP]: derivatives by s^n that came from update n + 1, or from the next input step. ``work``: G, G
    of c, what reached s^{n-1} or c^{n-1} past the product [3, E, B, H], G . s^N [E, B].
    """
    b, e = tl.program_id(0), tl.program_id(1)
    rows = E * B
    row = e * B + b
    tick = tl.load(counts + 3 * rows + row) - 1
    made = tl.load(counts + 2 * rows + row)
    tl.debug_barrier()
    tl.store(counts + 3 * rows + row, tick)
    j = tl.arange(0, BH)
    ok = j < H
    slot = (tl.cast(e, tl.int64) * capacity + tick) * B + b
    tape_rows = tl.cast(rows, tl.int64) * capacity
    prev, gates, prev_c, prob, weights = tape_parts(tape, tape_rows, WIDE, H, CELL, SLOTS)
    if SHORT:
        seen, derived = prev_short, gates_short
    else:
        seen, derived = prev, gates
    info = counts + 4 * rows
    t = tl.load(info + slot, mask=(tick >= 0) & (tick < made), other=0) - 1
    to = derived + slot * GW + j
    d = short + row.to(tl.int64) * GATES * H + j
    if tick < 0:
        tl.store(counts + 3 * rows + row, 0)
    elif t < 0:
        zero = tl.zeros([BH], tl.float32)
        for k in tl.static_range(GATES):
            tl.store(d + k * H, zero, mask=ok)
        seen += slot * PW
        tl.store(seen + j, zero, mask=ok)
        for k in tl.static_range(SLOTS):
            tl.store(to + k * H, zero, mask=ok)
        rest = tl.arange(0, BX)
        tl.store(seen + H + rest, tl.zeros([BX], tl.float32), mask=rest < XI + 3)
        tl.store(derived + slot * GW + SLOTS * H, 0.0)
    else:
        n = tl.load(info + tape_rows + slot)
        ends = n < 0
        n = tl.abs(n)
        length = T
        if RAGGED:
            length = tl.load(lengths + row).to(tl.int32)
        # At a row's last update G comes from the caller, at the last of another step from the step after it.
        final = ends & (t == length - 1)
        plane = tl.cast(rows, tl.int64) * H
        own = row.to(tl.int64) * H + j
        at = (e * T + t).to(tl.int64) * B + b
        D = take(product + row.to(tl.int64) * HP + j, ok & (final == 0))
        past = take(work + 2 * plane + own, ok & (final == 0))
        if CELL == GRU:
            D += past
        fresh = D + take(d_mean + at * H + j, ok & ends)
        if LAST:
            fresh += take(d_h + own, ok & final)
        G = tl.where(ends, fresh, take(work + own, ok & (ends == 0)))
        D = tl.where(ends, 0.0, D)
        tl.store(work + own, G, mask=ok & ends)
        a0, a1, a2, a3, s0, s, c = state_of(
            gates + slot * (SLOTS * H + EXTRA) + j, prev + slot * WIDE + j, prev_c + slot * H + j, ok, H, CELL, SLOTS
        )
        dot = tl.sum(G * s, 0)
        Gc = G
        if CELL == LSTM:
            Gc = past
            if LAST:
                Gc += take(d_c + own, ok & final)
            Gc = tl.where(ends, Gc, take(work + plane + own, ok & (ends == 0)))
            past = tl.where(ends, 0.0, past)
            tl.store(work + plane + own, Gc, mask=ok & ends)
            dot += tl.sum(Gc * c, 0)
        p = tl.load(weights + slot)
        d_logit = 0.0
        if not FORCED:
            h = tl.load(prob + slot)
            end_dot = tl.load(work + 3 * plane + row, mask=ends == 0, other=0.0)
            tl.store(work + 3 * plane + row, dot, mask=ends)
            r_t = tl.load(d_remainder + (e * T + t) * stride_t + b * stride_b)
            d_logit = tl.where(ends, 0.0, (dot - end_dot - r_t) * h * (1 - h))
        tl.store(derived + (slot + B) * GW + SLOTS * H, d_logit, mask=ends == 0)
        tl.store(derived + slot * GW + SLOTS * H, 0.0, mask=n == 1)
        dh = p * G + D + d_logit * take(halt + e * H + j, ok)
        if CELL == LSTM:
            a0, a1, a2, a3, past = lstm_backward(dh, p * Gc + past, a0, a1, a2, a3, s0, tanh(c))
        elif CELL == GRU:
            a0, a1, a2, a3, past = gru_backward(dh, a0, a1, a2, a3, s0)
        else:
            a0 = rnn_backward(dh, s, CELL == RNN_RELU)
        tl.store(d, a0, mask=ok)
        if GATES > 1:
            tl.store(d + H, a1, mask=ok)
            tl.store(d + 2 * H, a2, mask=ok)
        if GATES > 3:
            tl.store(d + 3 * H, a3, mask=ok)
        tl.store(to, a0, mask=ok)
        if SLOTS > 1:
            tl.store(work + 2 * plane + own, past, mask=ok)
            tl.store(to + H, a1, mask=ok)
            tl.store(to + 2 * H, a2, mask=ok)
            tl.store(to + 3 * H, a3, mask=ok)
        if BY_X:
            by_x = d_xw + at * X + j
            more = ok & (ends == 0)
            tl.store(by_x, a0 + take(by_x, more), mask=ok)
            if SLOTS > 1:
                tl.store(by_x + H, a1 + take(by_x + H, more), mask=ok)
            if CELL == LSTM:
                tl.store(by_x + 2 * H, a2 + take(by_x + 2 * H, more), mask=ok)
                tl.store(by_x + 3 * H, a3 + take(by_x + 3 * H, more), mask=ok)
            elif CELL == GRU:
                tl.store(by_x + 2 * H, a3 + take(by_x + 2 * H, more), mask=ok)
