"""One program trains one LSTM on ragged sequences: forward, backward and Adam, many updates a launch.

The frame is that of ``rnn_kernel.py``. Cell updates of all steps are numbered on, and their rows follow each other, so
that the weight gradients are products over all of them. Kept of a cell update: h^{n-1}, c^{n-1}, and the gates, which
turn into their derivatives in place.

Scratch of a program, C the number of a cell update: short, the weights as the products see them; hidden and cell states
``[C, BP, HP]``; gates ``[C, 4, BP, HP]``; shown ``[T BP, IP]``, x_t and a constant; inputs ``[T, 4, BP, HP]``,
W_x x_t + b; by_input likewise, the sum over n of the derivatives; tape ``[C, BP]``, p; notes ``[T, 4, BP]``, N, d/dy,
the number of the step's first cell update and how many it has.
"""

import triton
import triton.language as tl

from pondertime.ensemble.kernel_parts import (
    HEAD,
    SETTINGS,
    adam,
    close_interval,
    copy,
    is_finite,
    logistic_loss,
    may_go_on,
    measure,
    quick_sigmoid,
    quick_tanh,
    unpack,
)
from pondertime.fused.triton_math import lstm_backward, sigmoid


@triton.jit
def project(weights, short, words, shown, inputs, longest, step_rows,
            B: tl.constexpr, H: tl.constexpr, IN: tl.constexpr, BP: tl.constexpr, HP: tl.constexpr, IP: tl.constexpr,
            IS: tl.constexpr, BIAS: tl.constexpr, KB: tl.constexpr,
            DT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """W_x x_t + b for all steps, before the loop. x_t is kept for the gradient, with a constant that stands for b."""
    unit, place, k = tl.arange(0, HP), tl.arange(0, IP), tl.arange(0, KB)
    on = unit < H
    inside = (place < IS)[:, None] & on[None, :]
    at = place[:, None] + unit[None, :] * IS
    for gate in tl.range(0, 4, num_stages=1):
        w_x = tl.load(short + gate * H * IS + at, mask=inside, other=0.0)
        b_x = bias(weights + BIAS + gate * H + unit, on, H)
        for start in tl.range(0, longest * BP, KB, num_stages=1):
            t, b = (start + k) // BP, (start + k) % BP
            x = unpack(words, t * step_rows + b, (t < longest) & (b < B), IN, KB, IP, False)
            x = tl.where((place == IN + 1)[None, :], 1.0, x).to(DT)
            if gate == 0:
                tl.store(shown + (start + k)[:, None] * IP + place[None, :], x)
            there = (t < longest)[:, None] & (unit >= 0)[None, :]
            to = inputs + (t * 4 * BP * HP + gate * BP * HP + b * HP)[:, None] + unit[None, :]
            tl.store(to, tl.dot(x, w_x, input_precision=PRECISION) + b_x[None, :], mask=there)


@triton.jit
def bias(at, on, H: tl.constexpr):
    """The sum of both biases of a gate."""
    return tl.load(at, mask=on, other=0.0) + tl.load(at + 4 * H, mask=on, other=0.0)


@triton.jit
def weight_gradients(grads, shown, by_input, gates, hidden, longest, cells,
                     H: tl.constexpr, IN: tl.constexpr, BP: tl.constexpr, HP: tl.constexpr, IP: tl.constexpr,
                     IS: tl.constexpr, W_H: tl.constexpr, BIAS: tl.constexpr, KB: tl.constexpr, STAGES: tl.constexpr,
                     PRECISION: tl.constexpr):  # fmt: skip
    """Gradients of W_h, W_x but for the flag, and the biases: products over all rows. Returns their sum of squares."""
    TILE: tl.constexpr = BP * HP
    unit, place, k = tl.arange(0, HP), tl.arange(0, IP), tl.arange(0, KB)
    on_h = (unit < H)[:, None] & (unit < H)[None, :]
    everywhere = (unit >= 0)[None, :]
    squares = tl.zeros([HP], tl.float32)
    for gate in tl.range(0, 4, num_stages=1):
        g = tl.zeros([HP, HP], tl.float32)
        for start in tl.range(0, cells * BP, KB, num_stages=STAGES):
            row = start + k
            on = (row < cells * BP)[:, None] & everywhere
            h = tl.load(hidden + row[:, None] * HP + unit[None, :], mask=on, other=0.0)
            at = gates + (row // BP * 4 * TILE + gate * TILE + row % BP * HP)[:, None] + unit[None, :]
            g = tl.dot(tl.trans(tl.load(at, mask=on, other=0.0)), h, acc=g, input_precision=PRECISION)
        tl.store(grads + W_H + (gate * H + unit)[:, None] * H + unit[None, :], g, mask=on_h)
        squares += tl.sum(tl.where(on_h, g * g, 0.0), 1)

        g = tl.zeros([HP, IP], tl.float32)
        for start in tl.range(0, longest * BP, KB, num_stages=STAGES):
            row = start + k
            on = (row < longest * BP)[:, None] & everywhere
            x = tl.load(shown + row[:, None] * IP + place[None, :])
            at = by_input + (row // BP * 4 * TILE + gate * TILE + row % BP * HP)[:, None] + unit[None, :]
            g = tl.dot(tl.trans(tl.load(at, mask=on, other=0.0)), x, acc=g, input_precision=PRECISION)
        squares += store_by_input(grads, g, gate, H, IN, HP, IP, IS, BIAS)
    return tl.sum(squares, 0)


@triton.jit
def store_by_input(grads, g, gate, H: tl.constexpr, IN: tl.constexpr, HP: tl.constexpr, IP: tl.constexpr,
                   IS: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """Store a gate's gradients of W_x but for the flag, and of both biases; returns their squares, summed by unit."""
    unit, place = tl.arange(0, HP), tl.arange(0, IP)
    on = unit < H
    b = tl.sum(tl.where((place == IN + 1)[None, :], g, 0.0), 1)
    g = tl.where((place < IN)[None, :], g, 0.0)
    inside = on[:, None] & ((place < IS) & (place != IN))[None, :]
    tl.store(grads + (gate * H + unit)[:, None] * IS + place[None, :], g, mask=inside)
    tl.store(grads + BIAS + gate * H + unit, b, mask=on)
    tl.store(grads + BIAS + (4 + gate) * H + unit, b, mask=on)
    return tl.sum(g * g, 1) + 2 * b * b


@triton.jit
def forward(weights, short, grads, targets, sums, hidden, cell, gates, inputs, tape, notes,
            length, longest, step_rows, threshold, force, limit, measured,
            B: tl.constexpr, H: tl.constexpr, IN: tl.constexpr, BP: tl.constexpr, HP: tl.constexpr,
            IS: tl.constexpr, W_H: tl.constexpr, HALT: tl.constexpr, OUT: tl.constexpr,
            DT: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """All steps, and the gradient of the read-out.

    Returns how many cell updates they took, loss, what the metrics are made of, and that gradient's sum of squares.
    """
    TILE: tl.constexpr = BP * HP
    row, unit = tl.arange(0, BP), tl.arange(0, HP)
    on = unit < H
    tile = row[:, None] * HP + unit[None, :]
    w_i, w_f, w_g, w_o = recurrent(short + W_H, H, HP)
    w_i, w_f, w_g, w_o = tl.trans(w_i), tl.trans(w_f), tl.trans(w_g), tl.trans(w_o)
    at_flag = weights + unit * IS + IN
    flag_i = tl.load(at_flag, mask=on, other=0.0)[None, :]
    flag_f = tl.load(at_flag + H * IS, mask=on, other=0.0)[None, :]
    flag_g = tl.load(at_flag + 2 * H * IS, mask=on, other=0.0)[None, :]
    flag_o = tl.load(at_flag + 3 * H * IS, mask=on, other=0.0)[None, :]
    w = tl.load(weights + HALT + unit, mask=on, other=0.0)
    b_h = tl.load(weights + HALT + H)
    w_y = tl.load(weights + OUT + unit, mask=on, other=0.0)
    b_y = tl.load(weights + OUT + H)

    zero = tl.zeros([BP], tl.float32)
    task_loss, wrong, rho = zero, zero, zero
    mean_h = tl.zeros([BP, HP], tl.float32)
    mean_c = tl.zeros([BP, HP], tl.float32)
    by_w_y = tl.zeros([BP, HP], tl.float32)
    by_b_y = tl.zeros([BP], tl.float32)
    c = 0
    for t in tl.range(0, longest, num_stages=1):
        a_i = tl.load(inputs + t * 4 * TILE + tile)
        a_f = tl.load(inputs + (t * 4 + 1) * TILE + tile)
        a_g = tl.load(inputs + (t * 4 + 2) * TILE + tile)
        a_o = tl.load(inputs + (t * 4 + 3) * TILE + tile)
        alive = (t < length) & (row < B)
        running = alive
        total = tl.zeros([BP], tl.float32)
        steps = tl.zeros([BP], tl.int32)
        h_n, c_n = mean_h, mean_c
        mean_h = tl.zeros([BP, HP], tl.float32)
        mean_c = tl.zeros([BP, HP], tl.float32)
        first = c
        n = 0
        more = True
        while more:
            n += 1
            is_first = tl.where(n == 1, 1.0, 0.0)
            s = h_n.to(DT)
            tl.store(hidden + c * TILE + tile, s)
            tl.store(cell + c * TILE + tile, c_n)
            z_i = tl.dot(s, w_i, acc=a_i, input_precision=PRECISION) + is_first * flag_i
            z_f = tl.dot(s, w_f, acc=a_f, input_precision=PRECISION) + is_first * flag_f
            z_g = tl.dot(s, w_g, acc=a_g, input_precision=PRECISION) + is_first * flag_g
            z_o = tl.dot(s, w_o, acc=a_o, input_precision=PRECISION) + is_first * flag_o
            i = quick_sigmoid(z_i, FAST)
            f = quick_sigmoid(z_f, FAST)
            g = quick_tanh(z_g, FAST)
            o = quick_sigmoid(z_o, FAST)
            c_n = f * c_n + i * g
            h_n = o * quick_tanh(c_n, FAST)
            tl.store(gates + c * 4 * TILE + tile, i.to(DT))
            tl.store(gates + (c * 4 + 1) * TILE + tile, f.to(DT))
            tl.store(gates + (c * 4 + 2) * TILE + tile, g.to(DT))
            tl.store(gates + (c * 4 + 3) * TILE + tile, o.to(DT))
            h = sigmoid(tl.sum(h_n * w[None, :], 1) + b_h)
            h = tl.where(force > 0, tl.where(n == force, 1.0, 0.0), h)
            go = running & (total + h < threshold) & (n < limit)
            p = tl.where(go, h, tl.where(running, 1 - total, 0.0))
            steps = tl.where(running, n, steps)
            tl.store(tape + c * BP + row, p)
            mean_h += p[:, None] * h_n
            mean_c += p[:, None] * c_n
            total = tl.where(go, total + h, total)
            running = go
            c += 1
            more = tl.max(go.to(tl.int32), 0) > 0
        y = tl.sum(mean_h * w_y[None, :], 1) + b_y
        target = tl.load(targets + t * step_rows + row, mask=alive, other=0).to(tl.float32)
        task_loss += tl.where(alive, logistic_loss(y, target), 0.0)
        wrong += tl.where(alive & ((y > 0) != (target > 0.5)), 1.0, 0.0)
        rho += tl.where(alive, steps + 1 - total, 0.0)
        g_y = tl.where(alive, (sigmoid(y) - target) / B, 0.0)
        by_w_y += g_y[:, None] * mean_h
        by_b_y += g_y
        note = notes + t * 4 * BP + row
        tl.store(note, steps.to(tl.float32))
        tl.store(note + BP, g_y)
        tl.store(note + 2 * BP, zero + first)
        tl.store(note + 3 * BP, zero + n)
        tl.atomic_add(sums + HEAD + steps, tl.full([BP], 1.0, tl.float64), mask=alive & measured)
    g_w_y, g_b_y = tl.sum(by_w_y, 0), tl.sum(by_b_y, 0)
    tl.store(grads + OUT + unit, g_w_y, mask=on)
    tl.store(grads + OUT + H, g_b_y)
    return c, task_loss, rho, wrong, tl.sum(g_w_y * g_w_y, 0) + g_b_y * g_b_y


@triton.jit
def recurrent(at, H: tl.constexpr, HP: tl.constexpr):
    """W_h by gate, ``[HP, HP]``."""
    unit = tl.arange(0, HP)
    square = (unit < H)[:, None] & (unit < H)[None, :]
    at += unit[:, None] * H + unit[None, :]
    w_i = tl.load(at, mask=square, other=0.0)
    w_f = tl.load(at + H * H, mask=square, other=0.0)
    w_g = tl.load(at + 2 * H * H, mask=square, other=0.0)
    w_o = tl.load(at + 3 * H * H, mask=square, other=0.0)
    return w_i, w_f, w_g, w_o


@triton.jit
def backward(weights, short, grads, cell, gates, by_input, tape, notes, longest, r, act,
             H: tl.constexpr, IN: tl.constexpr, BP: tl.constexpr, HP: tl.constexpr, IS: tl.constexpr,
             W_H: tl.constexpr, HALT: tl.constexpr, OUT: tl.constexpr,
             DT: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr, BACK: tl.constexpr):  # fmt: skip
    """From the last step to the first: derivatives by the gates, and the gradients of w, b_h and the flag.

    Returns the sum of squares of these gradients.
    """
    TILE: tl.constexpr = BP * HP
    row, unit = tl.arange(0, BP), tl.arange(0, HP)
    on = unit < H
    tile = row[:, None] * HP + unit[None, :]
    w_i, w_f, w_g, w_o = recurrent(short + W_H, H, HP)
    w = tl.load(weights + HALT + unit, mask=on, other=0.0)
    w_y = tl.load(weights + OUT + unit, mask=on, other=0.0)

    d_h = tl.zeros([BP, HP], tl.float32)
    d_c = tl.zeros([BP, HP], tl.float32)
    by_w = tl.zeros([BP, HP], tl.float32)
    by_b_h = tl.zeros([BP], tl.float32)
    none = tl.zeros([HP], tl.float32)
    flag_i, flag_f, flag_g, flag_o = none, none, none, none
    for back in tl.range(0, longest, num_stages=1):
        t = longest - 1 - back
        note = notes + t * 4 * BP
        steps = tl.load(note + row).to(tl.int32)
        g_y = tl.load(note + BP + row)
        first = tl.load(note + 2 * BP).to(tl.int32)
        most = tl.load(note + 3 * BP).to(tl.int32)
        total_h = g_y[:, None] * w_y[None, :] + d_h  # G, the derivative by the mean state
        total_c = d_c
        d_h = tl.zeros([BP, HP], tl.float32)
        d_c = tl.zeros([BP, HP], tl.float32)
        x_i = tl.zeros([BP, HP], tl.float32)
        x_f = tl.zeros([BP, HP], tl.float32)
        x_g = tl.zeros([BP, HP], tl.float32)
        x_o = tl.zeros([BP, HP], tl.float32)
        last = tl.zeros([BP], tl.float32)
        for k in tl.range(0, most, num_stages=BACK):
            n = most - k
            c = first + n - 1
            i = tl.load(gates + c * 4 * TILE + tile).to(tl.float32)
            f = tl.load(gates + (c * 4 + 1) * TILE + tile).to(tl.float32)
            g = tl.load(gates + (c * 4 + 2) * TILE + tile).to(tl.float32)
            o = tl.load(gates + (c * 4 + 3) * TILE + tile).to(tl.float32)
            c_0 = tl.load(cell + c * TILE + tile)
            p = tl.load(tape + c * BP + row)
            c_n = f * c_0 + i * g
            tanh_c = quick_tanh(c_n, FAST)
            h_n = o * tanh_c
            along = tl.sum(total_h * h_n + total_c * c_n, 1)
            last = tl.where(n == steps, along, last)
            d_halt = tl.where(n < steps, (along - last - r) * p * (1 - p) * act, 0.0)  # where p is h
            made = (n <= steps)[:, None]
            by_h = tl.where(made, p[:, None] * total_h + d_h + d_halt[:, None] * w[None, :], 0.0)
            by_c = tl.where(made, p[:, None] * total_c + d_c, 0.0)
            d_i, d_f, d_g, d_o, d_c = lstm_backward(by_h, by_c, i, f, g, o, c_0, tanh_c)
            by_b_h += d_halt
            by_w += d_halt[:, None] * h_n
            x_i += d_i
            x_f += d_f
            x_g += d_g
            x_o += d_o
            tl.store(gates + c * 4 * TILE + tile, d_i.to(DT))
            tl.store(gates + (c * 4 + 1) * TILE + tile, d_f.to(DT))
            tl.store(gates + (c * 4 + 2) * TILE + tile, d_g.to(DT))
            tl.store(gates + (c * 4 + 3) * TILE + tile, d_o.to(DT))
            d_h = tl.dot(d_i.to(DT), w_i, input_precision=PRECISION)
            d_h = tl.dot(d_f.to(DT), w_f, acc=d_h, input_precision=PRECISION)
            d_h = tl.dot(d_g.to(DT), w_g, acc=d_h, input_precision=PRECISION)
            d_h = tl.dot(d_o.to(DT), w_o, acc=d_h, input_precision=PRECISION)
        tl.store(by_input + t * 4 * TILE + tile, x_i.to(DT))
        tl.store(by_input + (t * 4 + 1) * TILE + tile, x_f.to(DT))
        tl.store(by_input + (t * 4 + 2) * TILE + tile, x_g.to(DT))
        tl.store(by_input + (t * 4 + 3) * TILE + tile, x_o.to(DT))
        # The flag is seen by first updates alone.
        tl.debug_barrier()
        at = gates + first * 4 * TILE + tile
        flag_i += tl.sum(tl.load(at).to(tl.float32), 0)
        flag_f += tl.sum(tl.load(at + TILE).to(tl.float32), 0)
        flag_g += tl.sum(tl.load(at + 2 * TILE).to(tl.float32), 0)
        flag_o += tl.sum(tl.load(at + 3 * TILE).to(tl.float32), 0)
    g_w, g_b = tl.sum(by_w, 0), tl.sum(by_b_h, 0)
    tl.store(grads + HALT + unit, g_w, mask=on)
    tl.store(grads + HALT + H, g_b)
    at_flag = grads + unit * IS + IN
    tl.store(at_flag, flag_i, mask=on)
    tl.store(at_flag + H * IS, flag_f, mask=on)
    tl.store(at_flag + 2 * H * IS, flag_g, mask=on)
    tl.store(at_flag + 3 * H * IS, flag_o, mask=on)
    squares = g_w * g_w + flag_i * flag_i + flag_f * flag_f + flag_g * flag_g + flag_o * flag_o
    return tl.sum(squares, 0) + g_b * g_b


@triton.jit
def update(
    weights, m1, m2, settings, words, targets, lengths, sums, grads, short, hidden, cell, gates, shown, inputs,
    by_input, tape, notes, i, step_rows, threshold, measure_every,
    B: tl.constexpr, H: tl.constexpr, IN: tl.constexpr, BP: tl.constexpr, HP: tl.constexpr, IP: tl.constexpr,
    DT: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    KB: tl.constexpr, BACK: tl.constexpr, ADAM: tl.constexpr,
):  # fmt: skip
    """Training update i; returns its number of cell updates and whether the loss is finite."""
    IS: tl.constexpr = (IN + 4) // 4 * 4
    W_H: tl.constexpr = 4 * H * IS
    BIAS: tl.constexpr = W_H + 4 * H * H
    HALT: tl.constexpr = BIAS + 8 * H
    OUT: tl.constexpr = HALT + H + 1
    P: tl.constexpr = OUT + H + 1
    row = tl.arange(0, BP)
    force = tl.load(settings + 6).to(tl.int32)
    limit = tl.load(settings + 7).to(tl.int32)
    warm = tl.load(settings + 5)
    tau = tl.load(settings) * tl.where(warm > 0, tl.minimum(1.0, (i + 1) / tl.maximum(warm, 1.0)), 1.0)
    tau = tau.to(tl.float32)
    length = tl.load(lengths + row, mask=row < B, other=0).to(tl.int32)
    longest = tl.max(length, 0)
    measured = i % measure_every == 0

    project(weights, short, words, shown, inputs, longest, step_rows, B, H, IN, BP, HP, IP, IS, BIAS, KB, DT, PRECISION)
    tl.debug_barrier()
    cells, task_loss, rho, wrong, squares = forward(
        weights, short, grads, targets, sums, hidden, cell, gates, inputs, tape, notes,
        length, longest, step_rows, threshold, force, limit, measured,
        B, H, IN, BP, HP, IS, W_H, HALT, OUT, DT, PRECISION, FAST,
    )  # fmt: skip
    loss = tl.sum(task_loss + tau * rho, 0)
    finite = is_finite(loss)
    if finite:
        act = tl.where(force > 0, 0.0, 1.0)
        tl.debug_barrier()
        squares += backward(
            weights, short, grads, cell, gates, by_input, tape, notes, longest, tau / B, act,
            H, IN, BP, HP, IS, W_H, HALT, OUT, DT, PRECISION, FAST, BACK,
        )  # fmt: skip
        tl.debug_barrier()
        squares += weight_gradients(
            grads, shown, by_input, gates, hidden, longest, cells,
            H, IN, BP, HP, IP, IS, W_H, BIAS, KB, STAGES, PRECISION,
        )  # fmt: skip
        tl.debug_barrier()
        adam(weights, m1, m2, grads, i, squares, settings, P, BLOCK, ADAM, short)
        if measured:
            many = tl.full([], B, tl.float32)
            seen = tl.sum(length, 0).to(tl.float32)
            mistaken = tl.sum(tl.where(wrong > 0, 1.0, 0.0), 0)
            share = tl.sum(wrong / tl.maximum(length, 1), 0)
            measure(sums, many, loss, tl.sum(task_loss, 0), mistaken, share, seen, seen, tl.sum(rho, 0))
        tl.debug_barrier()
    return cells, finite


@triton.jit(do_not_specialize=["networks", "until"])
def train_lstm(
    weights, m1, m2, settings, words, targets, lengths, sums, intervals, interval_at, iterations, cell_updates, stopped,
    closed, taken, filled, budgets, order, queue, grads, short, hidden, cell, gates, shown, inputs, by_input, tape,
    notes, networks, until, threshold, measure_every, log_every, overhead, per_chunk, chunks, max_cells, K,
    T: tl.constexpr, B: tl.constexpr, H: tl.constexpr, IN: tl.constexpr, BP: tl.constexpr, HP: tl.constexpr,
    IP: tl.constexpr, PS: tl.constexpr, KP: tl.constexpr, SLOTS: tl.constexpr,
    DT: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    KB: tl.constexpr, BACK: tl.constexpr, ADAM: tl.constexpr,
):  # fmt: skip
    """Take networks from the queue and train each as far as this launch allows."""
    WORDS: tl.constexpr = (IN + 31) // 32
    slot = tl.program_id(0).to(tl.int64)
    grads += slot * PS
    short += slot * PS
    hidden += slot * max_cells * BP * HP
    cell += slot * max_cells * BP * HP
    gates += slot * max_cells * 4 * BP * HP
    shown += slot * ((T * BP + KB - 1) // KB * KB) * IP
    inputs += slot * T * 4 * BP * HP
    by_input += slot * T * 4 * BP * HP
    tape += slot * max_cells * BP
    notes += slot * T * 4 * BP
    step_rows = per_chunk * B
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
        copy(weights + e * PS, short, PS, BLOCK)
        while fine & may_go_on(i, spent, budget, until, end, done, given, SLOTS):
            chunk = e * chunks + i // per_chunk % chunks
            at = chunk * T * step_rows + i % per_chunk * B
            cells, fine = update(
                weights + e * PS, m1 + e * PS, m2 + e * PS, settings + e * SETTINGS, words + at * WORDS, targets + at,
                lengths + chunk * step_rows + i % per_chunk * B, sums + e * K,
                grads, short, hidden, cell, gates, shown, inputs, by_input, tape, notes,
                i, step_rows, threshold, measure_every,
                B, H, IN, BP, HP, IP, DT, PRECISION, FAST, BLOCK, STAGES, KB, BACK, ADAM,
            )  # fmt: skip
            spent += cells + overhead
            made += cells
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
        tl.store(cell_updates + e, tl.load(cell_updates + e) + made)
        place = tl.atomic_add(queue, 1)
