"""Products on tensor cores, on weights that a program keeps.

A product over K = KS KB numbers is cut into KS, one for each warp, and the parts are added at the end. In float32 each
factor is the sum of two that tensor cores multiply exactly, and the product of the two small ones is left out.
"""

import triton
import triton.language as tl

from pondertime.fused.triton_tape import FLOAT32, HALF


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


@triton.jit
def by_weight(a, at, inside, PRECISION: tl.constexpr):
    """a [KS, BR, K] times weights [KS, K, BU] that are read for it, summed over KS."""
    w, rest = take_weight(at, inside, PRECISION)
    return product(a, w, rest, PRECISION)
