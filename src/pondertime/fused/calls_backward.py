"""The plain calls' way back: the derivatives of a segment's updates from what the forward pass kept.

All that an update's derivative is multiplied by is made for the whole segment at once; what is left of an update is
one product and a few calls before it.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pondertime.fused.buffers import Back, Buffers, Part, Sums, lend
from pondertime.fused.common import GRU, LSTM, RNN_TANH, Grads, Inputs, by_look_up

if TYPE_CHECKING:
    from pondertime.fused.calls import Run, Segment

# Rows of derivatives gathered before they are multiplied into the weight gradient, or numbers in them if that is more.
WEIGHT_ROWS, WEIGHT_NUMBERS = 512, 2**20

# By their full names: torch then need not look for the one that fits.
tanh_backward: Any = torch.ops.aten.tanh_backward.grad_input
sigmoid_backward: Any = torch.ops.aten.sigmoid_backward.grad_input
relu_backward: Any = torch.ops.aten.threshold_backward.grad_input


class Gradients:
    """The sums of a backward pass."""

    def __init__(self, run: "Run") -> None:
        self.run, kind = run, run.kind
        self.weight_hh = run.inputs.weight_hh.contiguous()
        # By the sums of an update; without an input they stay 0.
        make = self.weight_hh.new_empty if run.lengths is None else self.weight_hh.new_zeros
        self.xw = make(run.T, run.B, kind.slots * run.H)
        self.halt, self.halt_bias = torch.zeros_like(run.halt), 0.0
        self.weight: Tensor | None = None
        self.flag: Tensor | None = None
        self.firsts: list[Tensor] = []
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.waiting, self.enough = 0, max(WEIGHT_ROWS, WEIGHT_NUMBERS // len(self.weight_hh))
        self.backs: list[Back] = []

    def all_steps(self, d: Grads, *, x: bool) -> Inputs:
        """All input steps, the last one first, and what comes of their sums."""
        run, i = self.run, self.run.inputs
        d_y, d_weight_y, d_bias_y = d.y, None, None
        if i.weight_y is not None and d_y is not None:
            rows = run.present(d_y).reshape(run.T * run.B, -1)
            d_weight_y = torch.mm(rows.t(), run.mean.view(len(rows), -1))
            d_bias_y = None if i.bias_y is None else rows.sum(0)
            d_y = torch.mm(rows, i.weight_y).view(run.mean.shape)
        r = None if d.remainder is None else d.remainder.detach().numpy()
        d_y = None if d_y is None else d_y.unbind()
        ends = d_y is not None and run.lengths is None
        d_h, d_c = (torch.zeros_like(i.h) if a is None else a for a in (d_y[-1] if ends else d.h, d.c))
        if ends and d.h is not None:
            d_h = d_h + d.h
        # Not written to, but where sequences end at their own steps.
        G = d_h.unsqueeze(0) if i.c is None else torch.stack([d_h, d_c])
        G = G if run.lengths is None else G.clone()
        done: list[Segment] = []
        for t, rows, segments in reversed(run.steps):
            r_t = None if r is None else r[t]
            if run.lengths is None:
                base = d_y[t - 1] if d_y is not None and t > 0 else None
                base = False if run.fresh and t == 0 else base
                G = self.input_step(segments, G, r_t, self.xw[t], base)
            else:
                rows = slice(None) if rows is None else rows
                part = G[:, rows]
                if d_y is not None:
                    part[0] += d_y[t][rows]
                d_x = torch.empty_like(self.xw[t, rows])
                r_t = r_t if r_t is None or isinstance(rows, slice) else r_t[rows.numpy()]
                G[:, rows] = self.input_step(segments, part, r_t, d_x)
                self.xw[t, rows] = d_x
            done += segments
        run.steps = []
        self.flush()
        made: Any = self.by_inputs(x=x)
        if not run.fresh:
            made = made._replace(h=G[0].clone(), c=None if i.c is None else G[1].clone())
        for memory in (*self.backs, *(s.buffers for s in done)):
            memory.give_back()
        if i.weight_y is not None and d_weight_y is None:
            d_weight_y = torch.zeros_like(i.weight_y)
            d_bias_y = None if i.bias_y is None else torch.zeros_like(i.bias_y)
        return made._replace(weight_y=d_weight_y, bias_y=d_bias_y)

    def input_step(self, segments: list["Segment"], G: Tensor, r: Any, d_x: Tensor, base: Any = None) -> Tensor:
        """The segments of an input step, the last one first; returns base + the derivatives by s_{t-1}, writes d_x."""
        kind, forced, end_dot = self.run.kind, self.run.rules.force_steps, np.zeros(G.shape[1], number(G))
        D: Tensor | None = None
        for s in reversed(segments):
            part = s.buffers.part(s.size)
            back: Back = lend(Back, kind, s.buffers.at[0], s.size)
            g = G if s.rows is None else G[:, s.rows]
            if forced is None:
                self.by_halting(s, part, back, g, end_dot, r)
            # back.at[k + 1] becomes the derivative by the state after update k, back.at[0] that by the state before.
            torch.mul(part.p, g.unsqueeze(1), out=back.after)
            if forced is None:
                back.h_after.addcmul_(back.logit, self.run.halt)
            if D is not None:
                back.at[s.size].add_(D)
            add = base if s.first == 1 else None
            (self.lstm if kind is LSTM else self.gru if kind is GRU else self.rnn)(s.buffers, part, back, add)
            self.by_sums(s, part, part.d if kind is LSTM else back.d, d_x, fresh=D is None)
            D = back.at[0]
            if s.kept is not None:
                D = D.new_zeros(len(G), s.before, G.shape[2]).index_copy_(1, s.kept, D)
            self.backs.append(back)
        assert D is not None
        if kind is LSTM:
            # The others hold the derivatives by their sums as well, or G, which is now read.
            for back in self.backs[:-1]:
                back.give_back()
            self.backs = self.backs[-1:]
        return D

    def by_halting(self, s: "Segment", part: Part, back: Back, G: Tensor, end_dot: np.ndarray, r: Any) -> None:
        """d(loss)/d(h^n) h^n (1 - h^n) = (G . (s^n - s^N) - r) h^n (1 - h^n) for n < N, 0 for n = N."""
        dot = torch.mul(part.states, G.unsqueeze(1), out=back.after).sum(-1).numpy()
        dot = dot[0] if len(dot) == 1 else dot[0] + dot[1]
        rows = slice(None) if s.rows is None else s.rows.numpy()
        end_dot[rows] += np.where(s.going[-1], 0, dot[-1]) if s.made is None else np.where(s.last, dot, 0).sum(0)
        d_logit = back.logit_array
        np.subtract(dot, end_dot[rows] if r is None else end_dot[rows] + r[rows], out=d_logit)
        d_logit *= s.prob * (1 - s.prob) * s.going
        self.halt_bias += d_logit.sum()
        self.halt.addmv_(part.after.t(), back.logit_flat)

    def rnn(self, b: Buffers, part: Part, back: Back, base: Any) -> None:
        """The updates of a segment backwards: derivatives by their sums from those by their states."""
        weight, tanh = self.weight_hh, self.run.kind is RNN_TANH
        for k in reversed(range(part.size)):
            d = back.h[k + 1]
            if tanh:
                tanh_backward(d, b.h[k + 1], grad_input=d)
            else:
                relu_backward(d, b.h[k + 1], 0, grad_input=d)
            if k > 0:
                back.h[k].addmm_(d, weight)
            else:
                before(d, weight, base, out=back.h[0])

    def lstm(self, b: Buffers, part: Part, back: Back, base: Any) -> None:
        weight = self.weight_hh
        tanh_backward(part.o, part.tanh_c, grad_input=back.through)
        back.f.copy_(part.f)
        # tanh g = 2 sigmoid(2 g) - 1 has the derivative 4 sigmoid (1 - sigmoid).
        torch.mul(part.i, 4, out=part.i_4)
        sigmoid_backward(part.beside, part.gates, grad_input=part.gates)
        for k in reversed(range(part.size)):
            d_h, d_c = back.h[k + 1], back.c[k + 1]
            d_c.addcmul_(d_h, back.through_rows[k])
            b.by_c[k].mul_(back.wide[k + 1])
            b.each_gate[k][3].mul_(d_h)
            if k > 0:
                back.c[k].addcmul_(d_c, back.f_rows[k])
                back.h[k].addmm_(b.rows[k], weight)
            else:
                torch.mul(d_c, back.f_rows[0], out=back.c[0])
                before(b.rows[0], weight, base, out=back.h[0])

    def gru(self, b: Buffers, part: Part, back: Back, base: Any) -> None:
        weight = self.weight_hh
        (r, z, q, v), (d_r, d_z, d_q, d_v) = part.each_gate, back.each_gate
        tanh_backward(1 - z, v, grad_input=d_v)
        sigmoid_backward(part.past - v, z, grad_input=d_z)
        torch.mul(d_v, r, out=d_q)
        sigmoid_backward(d_v * q, r, grad_input=d_r)
        back.h[0].zero_() if base is None or base is False else back.h[0].copy_(base)
        for k in reversed(range(part.size)):
            back.each[k].mul_(back.wide[k + 1])
            back.h[k].addcmul_(back.h[k + 1], b.each_gate[k][1]).addmm_(back.rows[k], weight)

    def by_sums(self, s: "Segment", part: Part, d: Sums, d_x: Tensor, *, fresh: bool) -> None:
        """What a segment's derivatives add to the sums; d_x is first written, then added to."""
        if s.rows is None and fresh:
            torch.sum(d.sums, 0, out=d_x)
        elif s.rows is None:
            d_x += d.sums.sum(0)
        else:
            d_x = d_x.zero_() if fresh else d_x
            d_x.index_add_(0, s.rows, d.sums.sum(0))
        if s.first == 1:
            self.firsts.append(d.first)
        self.pending.append((d.flat, part.before))
        self.waiting += part.rows
        if self.waiting >= self.enough:
            self.flush()

    def flush(self) -> None:
        """Add the gathered rows to the weight gradient with one product."""
        if self.pending:
            P = len(self.weight_hh)
            d, h = [a[:, :P] for a, _ in self.pending], [a for _, a in self.pending]
            all_d, all_h = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (d, h))
            self.weight = torch.mm(all_d.t(), all_h) if self.weight is None else self.weight.addmm_(all_d.t(), all_h)
        if self.firsts:
            flag = (self.firsts[0] if len(self.firsts) == 1 else torch.cat(self.firsts)).sum(0)
            self.flag = flag if self.flag is None else self.flag.add_(flag)
        self.pending, self.firsts, self.waiting = [], [], 0

    def by_inputs(self, *, x: bool) -> Inputs:
        """Derivatives by x, the cell's weights and biases, and the halting unit."""
        i, H, d_xw, flag = self.run.inputs, self.run.H, self.xw, self.flag
        d_bias = None if i.bias_ih is None else d_xw.sum((0, 1))
        # A tensor of its own: whoever scales or adds to one gradient in place must not reach the other.
        d_bias_hh = None if d_bias is None else d_bias[: len(i.weight_hh)].clone()
        if self.run.kind is GRU:
            # x does not see the place of U_n h.
            d_xw, flag, d_bias = (
                None if a is None else torch.cat([a[..., : 2 * H], a[..., 3 * H :]], -1) for a in (d_xw, flag, d_bias)
            )
        assert d_xw is not None and flag is not None
        rows = d_xw.flatten(0, 1)
        d_weight, d_x = torch.empty_like(i.weight_ih), None
        d_weight[:, -1] = flag
        if i.x.is_floating_point():
            torch.mm(rows.t(), i.x.reshape(len(rows), -1), out=d_weight[:, :-1])
            if x:
                d_x = torch.mm(rows, i.weight_ih[:, :-1]).view(i.x.shape)
        else:
            by_look_up(i, d_xw, d_weight)
        halt_bias = torch.full_like(i.halt_bias, float(self.halt_bias))
        made: Any = (d_x, d_weight, self.weight, d_bias, d_bias_hh, self.halt.unsqueeze(0), halt_bias, None, None)
        return Inputs(*made)


def before(d: Tensor, weight: Tensor, base: Any, *, out: Tensor) -> None:
    """The derivative by the state before a segment, and what else comes to it; False: nobody asks for it."""
    if base is False:
        return
    if base is None:
        torch.mm(d, weight, out=out)
    else:
        torch.addmm(base, d, weight, out=out)


def number(a: Tensor) -> type:
    """numpy's name of a tensor's type."""
    return np.float64 if a.dtype == torch.float64 else np.float32
