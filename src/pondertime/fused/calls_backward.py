"""The plain calls' way back: the derivatives of a segment's updates from what the forward pass kept.

All that an update's derivative is multiplied by is made for the whole segment at once; what is left of an update is
one product and a call or two before it.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pondertime.fused.common import GRU, LSTM, RNN_TANH, Sums

if TYPE_CHECKING:
    from pondertime.fused.calls import Run, Segment

# Rows of derivatives gathered before they are multiplied into the weight gradient.
WEIGHT_ROWS = 512

aten: Any = torch.ops.aten


class Gradients:
    """The sums of a backward pass."""

    def __init__(self, run: "Run") -> None:
        self.run = run
        self.weight_hh = run.gate_inputs.weight_hh.contiguous()
        self.xw = torch.zeros_like(run.xw)
        self.flag, self.weight, self.halt, self.halt_bias = (
            a.new_zeros(a.shape) for a in (run.flag, self.weight_hh, run.halt, run.halt_bias)
        )
        self.bias_n = torch.zeros_like(run.bias_n) if run.rules.kind is GRU else None
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.waiting = 0

    def all_steps(self, d_mean: Tensor, G: Tensor, Gc: Tensor | None, d_remainder: Tensor) -> Sums:
        """All input steps, the last one first. G, Gc: by the last state; d_mean, d_remainder have T in front."""
        run, shape = self.run, d_mean.shape[1:]
        d_mean, d_remainder = d_mean.flatten(1, 2), d_remainder.flatten(1, 2)
        while run.segments:
            steps = [run.segments.pop()]
            while steps[-1].first > 1:
                steps.append(run.segments.pop())
            first = steps[-1]
            if first.rows is None:
                G += d_mean[first.t]
                G, Gc = self.input_step(steps, G, Gc, d_remainder[first.t])
                continue
            real = first.totals[0] < run.threshold
            rows = first.rows[real]
            G[rows] += d_mean[first.t][rows]
            D, Dc = self.input_step(steps, G, Gc, d_remainder[first.t])
            G[rows] = D[real]
            if Gc is not None and Dc is not None:
                Gc[rows] = Dc[real]
        self.flush()
        return Sums(
            self.xw, self.flag, self.weight, self.bias_n, self.halt.unsqueeze(1), self.halt_bias,
            G.view(shape), None if Gc is None else Gc.view(shape),
        )  # fmt: skip

    def input_step(
        self, segments: list["Segment"], G: Tensor, Gc: Tensor | None, r: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The segments of an input step, the last one first; returns the derivatives by s_{t-1} of its rows."""
        end_dot = None if len(segments) == 1 and segments[0].rows is None else G.new_zeros(len(G))
        D: Tensor | None = None
        Dc: Tensor | None = None
        kept: Tensor | None = None
        for s in segments:
            if kept is not None and D is not None:
                D = torch.zeros_like(s.h[0]).index_add_(0, kept, D)
                Dc = None if Dc is None else torch.zeros_like(s.h[0]).index_add_(0, kept, Dc)
            D, Dc = self.segment(s, G, Gc, end_dot, r, D, Dc)
            kept = s.kept
        assert D is not None
        return D, Dc

    def segment(
        self,
        s: "Segment",
        G: Tensor,
        Gc: Tensor | None,
        end_dot: Tensor | None,
        r: Tensor,
        D: Tensor | None,
        Dc: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """A segment backwards: from the derivatives by its last state to those by the state before it."""
        run = self.run
        if s.rows is not None:
            G, Gc = G[s.rows], None if Gc is None else Gc[s.rows]
        # base[k + 1] becomes the derivative by the state after update k, base[0] that by the state before.
        p = s.p.unsqueeze(2)
        base, base_c = torch.empty_like(s.h), None if Gc is None else torch.empty_like(s.h)
        torch.mul(p, G, out=base[1:])
        if base_c is not None:
            torch.mul(p, Gc, out=base_c[1:])
        if run.rules.force_steps is None:
            d_logit = self.by_halting(s, G, Gc, end_dot, r)
            base[1:].addcmul_(d_logit.unsqueeze(2), run.spread(run.halt, len(G)))
        if D is not None:
            base[-1] += D
        if Dc is not None and base_c is not None:
            base_c[-1] += Dc
        kind = run.rules.kind
        by_kind = self.lstm if kind is LSTM else self.gru if kind is GRU else self.rnn
        gates = by_kind(s, base, base_c)
        self.by_sums(s, gates)
        return base[0], None if base_c is None else base_c[0]

    def by_halting(self, s: "Segment", G: Tensor, Gc: Tensor | None, end_dot: Tensor | None, r: Tensor) -> Tensor:
        """d(loss)/d(h^n) h^n (1 - h^n) = (G . (s^n - s^N) - r) h^n (1 - h^n) for n < N, 0 for n = N; [size, m]."""
        run = self.run
        dot = torch.linalg.vecdot(s.h[1:], G)
        if Gc is not None and s.c is not None:
            dot += torch.linalg.vecdot(s.c[1:], Gc)
        last = ~s.going if s.made is None else s.made & ~s.going
        ended = (dot * last).sum(0)
        if end_dot is None:
            end_dot = ended
        elif s.rows is None:
            end_dot += ended
        else:
            end_dot.index_add_(0, s.rows, ended)
            end_dot, r = end_dot[s.rows], r[s.rows]
        d_logit = aten.sigmoid_backward(dot.sub_(end_dot + r), s.prob).mul_(s.going)
        if run.E == 1:
            flat = d_logit.view(-1)
            self.halt[0].addmv_(s.h[1:].reshape(len(flat), -1).t(), flat)
            self.halt_bias += flat.sum()
        else:
            each = d_logit.view(s.size, run.E, -1).transpose(0, 1).reshape(run.E, 1, -1)
            self.halt += torch.bmm(each, self.by_network(s.h[1:])).squeeze(1)
            self.halt_bias += each.sum(2)
        return d_logit

    def by_network(self, a: Tensor) -> Tensor:
        """``[k, E m, w]`` as ``[E, k m, w]``."""
        (k, rows, width), E = a.shape, self.run.E
        return a.reshape(k, E, rows // E, width).transpose(0, 1).reshape(E, k * rows // E, width)

    def rnn(self, s: "Segment", base: Tensor, base_c: Tensor | None) -> Tensor:
        """The updates of a segment backwards; returns the derivatives by their sums, ``[size, m, P]``."""
        gates, tanh = torch.empty_like(s.h[1:]), self.run.rules.kind is RNN_TANH
        base[0] = 0
        before, h, made = base.unbind(), s.h.unbind(), gates.unbind()
        for k in reversed(range(s.size)):
            if tanh:
                aten.tanh_backward(before[k + 1], h[k + 1], grad_input=made[k])
            else:
                aten.threshold_backward(before[k + 1], h[k + 1], 0, grad_input=made[k])
            self.run.product(made[k], self.weight_hh, before[k], before[k])
        return gates

    def lstm(self, s: "Segment", base: Tensor, base_c: Tensor | None) -> Tensor:
        assert base_c is not None and s.c is not None and s.tanh_c is not None
        base[0], base_c[0] = 0, 0
        o, i, f, g = s.gates.unbind(2)
        made = torch.empty_like(s.gates)
        d_o, d_i, d_f, d_g = made.unbind(2)
        through = aten.tanh_backward(o, s.tanh_c).unbind()
        aten.sigmoid_backward(s.tanh_c, o, grad_input=d_o)
        aten.sigmoid_backward(g, i, grad_input=d_i)
        aten.sigmoid_backward(s.c[:-1], f, grad_input=d_f)
        aten.tanh_backward(i, g, grad_input=d_g)
        flat = made.flatten(2)
        h, c, f = base.unbind(), base_c.unbind(), f.unbind()
        wide, columns = base_c.unsqueeze(2).unbind(), flat.unbind()
        d_o, by_c = d_o.unbind(), made[:, :, 1:].unbind()
        for k in reversed(range(s.size)):
            c[k + 1].addcmul_(h[k + 1], through[k])
            by_c[k].mul_(wide[k + 1])
            d_o[k].mul_(h[k + 1])
            c[k].addcmul_(c[k + 1], f[k])
            self.run.product(columns[k], self.weight_hh, h[k], h[k])
        return flat

    def gru(self, s: "Segment", base: Tensor, base_c: Tensor | None) -> Tensor:
        base[0] = 0
        r, z, q, v = s.gates.unbind(2)
        made = torch.empty_like(s.gates)
        d_r, d_z, d_q, d_v = made.unbind(2)
        aten.tanh_backward(1 - z, v, grad_input=d_v)
        aten.sigmoid_backward(s.h[:-1] - v, z, grad_input=d_z)
        torch.mul(d_v, r, out=d_q)
        aten.sigmoid_backward(d_v * q, r, grad_input=d_r)
        flat = made.flatten(2)
        h, z, all_gates = base.unbind(), z.unbind(), made.unbind()
        wide, columns = base.unsqueeze(2).unbind(), flat[:, :, : 3 * self.run.H].unbind()
        for k in reversed(range(s.size)):
            all_gates[k].mul_(wide[k + 1])
            h[k].addcmul_(h[k + 1], z[k])
            self.run.product(columns[k], self.weight_hh, h[k], h[k])
        return flat

    def by_sums(self, s: "Segment", gates: Tensor) -> None:
        """What a segment's derivatives add to the sums."""
        run, H, P = self.run, self.run.H, self.weight_hh.shape[1]
        d_x, first = gates.sum(0), gates[0]
        if self.bias_n is not None:
            self.bias_n += d_x[:, 2 * H : 3 * H].reshape(run.E, -1, H).sum(1)
            d_x, first = (torch.cat([a[:, : 2 * H], a[:, 3 * H :]], 1) for a in (d_x, first))
        if s.first == 1:
            self.flag += first.view(run.E, -1, first.shape[1]).sum(1)
        whole = self.xw[:, s.t]
        if s.rows is None:
            whole += d_x.view(whole.shape)
        elif run.E == 1:
            whole[0].index_add_(0, s.rows, d_x)
        else:
            self.xw[:, s.t] = whole.flatten(0, 1).index_add(0, s.rows, d_x).view(whole.shape)
        self.pending.append((gates[:, :, :P], s.h[:-1]))
        self.waiting += gates.shape[0] * gates.shape[1]
        if self.waiting >= WEIGHT_ROWS * run.E:
            self.flush()

    def flush(self) -> None:
        """Add the gathered rows to the weight gradient with one product."""
        if self.pending:
            d, h = (torch.cat([self.by_network(a) for a in parts], 1) for parts in zip(*self.pending, strict=True))
            self.weight.baddbmm_(d.transpose(1, 2), h)
        self.pending, self.waiting = [], 0
