"""One program trains one simple RNN of one input step: forward, backward and Adam, many updates a launch.

Programs take networks from a queue until it is empty. A network makes updates until its budget (of cell
updates), its data, its iterations or its slots for metrics are used up. Letters and equations as in
``fused/README.md``; as there is one step from a zero state, update 1 has no recurrent product, and as there is one
output, G is the outer product of d/dy and W_y.

Axes of a tile: B rows, H units, padded to BP and HP; padded units are 0, padded rows never run. States and their
derivatives are kept in the program's own scratch, in the type of the products.
"""

import triton
import triton.language as tl

from pondertime.ensemble.kernel_parts import (
    HEAD,
    SETTINGS,
    adam,
    close_interval,
    is_finite,
    logistic_loss,
    may_go_on,
    measure,
    quick_tanh,
    unpack,
)
from pondertime.fused.triton_math import sigmoid


@triton.jit
def halt(s, n, total, running, y, steps, remainder, w, bias, w_y, threshold, limit, force, tape, row, BP: tl.constexpr):
    """The halting unit after update n: who goes on, and what is kept for the backward pass (h, p)."""
    h = sigmoid(tl.sum(s * w[None, :], 1) + bias)
    h = tl.where(force > 0, tl.where(n == force, 1.0, 0.0), h)
    go = running & (total + h < threshold) & (n < limit)
    p = tl.where(go, h, tl.where(running, 1 - total, 0.0))
    steps = tl.where(running, n, steps)
    remainder = tl.where(running, 1 - total, remainder)
    y += p * tl.sum(s * w_y[None, :], 1)
    tl.store(tape + row, h)
    tl.store(tape + BP + row, p)
    return go, tl.where(go, total + h, total), y, steps, remainder


@triton.jit
def by_activation(s, n, d_next, g, g_last, r, steps, w, w_y, act, tape, row, BP: tl.constexpr):
    """The derivative by a^n; by the halting unit's logit; G . s^N as far as it is known. Keeps the factors of s^n."""
    h = tl.load(tape + row)
    p = tl.load(tape + BP + row)
    g_s = g * tl.sum(s * w_y[None, :], 1)
    g_last = tl.where(n == steps, g_s, g_last)
    d_halt = tl.where(n < steps, (g_s - g_last - r) * h * (1 - h) * act, 0.0)
    tl.store(tape + 2 * BP + row, p * g)
    tl.store(tape + 3 * BP + row, d_halt)
    d = (p * g)[:, None] * w_y[None, :] + d_next + d_halt[:, None] * w[None, :]
    d = tl.where((n <= steps)[:, None], d * (1 - s * s), 0.0)
    return d, d_halt, g_last


@triton.jit
def factors(tape, BP: tl.constexpr, DT: tl.constexpr):
    """The two factors that s^n has in the gradients of W_y and w, as the rows of a tile that products accept."""
    k = tl.arange(0, 16)
    at = tape + (2 + k)[:, None] * BP + tl.arange(0, BP)[None, :]
    return tl.load(at, mask=(k < 2)[:, None] & (tl.arange(0, BP) >= 0)[None, :], other=0.0).to(DT)


@triton.jit
def row_of(tile, k: tl.constexpr):
    return tl.sum(tl.where((tl.arange(0, 16) == k)[:, None], tile, 0.0), 0)


@triton.jit
def update(
    weights, m1, m2, settings, words, targets, sums, grads, states, deltas, tapes, i, threshold, measure_every,
    B: tl.constexpr, H: tl.constexpr, IN: tl.constexpr, BP: tl.constexpr, HP: tl.constexpr, IP: tl.constexpr,
    DT: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    BACK: tl.constexpr, ADAM: tl.constexpr,
):  # fmt: skip
    """Training update i; returns its number of cell updates and whether the loss is finite."""
    IS: tl.constexpr = (IN + 4) // 4 * 4
    W_X: tl.constexpr = 0  # pyrefly: ignore[bad-assignment]
    W_H: tl.constexpr = H * IS
    BIAS: tl.constexpr = W_H + H * H
    HALT: tl.constexpr = BIAS + 2 * H
    OUT: tl.constexpr = HALT + H + 1
    P: tl.constexpr = OUT + H + 1
    TILE: tl.constexpr = BP * HP
    row = tl.arange(0, BP)
    unit = tl.arange(0, HP)
    place = tl.arange(0, IP)
    on = unit < H
    square = on[:, None] & on[None, :]
    wide = on[:, None] & (place < IN)[None, :]
    at_h = unit[:, None] * H + unit[None, :]
    at_x = unit[:, None] * IS + place[None, :]
    tile = row[:, None] * HP + unit[None, :]

    force = tl.load(settings + 6).to(tl.int32)
    limit = tl.load(settings + 7).to(tl.int32)
    warm = tl.load(settings + 5)
    tau = tl.load(settings) * tl.where(warm > 0, tl.minimum(1.0, (i + 1) / tl.maximum(warm, 1.0)), 1.0)
    tau = tau.to(tl.float32)
    act = tl.where(force > 0, 0.0, 1.0)

    x = unpack(words, row, row < B, IN, BP, IP, True).to(DT)
    w_x = tl.load(weights + W_X + at_x, mask=wide, other=0.0).to(DT)
    flag = tl.load(weights + W_X + unit * IS + IN, mask=on, other=0.0)
    bias = tl.load(weights + BIAS + unit, mask=on, other=0.0) + tl.load(weights + BIAS + H + unit, mask=on, other=0.0)
    w_h = tl.load(weights + W_H + at_h, mask=square, other=0.0).to(DT)
    w = tl.load(weights + HALT + unit, mask=on, other=0.0)
    b_h = tl.load(weights + HALT + H)
    w_y = tl.load(weights + OUT + unit, mask=on, other=0.0)
    target = tl.load(targets + row, mask=row < B, other=0).to(tl.float32)

    a_x = tl.dot(x, tl.trans(w_x), input_precision=PRECISION) + bias[None, :]
    s = quick_tanh(a_x + flag[None, :], FAST)
    tl.store(states + tile, s.to(DT))
    running = row < B
    zero = tl.zeros([BP], tl.float32)
    steps = tl.zeros([BP], tl.int32)
    n = 1
    running, total, y, steps, remainder = halt(
        s, n, zero, running, zero, steps, zero, w, b_h, w_y, threshold, limit, force, tapes, row, BP
    )
    more = tl.max(running.to(tl.int32), 0) > 0
    while more:
        n += 1
        a = tl.dot(s.to(DT), tl.trans(w_h), acc=a_x, input_precision=PRECISION)
        s = quick_tanh(a, FAST)
        tl.store(states + (n - 1) * TILE + tile, s.to(DT))
        running, total, y, steps, remainder = halt(
            s, n, total, running, y, steps, remainder, w, b_h, w_y, threshold, limit, force,
            tapes + (n - 1) * 4 * BP, row, BP,
        )  # fmt: skip
        more = tl.max(running.to(tl.int32), 0) > 0

    y += tl.load(weights + OUT + H)
    task_loss = tl.where(row < B, logistic_loss(y, target), 0.0)
    rho = tl.where(row < B, steps + remainder, 0.0)
    loss = tl.sum(task_loss + tau * rho, 0)
    finite = is_finite(loss)
    if finite:
        g = tl.where(row < B, (sigmoid(y) - target) / B, 0.0)
        r = tau / B
        d_next = tl.zeros([BP, HP], tl.float32)
        d_bias = zero
        g_last = zero
        tl.debug_barrier()
        w_h = tl.load(weights + W_H + at_h, mask=square, other=0.0).to(DT)
        for k in tl.range(0, n - 1, num_stages=BACK):
            m = n - k
            s_m = tl.load(states + (m - 1) * TILE + tile).to(tl.float32)
            tape = tapes + (m - 1) * 4 * BP
            d, d_halt, g_last = by_activation(s_m, m, d_next, g, g_last, r, steps, w, w_y, act, tape, row, BP)
            d_bias += d_halt
            tl.store(deltas + (m - 1) * TILE + tile, d.to(DT))
            d_next = tl.dot(d.to(DT), w_h, input_precision=PRECISION)
        s_1 = tl.load(states + tile).to(tl.float32)
        d_1, d_halt, g_last = by_activation(s_1, 1, d_next, g, g_last, r, steps, w, w_y, act, tapes, row, BP)
        g_flag = tl.sum(d_1, 0)
        g_b_h = tl.sum(d_bias + d_halt, 0)
        g_b_y = tl.sum(g, 0)

        tl.debug_barrier()
        x = unpack(words, row, row < B, IN, BP, IP, True).to(DT)
        ones = tl.full([16, BP], 1.0, tl.float32).to(DT)
        g_x = tl.dot(tl.trans(d_1.to(DT)), x, input_precision=PRECISION)
        g_h = tl.zeros([HP, HP], tl.float32)
        g_s = tl.zeros([16, HP], tl.float32)
        g_a = tl.zeros([16, HP], tl.float32)
        for k in tl.range(0, n - 1, num_stages=STAGES):
            kept = tl.load(states + k * TILE + tile)
            delta = tl.load(deltas + (k + 1) * TILE + tile)
            g_h = tl.dot(tl.trans(delta), kept, acc=g_h, input_precision=PRECISION)
            g_x = tl.dot(tl.trans(delta), x, acc=g_x, input_precision=PRECISION)
            g_a = tl.dot(ones, delta, acc=g_a, input_precision=PRECISION)
            g_s = tl.dot(factors(tapes + k * 4 * BP, BP, DT), kept, acc=g_s, input_precision=PRECISION)
        kept = tl.load(states + (n - 1) * TILE + tile)
        g_s = tl.dot(factors(tapes + (n - 1) * 4 * BP, BP, DT), kept, acc=g_s, input_precision=PRECISION)
        g_bias = g_flag + row_of(g_a, 0)
        tl.store(grads + W_X + at_x, g_x, mask=wide)
        tl.store(grads + W_X + unit * IS + IN, g_flag, mask=on)
        tl.store(grads + BIAS + unit, g_bias, mask=on)
        tl.store(grads + BIAS + H + unit, g_bias, mask=on)
        tl.store(grads + HALT + H, g_b_h)
        tl.store(grads + OUT + H, g_b_y)
        squares = tl.sum(g_x * g_x) + tl.sum(g_flag * g_flag + 2 * g_bias * g_bias, 0) + g_b_h * g_b_h + g_b_y * g_b_y
        g_y = row_of(g_s, 0)
        g_w = row_of(g_s, 1)
        tl.store(grads + W_H + at_h, g_h, mask=square)
        tl.store(grads + OUT + unit, g_y, mask=on)
        tl.store(grads + HALT + unit, g_w, mask=on)
        squares += tl.sum(g_h * g_h) + tl.sum(g_y * g_y + g_w * g_w, 0)
        tl.debug_barrier()
        adam(weights, m1, m2, grads, i, squares, settings, P, BLOCK, ADAM)

        if i % measure_every == 0:
            wrong = tl.sum(tl.where((row < B) & ((y > 0) != (target > 0.5)), 1.0, 0.0), 0)
            many = tl.full([], B, tl.float32)
            measure(sums, many, loss, tl.sum(task_loss, 0), wrong, wrong, many, many, tl.sum(rho, 0))
            tl.atomic_add(sums + HEAD + steps, tl.full([BP], 1.0, tl.float64), mask=row < B)
        tl.debug_barrier()
    return n, finite


@triton.jit(do_not_specialize=["networks", "until"])
def train_rnn(
    weights, m1, m2, settings, words, targets, sums, intervals, interval_at, iterations, cells, stopped, closed, taken,
    filled, budgets, order, queue, grads, states, deltas, tapes,
    networks, until, threshold, measure_every, log_every, overhead, ring, max_steps, K,
    B: tl.constexpr, H: tl.constexpr, IN: tl.constexpr, BP: tl.constexpr, HP: tl.constexpr, IP: tl.constexpr,
    PS: tl.constexpr, KP: tl.constexpr, SLOTS: tl.constexpr,
    DT: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    BACK: tl.constexpr, ADAM: tl.constexpr,
):  # fmt: skip
    """Take networks from the queue and train each as far as this launch allows."""
    WORDS: tl.constexpr = 2 * ((IN + 31) // 32)
    slot = tl.program_id(0).to(tl.int64)
    grads += slot * PS
    states += slot * max_steps * BP * HP
    deltas += slot * max_steps * BP * HP
    tapes += slot * max_steps * 4 * BP
    place = tl.atomic_add(queue, 1)
    while place < networks:
        e = tl.load(order + place).to(tl.int64)
        i = tl.load(iterations + e)
        budget = tl.load(budgets + e)
        end = tl.minimum(tl.load(filled + e), until)
        done = tl.load(closed + e)
        given = tl.load(taken + e)
        spent = 0
        made = 0
        fine = tl.load(stopped + e) == 0
        while fine & may_go_on(i, spent, budget, until, end, done, given, SLOTS):
            at = (e * ring + i % ring) * B
            n, fine = update(
                weights + e * PS, m1 + e * PS, m2 + e * PS, settings + e * SETTINGS, words + at * WORDS, targets + at,
                sums + e * K, grads, states, deltas, tapes, i, threshold, measure_every,
                B, H, IN, BP, HP, IP, DT, PRECISION, FAST, BLOCK, STAGES, BACK, ADAM,
            )  # fmt: skip
            spent += n + overhead
            made += n
            if fine:
                i += 1
                if i % log_every == 0:
                    close_interval(
                        sums + e * K, intervals + e * SLOTS * K, interval_at + e * SLOTS, i, done, K, SLOTS, KP
                    )
                    done += 1
            else:
                tl.store(stopped + e, 1)
        tl.store(iterations + e, i)
        tl.store(closed + e, done)
        tl.store(cells + e, tl.load(cells + e) + made)
        place = tl.atomic_add(queue, 1)
