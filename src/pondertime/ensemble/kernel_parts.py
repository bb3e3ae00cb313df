"""What the kernels that train whole networks share: settings, packed inputs, Adam, metrics.

A network's row of ``settings`` (float64): tau, learning rate, log beta2, beta2, clip (0: none), warm-up of tau,
force_steps (0: none), limit of updates a step, iterations over which the rate falls to 0 (0: none), iterations.
Its parameters are one flat row, in the order of the state dict, the rows of ``weight_ih`` padded to a multiple of four.
"""

import triton
import triton.language as tl

from pondertime.fused.triton_math import sigmoid, tanh

SETTINGS = tl.constexpr(10)
# The sums of an interval that stand before the histogram of N, those of ``pondertime.batches.SUMS``.
HEAD = tl.constexpr(8)
LOG_BETA1 = tl.constexpr(-0.10536051565782628)


@triton.jit
def unpack(words, row, on, IN: tl.constexpr, R: tl.constexpr, IP: tl.constexpr, SIGNED: tl.constexpr):
    """Inputs in {0, 1}, or {-1, 0, 1} where SIGNED, of R packed rows: ``[R, IP]``, 0 where a row is not on.

    A row is IN / 32 integers, bit i % 32 of number i // 32 set where input i is 1; then as many for -1.
    """
    WORDS: tl.constexpr = (IN + 31) // 32
    stride = WORDS * 2 if SIGNED else WORDS
    number = tl.arange(0, IP // 32)
    bit = tl.arange(0, 32)
    at = words + row[:, None] * stride + number[None, :]
    mask = on[:, None] & (number < WORDS)[None, :]
    x = (tl.load(at, mask=mask, other=0)[:, :, None] >> bit[None, None, :]) & 1
    if SIGNED:
        x -= (tl.load(at + WORDS, mask=mask, other=0)[:, :, None] >> bit[None, None, :]) & 1
    return tl.reshape(x, [R, IP]).to(tl.float32)


@triton.jit
def pack(input, words, rows, IN: tl.constexpr, WORDS: tl.constexpr, SIGNED: tl.constexpr, R: tl.constexpr):
    """The inverse of ``unpack``: one program packs R rows of float inputs."""
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    bit = tl.arange(0, 32)
    stride = WORDS * 2 if SIGNED else WORDS
    for w in tl.static_range(WORDS):
        i = w * 32 + bit
        on = (row < rows)[:, None] & (i < IN)[None, :]
        x = tl.load(input + row[:, None] * IN + i[None, :], mask=on, other=0.0)
        tl.store(words + row * stride + w, tl.sum((x > 0).to(tl.int32) << bit[None, :], 1), mask=row < rows)
        if SIGNED:
            negative = tl.sum((x < 0).to(tl.int32) << bit[None, :], 1)
            tl.store(words + row * stride + WORDS + w, negative, mask=row < rows)


@triton.jit
def may_go_on(i, spent, budget, until, filled, closed, taken, SLOTS: tl.constexpr):
    """Whether a network makes another update in this launch."""
    return (spent < budget) & (i < until) & (i < filled) & (closed - taken < SLOTS)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def quick_tanh(x, FAST: tl.constexpr):
    """tanh, or the processor's own, good to 2^-11, which is finer than a bfloat16."""
    if FAST:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return tanh(x)


@triton.jit
def quick_sigmoid(x, FAST: tl.constexpr):
    if FAST:
        return 0.5 + 0.5 * quick_tanh(0.5 * x, FAST)
    return sigmoid(x)


@triton.jit
def logistic_loss(y, target):
    """The binary cross-entropy of a logit, in nats."""
    return tl.maximum(y, 0.0) - y * target + tl.log(1 + tl.exp(-tl.abs(y)))


@triton.jit
def adam(weights, m1, m2, grads, i, squares, settings, P: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
         short=None):  # fmt: skip
    """Update i of a flat row of parameters, its gradient clipped to a norm first. squares: of the gradient.

    short: where a copy of the parameters goes, if any.
    """
    rate = tl.load(settings + 1)
    last = tl.load(settings + 8)
    left = tl.maximum(tl.load(settings + 9) - i, 0.0)
    rate *= tl.where(left < last, left / tl.maximum(last, 1.0), 1.0)
    log_beta2 = tl.load(settings + 2)
    beta2 = tl.load(settings + 3)
    old, new = beta2.to(tl.float32), (1 - beta2).to(tl.float32)
    clip = tl.load(settings + 4).to(tl.float32)
    scale = tl.where(clip > 0, tl.minimum(clip / (tl.sqrt(squares) + 1e-6), 1.0), 1.0)
    t = (i + 1).to(tl.float64)
    step = (rate / (1 - tl.exp(t * LOG_BETA1))).to(tl.float32)
    root = tl.sqrt((1 - tl.exp(t * log_beta2)).to(tl.float32))
    # Rows are padded with zeros to a multiple of 32: whole vectors of four are read and written.
    WHOLE: tl.constexpr = (P + 3) // 4 * 4
    for start in tl.range(0, P, BLOCK, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK)
        on = at < WHOLE
        g = tl.load(grads + at, mask=at < P, other=0.0) * scale
        m = tl.load(m1 + at, mask=on, other=0.0)
        v = tl.load(m2 + at, mask=on, other=0.0)
        w = tl.load(weights + at, mask=on, other=0.0)
        m += (g - m) * 0.1
        v = v * old + g * g * new
        tl.store(m1 + at, m, mask=on)
        tl.store(m2 + at, v, mask=on)
        w -= step * m / (tl.sqrt(v) / root + 1e-8)
        tl.store(weights + at, w, mask=on)
        if short is not None:
            tl.store(short + at, w.to(short.dtype.element_ty), mask=on)


@triton.jit
def copy(a, to, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A row of numbers in another type; everybody sees it."""
    for start in tl.range(0, SIZE, BLOCK, num_stages=1):
        at = start + tl.arange(0, BLOCK)
        tl.store(to + at, tl.load(a + at, mask=at < SIZE).to(to.dtype.element_ty), mask=at < SIZE)
    tl.debug_barrier()


@triton.jit
def add_to(at, value):
    tl.store(at, tl.load(at, cache_modifier=".cg") + value.to(tl.float64))


@triton.jit
def measure(sums, sequences, loss, task_loss, error, target_error, targets, inputs, rho):
    """Add one batch to the sums of the interval, but for the histogram."""
    add_to(sums, sequences)
    add_to(sums + 1, loss)
    add_to(sums + 2, task_loss)
    add_to(sums + 3, error)
    add_to(sums + 4, target_error)
    add_to(sums + 5, targets)
    add_to(sums + 6, inputs)
    add_to(sums + 7, rho)


@triton.jit
def close_interval(sums, intervals, interval_at, i, closed, K, SLOTS: tl.constexpr, KP: tl.constexpr):
    """Move the sums to the network's next slot and start them anew."""
    k = tl.arange(0, KP)
    slot = closed % SLOTS
    tl.debug_barrier()
    # The histogram is added to by atomics, which pass by the nearer cache.
    values = tl.load(sums + k, mask=k < K, other=0.0, cache_modifier=".cg")
    tl.store(intervals + slot * K + k, values, mask=k < K)
    tl.store(interval_at + slot, i)
    tl.debug_barrier()
    tl.store(sums + k, values * 0, mask=k < K)
