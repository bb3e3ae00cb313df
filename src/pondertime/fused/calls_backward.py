"""The plain calls' way back: the derivatives of a segment's updates from what the forward pass kept.

All that an update's derivative is multiplied by is made for the whole segment at once; what is left of an update is
one product and a few calls before it.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pondertime.fused.buffers import Buffers
from pondertime.fused.common import GRU, LSTM, RNN_TANH, Sums

if TYPE_CHECKING:
    from pondertime.fused.calls import Run, Segment

# Rows of derivatives gathered before they are multiplied into the weight gradient.
WEIGHT_ROWS = 512

# By their full names: torch then need not look for the one that fits.
tanh_backward: Any = torch.ops.aten.tanh_backward.grad_input
sigmoid_backward: Any = torch.ops.aten.sigmoid_backward.grad_input
relu_backward: Any = torch.ops.aten.threshold_backward.grad_input


class Gradients:
    """The sums of a backward pass."""

    def __init__(self, run: "Run") -> None:
        self.run = run
        self.weight_hh = run.inputs.weight_hh.contiguous()
        self.xw, self.flag, self.weight, self.halt, self.halt_bias = (
            torch.zeros_like(a) for a in (run.xw, run.flag, self.weight_hh, run.halt, run.halt_bias)
        )
        self.bias_n = torch.zeros_like(run.bias_n) if run.rules.kind is GRU else None
        self.pending: list[Segment] = []
        self.waiting = 0
        self.done: list[Segment] = []

    def all_steps(self, d_mean: Tensor, G: Tensor, d_remainder: Tensor) -> Sums:
        """All input steps, the last one first. G ``[leaves, rows, H]``: by the last state; the others by t."""
        run, r = self.run, d_remainder.contiguous().numpy()
        while run.segments:
            steps = [run.segments.pop()]
            while steps[-1].first > 1:
                steps.append(run.segments.pop())
            first = steps[-1]
            if first.rows is None:
                G[0] += d_mean[first.t]
                G = self.input_step(steps, G, r[first.t])
                continue
            assert first.made is not None
            real = torch.from_numpy(first.made[0])
            rows = first.rows[real]
            G[0, rows] += d_mean[first.t][rows]
            G[:, rows] = self.input_step(steps, G, r[first.t])[:, real]
        self.flush()
        d_h, d_c, *_ = *(a.reshape(run.E, -1, run.H).clone() for a in G), None
        for s in self.done:
            s.buffers.give_back()
        return Sums(
            self.xw, self.flag, self.weight, self.bias_n, self.halt.unsqueeze(1), self.halt_bias, d_h, d_c
        )  # fmt: skip

    def input_step(self, segments: list["Segment"], G: Tensor, r: np.ndarray) -> Tensor:
        """The segments of an input step, the last one first; returns the derivatives by s_{t-1} of its rows."""
        end_dot = np.zeros(G.shape[1], r.dtype)
        D: Tensor | None = None
        kept: Tensor | None = None
        for s in segments:
            if kept is not None and D is not None:
                D = D.new_zeros(s.buffers.states[:, 0].shape).index_add_(1, kept, D)
            D = self.segment(s, G, end_dot, r, D)
            kept = s.kept
        assert D is not None
        return D

    def segment(self, s: "Segment", G: Tensor, end_dot: np.ndarray, r: np.ndarray, D: Tensor | None) -> Tensor:
        """A segment backwards: from the derivatives by its last state to those by the state before it."""
        run, b = self.run, s.buffers
        b.grads()
        if s.rows is not None:
            G = G[:, s.rows]
        # d[:, k + 1] becomes the derivative by the state after update k, d[:, 0] that by the state before.
        d = b.d_states[:, : s.size + 1]
        d[:, 0] = 0
        torch.mul(torch.from_numpy(s.p).unsqueeze(2), G.unsqueeze(1), out=d[:, 1:])
        if run.rules.force_steps is None:
            d_logit = self.by_halting(s, G, end_dot, r)
            d[0, 1:].addcmul_(d_logit.unsqueeze(2), run.spread(run.halt, G.shape[1]))
        if D is not None:
            d[:, -1] += D
        kind = run.rules.kind
        (self.lstm if kind is LSTM else self.gru if kind is GRU else self.rnn)(b, s.size)
        self.by_sums(s)
        return d[:, 0]

    def by_halting(self, s: "Segment", G: Tensor, end_dot: np.ndarray, r: np.ndarray) -> Tensor:
        """d(loss)/d(h^n) h^n (1 - h^n) = (G . (s^n - s^N) - r) h^n (1 - h^n) for n < N, 0 for n = N; [size, m]."""
        run, states = self.run, s.buffers.states[:, 1 : s.size + 1]
        dot = torch.linalg.vecdot(states, G.unsqueeze(1)).numpy()
        dot = dot[0] if len(dot) == 1 else dot[0] + dot[1]
        rows = slice(None) if s.rows is None else s.rows.numpy()
        end_dot[rows] += np.where(s.last, dot, 0).sum(0)
        by_h = np.where(s.going, dot - (end_dot[rows] + r[rows]), 0)
        d_logit = torch.from_numpy(by_h * s.prob * (1 - s.prob))
        if run.E == 1:
            flat = d_logit.view(-1)
            self.halt[0].addmv_(states[0].view(len(flat), -1).t(), flat)
            self.halt_bias += flat.sum()
        else:
            each = d_logit.view(s.size, run.E, -1).transpose(0, 1).reshape(run.E, 1, -1)
            self.halt += torch.bmm(each, self.by_network(states[0])).squeeze(1)
            self.halt_bias += each.sum(2)
        return d_logit

    def rnn(self, b: Buffers, size: int) -> None:
        """The updates of a segment backwards: derivatives by their sums from those by their states."""
        tanh, product, weight = self.run.rules.kind is RNN_TANH, self.run.add_product, self.weight_hh
        for k in reversed(range(size)):
            if tanh:
                tanh_backward(b.d_h[k + 1], b.h[k + 1], grad_input=b.d_rows[k])
            else:
                relu_backward(b.d_h[k + 1], b.h[k + 1], 0, grad_input=b.d_rows[k])
            product(b.d_h[k], b.d_rows[k], weight)

    def lstm(self, b: Buffers, size: int) -> None:
        product, weight, tanh_c = self.run.add_product, self.weight_hh, b.tanh_c[:size]
        i, f, g, o = b.gates[:size].unbind(2)
        d_i, d_f, d_g, d_o = b.d_gates[:size].unbind(2)
        tanh_backward(o, tanh_c, grad_input=b.through[:size])
        sigmoid_backward(tanh_c, o, grad_input=d_o)
        sigmoid_backward(2 * g - 1, i, grad_input=d_i)
        sigmoid_backward(b.states[1, :size], f, grad_input=d_f)
        sigmoid_backward(i, g, grad_input=d_g)
        d_g *= 4
        for k in reversed(range(size)):
            d_h, d_c = b.d_h[k + 1], b.d_c[k + 1]
            d_c.addcmul_(d_h, b.through_rows[k])
            b.by_c[k].mul_(b.wide[k + 1])
            b.d_o[k].mul_(d_h)
            b.d_c[k].addcmul_(d_c, b.f[k])
            product(b.d_h[k], b.d_rows[k], weight)

    def gru(self, b: Buffers, size: int) -> None:
        product, weight = self.run.add_product, self.weight_hh
        r, z, q, v = b.gates[:size].unbind(2)
        d_r, d_z, d_q, d_v = b.d_gates[:size].unbind(2)
        tanh_backward(1 - z, v, grad_input=d_v)
        sigmoid_backward(b.states[0, :size] - v, z, grad_input=d_z)
        torch.mul(d_v, r, out=d_q)
        sigmoid_backward(d_v * q, r, grad_input=d_r)
        for k in reversed(range(size)):
            d_h = b.d_h[k + 1]
            b.d_each[k].mul_(b.wide[k + 1])
            b.d_h[k].addcmul_(d_h, b.z[k])
            product(b.d_h[k], b.d_rows[k], weight)

    def by_sums(self, s: "Segment") -> None:
        """What a segment's derivatives add to the sums."""
        H, E = self.run.H, self.run.E
        d_sums = s.buffers.d_sums[: s.size]
        d_x, first = d_sums.sum(0), d_sums[0]
        if self.bias_n is not None:
            self.bias_n += d_x[:, 2 * H : 3 * H].reshape(E, -1, H).sum(1)
            d_x, first = (torch.cat([a[:, : 2 * H], a[:, 3 * H :]], 1) for a in (d_x, first))
        if s.first == 1:
            self.flag += first.view(E, -1, first.shape[1]).sum(1)
        whole = self.xw[:, s.t]
        if s.rows is None:
            whole += d_x.view(whole.shape)
        elif E == 1:
            whole[0].index_add_(0, s.rows, d_x)
        else:
            self.xw[:, s.t] = whole.flatten(0, 1).index_add(0, s.rows, d_x).view(whole.shape)
        self.pending.append(s)
        self.waiting += s.size * d_sums.shape[1]
        if self.waiting >= WEIGHT_ROWS * E:
            self.flush()

    def by_network(self, a: Tensor) -> Tensor:
        """``[k, E m, w]`` as ``[E, k m, w]``."""
        (k, rows, width), E = a.shape, self.run.E
        if E == 1:
            return a.reshape(1, k * rows, width)
        return a.reshape(k, E, rows // E, width).transpose(0, 1).reshape(E, k * rows // E, width)

    def flush(self) -> None:
        """Add the gathered rows to the weight gradient with one product."""
        P = self.weight_hh.shape[1]
        if self.pending:
            d = [self.by_network(s.buffers.d_sums[: s.size, :, :P]) for s in self.pending]
            h = [self.by_network(s.buffers.states[0, : s.size]) for s in self.pending]
            all_d, all_h = (parts[0] if len(parts) == 1 else torch.cat(parts, 1) for parts in (d, h))
            self.weight.baddbmm_(all_d.transpose(1, 2), all_h)
        self.done += self.pending
        self.pending, self.waiting = [], 0
