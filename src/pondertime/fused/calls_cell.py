"""The cells of the plain calls: weights laid out for their products, and updates of as few calls as possible.

Sums are ``[rows, slots H]``: of a GRU the place of U_n h has a bias of its own.
"""

import torch
from torch import Tensor

from pondertime.fused.buffers import Buffers
from pondertime.fused.common import GRU, LSTM, RNN_TANH, CellKind, Inputs

# Rows from which on a product does not care how its weights lie; numbers of a matrix that are transposed at once.
MANY_ROWS, BLOCK = 128, 2**18
MINUS_1 = {dtype: torch.tensor(-1, dtype=dtype) for dtype in (torch.float32, torch.float64)}


class Cell:
    """A cell's weights and its updates."""

    def __init__(self, i: Inputs, kind: CellKind) -> None:
        (B, self.H), self.kind = i.h.shape, kind
        # Skinny products are quicker with a copy that lies row after row; an LSTM's is scaled.
        lies = B >= MANY_ROWS and kind is not LSTM
        self.weight, weight_x = (a.t() if lies else transposed(a) for a in (i.weight_hh, i.weight_ih))
        H, self.bias = self.H, None
        if i.bias_ih is not None and i.bias_hh is not None:
            self.bias = i.bias_ih + i.bias_hh
            if kind is GRU:
                self.bias = torch.cat([self.bias[: 2 * H], i.bias_hh[2 * H :], i.bias_ih[2 * H :]])
        if kind is GRU:
            weight_x = torch.cat([weight_x[:, : 2 * H], weight_x.new_zeros(len(weight_x), H), weight_x[:, 2 * H :]], 1)
        if kind is LSTM:
            # tanh g = 2 sigmoid(2 g) - 1: all four gates become sigmoids, one call.
            for a in (self.weight, weight_x, self.bias):
                if a is not None:
                    a[..., 2 * H : 3 * H] *= 2
        self.table, self.flag = weight_x[:-1], weight_x[-1]
        self.products = self.weight.numel()

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What first updates and later ones add to their products, for all t: ``[T, B, slots H]``."""
        if not x.is_floating_point():
            xw = torch.nn.functional.embedding(x.long(), self.table)
            xw = xw if self.bias is None else xw.add_(self.bias)
        else:
            rows = x.flatten(0, 1)
            xw = torch.mm(rows, self.table) if self.bias is None else torch.addmm(self.bias, rows, self.table)
            xw = xw.view(*x.shape[:2], -1)
        return xw + self.flag, xw

    def update(self, b: Buffers, start: int, end: int, x: Tensor, later: Tensor, *, zero: bool) -> None:
        """The updates from start to end of a segment.

        x: what the first one adds to its product; later: what the others do; zero: the state before is zero.
        """
        (self.lstm if self.kind is LSTM else self.gru if self.kind is GRU else self.rnn)(
            b, start, end, x, later, zero=zero
        )

    def rnn(self, b: Buffers, start: int, end: int, x: Tensor, later: Tensor, *, zero: bool) -> None:
        activate, weight, addmm = torch.tanh_ if self.kind is RNN_TANH else torch.relu_, self.weight, torch.addmm
        for k in range(start, end):
            h = b.h[k + 1]
            activate(h.copy_(x) if zero else addmm(x, b.h[k], weight, out=h))
            x, zero = later, False

    def lstm(self, b: Buffers, start: int, end: int, x: Tensor, later: Tensor, *, zero: bool) -> None:
        weight, minus_1 = self.weight, MINUS_1[self.weight.dtype]
        addmm, add, mul, tanh = torch.addmm, torch.add, torch.mul, torch.tanh
        for k in range(start, end):
            sums, (i, f, g, o) = b.rows[k], b.each_gate[k]
            (sums.copy_(x) if zero else addmm(x, b.h[k], weight, out=sums)).sigmoid_()
            tanh_g = add(minus_1, g, alpha=2, out=b.tanh_g[k])
            c = mul(f, b.c[k], out=b.c[k + 1]).addcmul_(i, tanh_g)
            mul(o, tanh(c, out=b.tanh_c[k]), out=b.h[k + 1])
            x, zero = later, False

    def gru(self, b: Buffers, start: int, end: int, x: Tensor, later: Tensor, *, zero: bool) -> None:
        weight, width = self.weight, 3 * self.H
        for k in range(start, end):
            sums, (r, z, q, v) = b.rows[k], b.each_gate[k]
            sums.copy_(x[:, :width]) if zero else torch.addmm(x[:, :width], b.h[k], weight, out=sums)
            b.sigmoids[k].sigmoid_()
            torch.addcmul(x[:, width:], r, q, out=v).tanh_()
            torch.lerp(v, b.h[k], z, out=b.h[k + 1])
            x, zero = later, False


def transposed(a: Tensor) -> Tensor:
    """A copy with rows and columns swapped, in blocks that stay in the cache."""
    made, block = a.new_empty(a.shape[::-1]), max(64, BLOCK // a.shape[1])
    for k in range(0, len(a), block):
        made[:, k : k + block].copy_(a[k : k + block].t())
    return made
