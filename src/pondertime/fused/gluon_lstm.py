"""An LSTM's forward pass without a tape on Hopper: a row group's programs are a cluster, which meets once an update.

A program has 16 rows, 8 units and 128 threads, one for each number of its state. It keeps its weights in registers, and
sends its states and its shares of the logit straight to the shared memory of every program of the cluster, where a
barrier of the receiver counts the bytes. No row waits for another: one that halts begins its next input step at the
next update, from the mean state, which every program makes of what it receives.

Gluon is Triton with the threads in sight: a tensor [128] is a variable of a thread. Thread 4 g + q of warp 2 a + b has
row g + 8 a and unit 2 q + b; there a tensor core's product leaves it.
"""
# Triton's language has no starred expressions, and Gluon's functions no types.
# ruff: noqa: RUF005
# pyrefly: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS, UNITS, WARPS = 16, 8, 4
# Shared memory, in bytes from AT on: two barriers, a word a warp, then states and shares of two updates in turns, sums,
# and for each input step W_x x_t, where it is made here.
AT = gl.constexpr(1024)
STATE, SHARE = gl.constexpr(8192), gl.constexpr(3072)  # of an update
WORDS, STATES, SHARES, SUMS = (gl.constexpr(a) for a in (64, 1024, 1024 + 2 * 8192, 1024 + 2 * (8192 + 3072)))
INPUTS, INPUT = gl.constexpr(SUMS.value + 8192), gl.constexpr(2048)
SHARED = AT.value + INPUTS.value
# A half of a program's units has 16 shares, and room, so that those that are read at once lie in different banks.
HALF = gl.constexpr(96)

LOG2_E = gl.constexpr(1.4426950408889634)
SEND = gl.constexpr("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes")


@gluon.constexpr_function
def block(*lines):
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def quad_sum(name):
    """The sum over the four threads of a row."""
    return [f"shfl.sync.bfly.b32 o, {name}, {k}, 31, 0xffffffff; add.f32 {name}, {name}, o;" for k in (1, 2)]


@gluon.constexpr_function
def warp_sum_text():
    lines = [f"shfl.sync.bfly.b32 o, $0, {k}, 31, 0xffffffff; add.f32 $0, $0, o;" for k in (1, 2, 4, 8, 16)]
    return block(".reg .f32 o; mov.f32 $0, $1;", *lines)


@gluon.constexpr_function
def send_text(steps):
    """The states of a quad to the receivers of each of its threads, and the shares of four rows, each the sum of a
    quad, to one receiver of a thread.

    Inputs: state, share, where the two go to in a receiver's memory, which barrier, the thread of the warp, the
    receiver of shares, those of states.
    """
    lines = [
        ".reg .b32 v<4>, r, a, m; .reg .f32 p, o; .reg .pred s; and.b32 r, $6, 28;",
        *(f"add.u32 a, r, {k}; shfl.sync.idx.b32 v{k}, $1, a, 31, 0xffffffff;" for k in range(4)),
    ]
    for k in range(steps):
        to = f"${8 + k}"
        lines.append(f"add.u32 m, {to}, $5; add.u32 a, {to}, $3; {SEND.value}.v4.b32 [a], {{v0, v1, v2, v3}}, [m];")
    return block(
        *lines,
        *("mov.f32 p, $2;", *quad_sum("p"), "and.b32 r, $6, 1; shl.b32 r, r, 4;"),
        *(f"add.u32 a, r, {4 * k}; shfl.sync.idx.b32 v{k}, p, a, 31, 0xffffffff;" for k in range(4)),
        f"setp.lt.u32 s, $6, {8 * steps}; add.u32 m, $7, $5; add.u32 a, $7, $4;",
        f"@s {SEND.value}.v4.b32 [a], {{v0, v1, v2, v3}}, [m];",
        "mov.u32 $0, 0;",
    )


@gluon.constexpr_function
def states_text(steps):
    """The left side of a warp's product: rows g and g + 8 of units of even number, then of odd number."""
    return block(*(f"ld.shared.f32 ${4 * k + i}, [${4 * steps}+{512 * k + 128 * w}];" for k in range(steps)
                   for i, w in enumerate((0, 2, 1, 3))))  # fmt: skip


@gluon.constexpr_function
def logits_text(steps):
    """The sums over programs of the shares of rows g and g + 8."""
    count = 2 * steps  # a thread adds up of each, every fourth
    lines = [f".reg .f32 v<{count}>, o;"]
    for i in range(2):
        lines += [f"ld.shared.f32 v{k}, [$2+{4 * k * HALF.value + 32 * i}];" for k in range(count)]
        half = count // 2
        while half:
            lines += [f"add.f32 v{k}, v{k}, v{k + half};" for k in range(half)]
            half //= 2
        lines += [*quad_sum("v0"), f"mov.f32 ${i}, v0;"]
    return block(*lines)


@gluon.constexpr_function
def split_text(count, bits):
    """The leading bits, which a tensor core sees, and the rest; ``bits`` added before: 0x1000 to round."""
    return block(".reg .b32 x; .reg .f32 y;", *(
        f"mov.b32 x, ${2 * count + k}; add.u32 x, x, {bits}; and.b32 x, x, 0xffffe000; mov.b32 y, x; "
        f"sub.f32 y, ${2 * count + k}, y; "
        f"mov.b32 ${k}, x; mov.b32 ${count + k}, y;"
        for k in range(count)
    ))  # fmt: skip


@gluon.constexpr_function
def product_text(steps, precise):
    """A gate's product, four numbers of a thread: of the left side and of the weights, with the rest after each."""
    left, right = 4, 4 + 8 * steps

    def operand(first, size):
        return ["{" + ", ".join(f"${first + size * k + i}" for i in range(size)) + "}" for k in range(steps)]

    big, rest = operand(left, 4), operand(left + 4 * steps, 4)
    w_big, w_rest = operand(right, 2), operand(right + 2 * steps, 2)

    def mma(to, a, b):
        acc = "{" + ", ".join(f"{to}{i}" for i in range(4)) + "}"
        return f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {acc}, {a}, {b}, {acc};"

    lines = [".reg .f32 s<4>, b<4>;", *(f"mov.f32 {to}{i}, 0f00000000;" for to in "sb" for i in range(4))]
    for k in range(steps):
        if precise:
            lines += [mma("s", rest[k], w_big[k]), mma("s", big[k], w_rest[k])]
        lines.append(mma("b", big[k], w_big[k]))
    return block(*lines, *(f"add.f32 ${i}, b{i}, s{i};" for i in range(4)))


@gluon.constexpr_function
def registers(outputs, inputs):
    """Which kind of register each has."""
    return ",".join([*(f"={c}" for c in outputs), *inputs])


@gluon.jit
def base_of(thread):
    text: gl.constexpr = "{ .reg .u32 a; mov.u32 a, global_smem; add.u32 $0, a, $1; }"
    return gl.inline_asm_elementwise(text, "=r,r", [thread * 0 + AT], gl.int32, False, 1)


@gluon.jit
def far(place, program):
    """A place in the shared memory of a program of the cluster."""
    text: gl.constexpr = "mapa.shared::cluster.u32 $0, $1, $2;"
    return gl.inline_asm_elementwise(text, "=r,r,r", [place, program], gl.int32, True, 1)


@gluon.jit
def meet(thread):
    """All threads of the cluster."""
    text: gl.constexpr = (
        "{ barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0; }"
    )
    gl.inline_asm_elementwise(text, "=r,r", [thread], gl.int32, False, 1)


@gluon.jit
def make_barriers(thread, base):
    text: gl.constexpr = """{
    .reg .pred p; setp.eq.u32 p, $1, 0;
    @p mbarrier.init.shared::cta.b64 [$2], 1;
    @p mbarrier.init.shared::cta.b64 [$2+8], 1;
    @p fence.mbarrier_init.release.cluster;
    mov.u32 $0, 0;
    }"""
    gl.inline_asm_elementwise(text, "=r,r,r", [thread, base], gl.int32, False, 1)


@gluon.jit
def expect(thread, barrier, count):
    """So many bytes complete the barrier."""
    text: gl.constexpr = """{
    .reg .pred p; setp.eq.u32 p, $1, 0;
    @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$2], $3;
    mov.u32 $0, 0;
    }"""
    gl.inline_asm_elementwise(text, "=r,r,r,r", [thread, barrier, count], gl.int32, False, 1)


@gluon.jit
def wait(barrier, turn):
    text: gl.constexpr = """{
    .reg .pred p;
    AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2;
    @p bra DONE;
    bra AGAIN;
    DONE: mov.u32 $0, 0;
    }"""
    gl.inline_asm_elementwise(text, "=r,r,r", [barrier, turn], gl.int32, False, 1)


@gluon.jit
def put4(place, a, b, c, d):
    text: gl.constexpr = "{ st.shared.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0; }"
    gl.inline_asm_elementwise(text, "=r,r,f,f,f,f", [place, a, b, c, d], gl.int32, False, 1)


@gluon.jit
def get4(place):
    text: gl.constexpr = "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
    return gl.inline_asm_elementwise(text, "=f,=f,=f,=f,r", [place], (gl.float32,) * gl.constexpr(4), False, 1)


@gluon.jit
def any_of(word, running):
    """Whether any row of a warp runs, as a number of the whole warp; all warps know all rows."""
    text: gl.constexpr = """{
    .reg .pred p, q; .reg .u32 any;
    setp.ne.u32 p, $1, 0; vote.sync.any.pred q, p, 0xffffffff; selp.u32 any, 1, 0, q;
    st.shared.u32 [$2], any; bar.warp.sync 0xffffffff; mov.u32 $0, 0;
    }"""
    gl.inline_asm_elementwise(text, "=r,r,r", [running.to(gl.int32), word], gl.int32, False, 1)
    text2: gl.constexpr = """{
    .reg .u32 a, w; mov.u32 w, %tid.x; shr.u32 w, w, 5; shl.b32 w, w, 2; mov.u32 a, global_smem; add.u32 a, a, w;
    add.u32 a, a, $1; ld.shared.u32 $0, [a];
    }"""
    return gl.inline_asm_elementwise(text2, "=r,r", [AT + WORDS], gl.int32, False, 1)


@gluon.jit
def warp_sum(x):
    text: gl.constexpr = warp_sum_text()
    return gl.inline_asm_elementwise(text, "=f,f", [x], gl.float32, False, 1)


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return reciprocal(1 + exp2(x * -LOG2_E))


@gluon.jit
def tanh(x):
    """1 - 2 / (1 + e^2x)."""
    return 1 - 2 * reciprocal(1 + exp2(x * (2 * LOG2_E)))


@gluon.jit
def split(a, COUNT: gl.constexpr, BITS: gl.constexpr = 0):
    text: gl.constexpr = split_text(COUNT, BITS)
    kinds: gl.constexpr = registers("r" * (2 * COUNT), "f" * COUNT)
    return gl.inline_asm_elementwise(text, kinds, a, (gl.int32,) * (2 * COUNT), True, 1)


@gluon.jit
def gates_of(at, stride, ok):
    """Numbers of the four gates."""
    return (
        gl.load(at, mask=ok, other=0.0), gl.load(at + stride, mask=ok, other=0.0),
        gl.load(at + 2 * stride, mask=ok, other=0.0), gl.load(at + 3 * stride, mask=ok, other=0.0),
    )  # fmt: skip


@gluon.jit
def states_of(h, row_a, row_b, k, B, H):
    """The left side of a step of a product."""
    a, b = h + row_a * H + k, h + row_b * H + k
    ok_a, ok_b = (row_a < B) & (k < H), (row_b < B) & (k < H)
    more_a, more_b = (row_a < B) & (k + 1 < H), (row_b < B) & (k + 1 < H)
    return (
        gl.load(a, mask=ok_a, other=0.0), gl.load(b, mask=ok_b, other=0.0),
        gl.load(a + 1, mask=more_a, other=0.0), gl.load(b + 1, mask=more_b, other=0.0),
    )  # fmt: skip


@gluon.jit
def weights_of(weight, H, stride, size, j_out, k, gate: gl.constexpr, STEPS: gl.constexpr):
    """The right side of a warp's product, for one gate: split, [2 STEPS] and its rest."""
    ok = j_out < H
    at = weight + (gate * H + j_out) * stride + k
    found = (gl.load(at, mask=ok & (k < size), other=0.0), gl.load(at + 1, mask=ok & (k + 1 < size), other=0.0))
    for i in gl.static_range(1, STEPS):
        found = found + (
            gl.load(at + 8 * i, mask=ok & (k + 8 * i < size), other=0.0),
            gl.load(at + 8 * i + 1, mask=ok & (k + 8 * i + 1 < size), other=0.0),
        )
    return split(found, 2 * STEPS, 0x1000)


@gluon.jit
def product(left, right, STEPS: gl.constexpr, PRECISE: gl.constexpr):
    text: gl.constexpr = product_text(STEPS, PRECISE)
    kinds: gl.constexpr = registers("ffff", "r" * (12 * STEPS))
    return gl.inline_asm_elementwise(text, kinds, left + right, (gl.float32,) * gl.constexpr(4), True, 1)


@gluon.jit
def sums_of(left, w0, w1, w2, w3, sums, warp, STEPS: gl.constexpr, PRECISE: gl.constexpr):
    """The four gates' products of a thread's row and unit: every warp makes a part of all sums; they are exchanged."""
    parts = split(left, 4 * STEPS)
    p0 = product(parts, w0, STEPS, PRECISE)
    p1 = product(parts, w1, STEPS, PRECISE)
    p2 = product(parts, w2, STEPS, PRECISE)
    p3 = product(parts, w3, STEPS, PRECISE)
    # Rows g, g + 8 by units: 2 q, 2 q + 1 of row g are for warps 0 and 1.
    put4(sums + (0 + warp) * 512, p0[0], p1[0], p2[0], p3[0])
    put4(sums + (4 + warp) * 512, p0[1], p1[1], p2[1], p3[1])
    put4(sums + (8 + warp) * 512, p0[2], p1[2], p2[2], p3[2])
    put4(sums + (12 + warp) * 512, p0[3], p1[3], p2[3], p3[3])
    gl.thread_barrier()
    mine = sums + warp * 2048
    s0, s1, s2, s3 = get4(mine), get4(mine + 512), get4(mine + 1024), get4(mine + 1536)
    return (
        (s0[0] + s1[0]) + (s2[0] + s3[0]), (s0[1] + s1[1]) + (s2[1] + s3[1]), (s0[2] + s1[2]) + (s2[2] + s3[2]),
        (s0[3] + s1[3]) + (s2[3] + s3[3]),
    )  # fmt: skip


@gluon.jit
def project(x, weight_ih, stride, size, T, B, H, row_a, row_b, j_out, warp, q, sums, to, PRECISE: gl.constexpr,
            XS: gl.constexpr):  # fmt: skip
    """W_x x_t of all input steps, to a thread's own places."""
    k = warp * (8 * XS) + 2 * q
    w0 = weights_of(weight_ih, H, stride, size, j_out, k, 0, XS)
    w1 = weights_of(weight_ih, H, stride, size, j_out, k, 1, XS)
    w2 = weights_of(weight_ih, H, stride, size, j_out, k, 2, XS)
    w3 = weights_of(weight_ih, H, stride, size, j_out, k, 3, XS)
    for t in range(T):
        at = x + t * B * size
        left = states_of(at, row_a, row_b, k, B, size)
        for step in gl.static_range(1, XS):
            left = left + states_of(at, row_a, row_b, k + 8 * step, B, size)
        made = sums_of(left, w0, w1, w2, w3, sums, warp, XS, PRECISE)
        put4(to + t * INPUT, made[0], made[1], made[2], made[3])
        gl.thread_barrier()  # the sums have been read


@gluon.jit
def inputs_of(xw, kept, t, T, B, H, row, j, ok, XS: gl.constexpr):
    """W_x x_t of the four gates; of no step that there is not."""
    if XS > 0:
        found = get4(kept + gl.minimum(t, T - 1) * INPUT)
    else:
        found = gates_of(xw + (t * B + row).to(gl.int64) * 4 * H + j, H, ok & (t < T))
    return found


@gluon.jit
def read_out(mean, weight_y, bias_y, y, lengths, program, rg, warp, lane, T, B, H, RAGGED: gl.constexpr,
             BIAS_Y: gl.constexpr, OUT: gl.constexpr, CG: gl.constexpr):  # fmt: skip
    """The read-out of a row group, a warp for each state; zeros at padding."""
    for first in range(0, 16 * T, 4 * CG):
        which = first + program * 4 + warp
        row, t = rg * 16 + which % 16, which // 16
        ok = (t < T) & (row < B)
        there = ok
        if RAGGED:
            there = ok & (t < gl.load(lengths + row, mask=ok, other=0).to(gl.int32))
        at = mean + (t * B + row).to(gl.int64) * H
        for o in gl.static_range(OUT):
            total = gl.load(at + lane, mask=there & (lane < H), other=0.0) * gl.load(
                weight_y + o * H + lane, mask=lane < H, other=0.0
            )
            for i in gl.static_range(1, CG // 4):
                j = lane + 32 * i
                w = gl.load(weight_y + o * H + j, mask=j < H, other=0.0)
                total = total + w * gl.load(at + j, mask=there & (j < H), other=0.0)
            total = warp_sum(total)
            if BIAS_Y:
                total = total + gl.load(bias_y + o)
            gl.store(y + (t * B + row) * OUT + o, gl.where(there, total, 0.0), mask=ok & (lane == 0))


@gluon.jit
def halting(logit, total, n, limit, threshold, FORCED: gl.constexpr):
    """p^n, whether the row goes on, and the halting sum."""
    if FORCED:
        going, h = n < limit, total
        p = gl.where(n == limit, 1.0, 0.0)
    else:
        h = sigmoid(logit)
        going = (total + h < threshold) & (n < limit)
        p = gl.where(going, h, 1 - total)
    return p, going, total + h


@gluon.jit
def write(ended, mean_out, h_out, c_out, steps_out, remainder, rho_out, row, j, T, B, H, length, ok, speaks):
    """What a step left, where it ended."""
    ends, t, n, last, m, m_c = ended
    out = t * B + row
    gl.store(mean_out + out.to(gl.int64) * H + j, m, mask=ok & ends)
    final = ok & ends & (t == length - 1)
    gl.store(h_out + row * H + j, m, mask=final)
    gl.store(c_out + row * H + j, m_c, mask=final)
    gl.store(steps_out + out, n.to(gl.int64), mask=speaks & ends)
    gl.store(remainder + out, last, mask=speaks & ends)
    gl.store(rho_out + out, n.to(gl.float32) + last, mask=speaks & ends)


@gluon.jit(do_not_specialize=["T", "B", "limit"])
def lstm_kernel(
    x_in, xw, weight, weight_ih, ih_stride, bias_ih, bias_hh, halt, halt_bias, lengths, h_in, c_in, weight_y, bias_y,
    y_out, mean_out, h_out, c_out, steps_out, remainder, rho_out, cost_out, T, B, H, limit, threshold,
    RAGGED: gl.constexpr, BIAS: gl.constexpr, BIAS_Y: gl.constexpr, FORCED: gl.constexpr, PRECISE: gl.constexpr,
    CG: gl.constexpr, XS: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Forward, of one network. ``xw``: W_x x_t [T, B, 4 H]; where XS > 0 it is made here, of ``x_in`` with up to 32 XS
    features. ``mean_out``: s_t [T, B, H]; where OUT, its size, is not 0, the read-out is made, too. Of ``weight_ih``,
    [4 H, ih_stride], the last column is the flag's."""
    STEPS: gl.constexpr = CG // 4
    program, rg = gl.program_id(0), gl.program_id(1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    # The symbol of shared memory is there where Triton uses some.
    dummy = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    thread = gl.arange(0, 128, layout)
    dummy.store(thread)
    thread = dummy.load(layout)
    warp, lane = thread // 32, thread % 32
    g, q, a, b = lane // 4, lane % 4, warp // 2, warp % 2
    base = base_of(thread)
    make_barriers(thread, base)

    # Its own row and unit; the rows of which it sees states; the first unit of those.
    row, j = rg * 16 + g + 8 * a, program * 8 + 2 * q + b
    row_a = rg * 16 + g
    row_b = row_a + 8
    k = warp * (8 * STEPS) + 2 * q
    ok = (row < B) & (j < H)
    length_a, length_b = gl.where(row_a < B, T, 0), gl.where(row_b < B, T, 0)
    if RAGGED:
        length_a = gl.load(lengths + row_a, mask=row_a < B, other=0).to(gl.int32)
        length_b = gl.load(lengths + row_b, mask=row_b < B, other=0).to(gl.int32)
    sums, kept, j_out = base + SUMS + lane * 16, base + INPUTS + thread * 16, program * 8 + g
    if XS > 0:
        project(
            x_in, weight_ih, ih_stride, ih_stride - 1, T, B, H, row_a, row_b, j_out, warp, q, sums, kept, PRECISE, XS
        )
    w0 = weights_of(weight, H, H, H, j_out, k, 0, STEPS)
    w1 = weights_of(weight, H, H, H, j_out, k, 1, STEPS)
    w2 = weights_of(weight, H, H, H, j_out, k, 2, STEPS)
    w3 = weights_of(weight, H, H, H, j_out, k, 3, STEPS)
    flag = gates_of(weight_ih + j * ih_stride + ih_stride - 1, H * ih_stride, j < H)
    zero = flag[0] * 0
    b0, b1, b2, b3 = zero, zero, zero, zero
    if BIAS:
        i, h = gates_of(bias_ih + j, H, j < H), gates_of(bias_hh + j, H, j < H)
        b0, b1, b2, b3 = i[0] + h[0], i[1] + h[1], i[2] + h[2], i[3] + h[3]
    w_halt = gl.load(halt + j, mask=j < H, other=0.0)
    bias_h = gl.load(halt_bias)
    # The states that a warp's product sees, and their mean so far.
    left = states_of(h_in, row_a, row_b, k, B, H)
    for step in gl.static_range(1, STEPS):
        left = left + states_of(h_in, row_a, row_b, k + 8 * step, B, H)
    means = (zero,) * (4 * STEPS)
    c = gl.load(c_in + row * H + j, mask=ok, other=0.0)
    mean, mean_c = zero, zero
    # Of rows a and b: the input step, the update, the halting sum.
    t_a, t_b, n_a, n_b = thread * 0, thread * 0, thread * 0 + 1, thread * 0 + 1
    total_a, total_b = zero, zero
    # Of its own: the input step, the cost so far, and of the update before: whether it ended a step, of which number,
    # N, R, the mean states. One thread of a row speaks for it.
    t, cost, upper = t_a, zero, a > 0
    length = gl.where(upper, length_b, length_a)
    ended = t_a < 0, t_a, n_a, zero, zero, zero
    speaks = (program == 0) & (q == 0) & (b == 0) & (row < B)
    x = inputs_of(xw, kept, t_a, T, B, H, row, j, ok, XS)
    # Where its states and shares go to in a receiver's memory, and the receivers of a thread.
    to_state = STATES + program * 512 + warp * 128 + g * 16
    to_share = SHARES + (program * 2 + b) * HALF + a * 32 + lane % 2 * 16
    receivers = (far(base, lane // 2 % CG), far(base, q * STEPS))
    for step in gl.static_range(1, STEPS):
        receivers = receivers + (far(base, q * STEPS + step),)
    word = base + WORDS + warp * 4
    meet(thread)

    tick = 0
    runs = any_of(word, (t_a < length_a) | (t_b < length_b))
    while runs > 0:
        turn = tick % 2
        made = sums_of(left, w0, w1, w2, w3, sums, warp, STEPS, PRECISE)
        n = gl.where(upper, n_b, n_a)
        first = gl.where(n == 1, 1.0, 0.0)
        a0 = x[0] + b0 + first * flag[0] + made[0]
        a1 = x[1] + b1 + first * flag[1] + made[1]
        a2 = x[2] + b2 + first * flag[2] + made[2]
        a3 = x[3] + b3 + first * flag[3] + made[3]
        c_new = sigmoid(a1) * c + sigmoid(a0) * tanh(a2)
        s = sigmoid(a3) * tanh(c_new)

        # To everybody.
        send: gl.constexpr = send_text(STEPS)
        kinds: gl.constexpr = registers("r", "rfrrrrr" + "r" * STEPS)
        args = (
            s.to(gl.int32, bitcast=True), s * w_halt, to_state + turn * STATE, to_share + turn * SHARE,
            thread * 0 + turn * 8, lane,
        ) + receivers  # fmt: skip
        gl.inline_asm_elementwise(send, kinds, args, gl.int32, False, 1)
        # While it is on its way: what the update before left to be written, and what the next step will need.
        write(ended, mean_out, h_out, c_out, steps_out, remainder, rho_out, row, j, T, B, H, length, ok, speaks)
        x_next = inputs_of(xw, kept, t + 1, T, B, H, row, j, ok, XS)
        # From everybody.
        barrier = base + turn * 8
        expect(thread, barrier, thread * 0 + CG * 640)
        wait(barrier, thread * 0 + (tick // 2) % 2)
        logits: gl.constexpr = logits_text(STEPS)
        at = base + SHARES + turn * SHARE + q * HALF + g * 4
        logit = gl.inline_asm_elementwise(logits, "=f,=f,r", [at], (gl.float32,) * gl.constexpr(2), False, 1)
        states: gl.constexpr = states_text(STEPS)
        kinds_s: gl.constexpr = registers("f" * (4 * STEPS), "r")
        at = base + STATES + turn * STATE + warp * (512 * STEPS) + lane * 4
        seen = gl.inline_asm_elementwise(states, kinds_s, [at], (gl.float32,) * (4 * STEPS), False, 1)

        weight_a, going_a, sum_a = halting(logit[0] + bias_h, total_a, n_a, limit, threshold, FORCED)
        weight_b, going_b, sum_b = halting(logit[1] + bias_h, total_b, n_b, limit, threshold, FORCED)
        ends_a, ends_b = (going_a == 0) & (t_a < length_a), (going_b == 0) & (t_b < length_b)
        # What the next product sees.
        m = means[0] + weight_a * seen[0]
        left = (gl.where(going_a, seen[0], m),)
        means_next = (gl.where(going_a, m, 0.0),)
        for part in gl.static_range(1, 4 * STEPS):
            m = means[part] + (weight_a if part % 2 == 0 else weight_b) * seen[part]
            left = left + (gl.where(going_a if part % 2 == 0 else going_b, seen[part], m),)
            means_next = means_next + (gl.where(going_a if part % 2 == 0 else going_b, m, 0.0),)
        means = means_next
        # Its own number.
        p, going = gl.where(upper, weight_b, weight_a), gl.where(upper, going_b, going_a)
        last = 1.0 if FORCED else 1 - gl.where(upper, total_b, total_a)
        m = mean + p * s
        m_c = mean_c + p * c_new
        ended = (going == 0) & (t < length), t, n, last + zero, m, m_c
        cost = cost + gl.where(ended[0], n.to(gl.float32) + last, 0.0)
        c = gl.where(going, c_new, m_c)
        mean, mean_c = gl.where(going, m, 0.0), gl.where(going, m_c, 0.0)
        x = (
            gl.where(going, x[0], x_next[0]), gl.where(going, x[1], x_next[1]), gl.where(going, x[2], x_next[2]),
            gl.where(going, x[3], x_next[3]),
        )  # fmt: skip
        t_a, t_b = t_a + ends_a.to(gl.int32), t_b + ends_b.to(gl.int32)
        t = gl.where(upper, t_b, t_a)
        n_a, n_b = gl.where(going_a, n_a + 1, 1), gl.where(going_b, n_b + 1, 1)
        total_a, total_b = gl.where(going_a, sum_a, 0.0), gl.where(going_b, sum_b, 0.0)
        tick += 1
        runs = any_of(word, (t_a < length_a) | (t_b < length_b))
    write(ended, mean_out, h_out, c_out, steps_out, remainder, rho_out, row, j, T, B, H, length, ok, speaks)
    gl.store(cost_out + row, cost, mask=speaks)
    meet(thread)  # nobody sends to a program that has ended, and all see what others wrote
    if OUT > 0:
        read_out(mean_out, weight_y, bias_y, y_out, lengths, program, rg, warp, lane, T, B, H, RAGGED, BIAS_Y, OUT, CG)
