"""The arithmetic of torch.nn's cells on Triton tiles: an update forward and backward, without its product.

a: what a gate sees, the product included. dh, dc: derivatives by h^n and c^n.
"""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x); 0 where e^-x overflows."""
    return 1 / (1 + tl.exp(-x))


@triton.jit
def tanh(x):
    """(1 - e) / (1 + e) with the sign of x, e = e^(-2 |x|); never overflows."""
    e = tl.exp(-2 * tl.abs(x))
    y = (1 - e) / (1 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def relu(x):
    """max(x, 0), NaN where x is."""
    return tl.where(x < 0, 0.0, x)


@triton.jit
def rnn_forward(a, RELU: tl.constexpr):
    """h^n of a simple RNN."""
    return relu(a) if RELU else tanh(a)


@triton.jit
def rnn_backward(dh, h, RELU: tl.constexpr):
    """The derivative by a."""
    return tl.where(h > 0, dh, 0.0) if RELU else dh * (1 - h * h)


@triton.jit
def lstm_forward(a_i, a_f, a_g, a_o, c0):
    """The gates i, f, g, o and c^n; h^n = o tanh(c^n)."""
    i = sigmoid(a_i)
    f = sigmoid(a_f)
    g = tanh(a_g)
    o = sigmoid(a_o)
    return i, f, g, o, f * c0 + i * g


@triton.jit
def lstm_backward(dh, dc, i, f, g, o, c0, tanh_c):
    """Derivatives by a_i, a_f, a_g, a_o and c^{n-1}."""
    dc += dh * o * (1 - tanh_c * tanh_c)
    d_i = dc * g * i * (1 - i)
    d_f = dc * c0 * f * (1 - f)
    d_g = dc * i * (1 - g * g)
    d_o = dh * tanh_c * o * (1 - o)
    return d_i, d_f, d_g, d_o, dc * f


@triton.jit
def gru_forward(a_r, a_z, q, x_v, h0):
    """The gates r, z, the candidate v = tanh(x_v + r q) and h^n; q = U_n h^{n-1} + b'."""
    r = sigmoid(a_r)
    z = sigmoid(a_z)
    v = tanh(x_v + r * q)
    return r, z, v, v + z * (h0 - v)


@triton.jit
def gru_backward(dh, r, z, q, v, h0):
    """Derivatives by a_r, a_z, q, x_v and, past the product, h^{n-1}."""
    d_v = dh * (1 - z) * (1 - v * v)
    d_r = d_v * q * r * (1 - r)
    d_z = dh * (h0 - v) * z * (1 - z)
    return d_r, d_z, d_v * r, d_v, dh * z
