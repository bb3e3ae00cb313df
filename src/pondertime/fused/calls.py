"""The loop in plain torch calls: needs no compiler, and serves E networks with batched products.

Few calls an update are what makes it fast, so rows are dropped only where it pays and at the beginning of a
segment. Within a segment the batch stays whole: a row that has halted is computed on with weight 0, and what
concerns halting alone (p, N, R, the gradient of the halting unit) is done for all its updates at once.

Rows of all networks lie in one axis: row e * m + j is row j of network e. The networks of a segment have the same
number m of rows; where one has fewer running, rows that have halted fill it up.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pondertime.fused.common import (
    GRU,
    LSTM,
    RNN_RELU,
    RNN_TANH,
    Inputs,
    Outputs,
    Rules,
    Sums,
    Update,
    nan_error,
    project,
)

# Rows are dropped when no more than this share of a segment's still run.
DROP_AT = 0.75
# Updates that the first segment of an input step has room for, unless the last one needed more.
ROOM = 4

aten = torch.ops.aten


@dataclass
class Segment:
    """Some updates of the same rows at input step t; ``size`` of them were made."""

    t: int
    first: int  # the n of its first update
    rows: Tensor | None  # [m] places among all rows; None: all of them
    kept: Tensor | None  # [m] places among the rows of the segment before; None: the same rows
    xw: Tensor  # [m, X] W_x x_t + b
    h0: Tensor
    c0: Tensor | None
    totals: Tensor  # [room + 1, m] sums of h^n before each update
    prob: Tensor  # [room, m]
    h: Tensor  # [room, m, H]
    gates: Tensor  # [room, m, slots H]; an RNN keeps none
    c: Tensor
    tanh_c: Tensor
    size: int = 0
    p: Tensor | None = None  # [size, m]
    going: Tensor | None = None  # [size, m] whether another update follows

    def cut(self) -> None:
        """Forget the room that was not used."""
        self.prob, self.h, self.gates = self.prob[: self.size], self.h[: self.size], self.gates[: self.size]


class Run:
    """A forward pass of E networks, and what its backward pass needs."""

    def __init__(self, inputs: Inputs, rules: Rules, *, keep: bool, seen: bool = False) -> None:
        self.inputs, self.rules, self.keep = inputs, rules, keep or seen
        self.E, self.T, self.B, self.H = *inputs.x.shape[:3], inputs.h.shape[2]
        self.xw, self.bias_n = project(inputs, rules.kind)
        self.flag = inputs.weight_ih[:, :, -1].contiguous()
        self.halt = inputs.halt.squeeze(1)
        self.halt_bias = inputs.halt_bias.squeeze(1)
        self.transposed = inputs.weight_hh.transpose(1, 2).contiguous()
        self.threshold = 1 - rules.epsilon
        self.limit = rules.force_steps or rules.max_steps
        self.room = ROOM
        # A relu cell may overflow where it is computed on, and 0 times inf is no 0: its rows are dropped at once.
        self.drop_at = DROP_AT if rules.kind is not RNN_RELU else 1 - 1e-9
        self.segments: list[Segment] = []
        self.out: Any = self.forward()

    def product(self, a: Tensor, weight: Tensor, add: Tensor | None, out: Tensor) -> Tensor:
        """out = a [E m, k] times weight [E, k, n], plus ``add`` [E m, n]."""
        if self.E == 1:
            return torch.mm(a, weight[0], out=out) if add is None else torch.addmm(add, a, weight[0], out=out)
        a, made = a.view(self.E, -1, a.shape[1]), out.view(self.E, -1, out.shape[1])
        if add is None:
            made.copy_(torch.bmm(a, weight))
        else:
            made.copy_(torch.baddbmm(add.view(made.shape), a, weight))
        return out

    def spread(self, a: Tensor, m: int) -> Tensor:
        """One row a network ``[E, ...]``, for each of its rows: ``[m, ...]`` or what broadcasts to it."""
        return a if self.E == 1 else a.repeat_interleave(m // self.E, 0)

    def choose(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The places of each network's true rows, filled up to the largest count, and which of them are true."""
        if self.E == 1:
            places = mask.nonzero().squeeze(1)
            return places, mask.new_ones(len(places))
        mask = mask.view(self.E, -1)
        m = int(mask.sum(1).max())
        order = torch.argsort(mask.to(torch.int8), dim=1, descending=True, stable=True)[:, :m]
        places = (order + torch.arange(self.E).unsqueeze(1) * mask.shape[1]).flatten()
        return places, mask.gather(1, order).flatten()

    def fill_up(self, a: Tensor, real: Tensor) -> Tensor:
        """States of a segment's rows, zero where a row only fills it up."""
        return a if self.E == 1 else torch.where(real.unsqueeze(1), a, 0)

    def forward(self) -> Outputs:
        E, T, B, H, i = self.E, self.T, self.B, self.H, self.inputs
        mean = self.xw.new_zeros(T, E * B, H)
        steps, remainder = torch.zeros(T, E * B, dtype=torch.int64), self.xw.new_zeros(T, E * B)
        h = i.h.reshape(E * B, H)
        c = None if i.c is None else i.c.reshape(E * B, H)
        for t in range(T):
            present = None if self.rules.lengths is None else (self.rules.lengths > t).flatten()
            if present is not None and bool(present.all()):
                present = None
            if present is not None and not bool(present.any()):
                continue
            mean_c = None if c is None else torch.zeros_like(c)
            for s in self.ponder(t, present, h, c):
                self.add_up(s, mean[t], mean_c, steps[t], remainder[t])
                if self.keep:
                    self.segments.append(s)
            if mean[t].isnan().any():
                raise nan_error(t, int(steps[t][mean[t].isnan().any(1)].min()))
            if present is None:
                h, c = mean[t], mean_c
            else:
                column = present.unsqueeze(1)
                h = torch.where(column, mean[t], h)
                c = None if c is None or mean_c is None else torch.where(column, mean_c, c)
        # Copies: what is kept for the backward pass is not theirs to change.
        front = self.rules.front(E)
        return Outputs(
            mean.view(T, E, B, H).transpose(0, 1).reshape(*front, T, B, H).clone(),
            h.reshape(*front, B, H).clone(),
            None if c is None else c.reshape(*front, B, H).clone(),
            steps.view(T, E, B).transpose(0, 1).reshape(*front, T, B).clone(),
            remainder.view(T, E, B).transpose(0, 1).reshape(*front, T, B).clone(),
        )

    def ponder(self, t: int, present: Tensor | None, h: Tensor, c: Tensor | None) -> Iterator[Segment]:
        """The segments of input step t, one after the other."""
        xw = self.xw[:, t].flatten(0, 1)
        rows, kept, total, n = None, None, h.new_zeros(len(h)), 1
        if present is not None:
            rows, real = self.choose(present)
            xw, h, total = xw[rows], self.fill_up(h[rows], real), torch.where(real, 0.0, 2.0).to(h.dtype)
            c = None if c is None else self.fill_up(c[rows], real)
        while True:
            s = self.begin(t, n, rows, kept, xw, h, c, total)
            running = self.fill(s)
            yield s
            n += s.size
            if running == 0 or n > self.limit:
                return
            h, total = s.h[s.size - 1], s.totals[s.size]
            c, kept = None if c is None else s.c[s.size - 1], None
            if running <= self.drop_at * len(h):
                kept, real = self.choose(total < self.threshold)
                rows, xw = kept if rows is None else rows[kept], xw[kept]
                h, total = self.fill_up(h[kept], real), torch.where(real, total[kept], 2.0)
                c = None if c is None else self.fill_up(c[kept], real)

    def begin(
        self,
        t: int,
        n: int,
        rows: Tensor | None,
        kept: Tensor | None,
        xw: Tensor,
        h: Tensor,
        c: Tensor | None,
        total: Tensor,
    ) -> Segment:
        """An empty segment with room for some updates."""
        m, H = h.shape
        room = min(self.room if n == 1 else 2 * self.room, self.limit - n + 1)
        slots = self.rules.kind.slots if self.rules.kind.slots > 1 else 0
        leaf = 1 if c is not None else 0
        totals = h.new_empty(room + 1, m)
        totals[0] = total
        return Segment(
            t, n, rows, kept, xw, h, c, totals, h.new_empty(room, m), h.new_empty(room, m, H),
            h.new_empty(room, m, slots * H), h.new_empty(leaf * room, m, H), h.new_empty(leaf * room, m, H),
        )  # fmt: skip

    def fill(self, s: Segment) -> int:
        """Make updates until the room is used, rows can be dropped or all have halted; returns how many run."""
        m, forced = len(s.h0), self.rules.force_steps is not None
        x = s.xw + self.spread(self.flag, m) if s.first == 1 else s.xw
        bias, column = self.spread(self.halt_bias, m), self.halt.unsqueeze(2)
        h, c = s.h0, s.c0
        running = m
        for k, (prob, before, total) in enumerate(zip(s.prob, s.totals, s.totals[1:], strict=False)):
            h, c = self.update(s, k, x, h, c)
            x = s.xw
            s.size = k + 1
            if forced:
                prob.fill_(float(s.first + k == self.limit))
            else:
                self.product(h, column, None, prob.unsqueeze(1))
                prob.add_(bias).sigmoid_()
            torch.add(before, prob, out=total)
            running = int((total < self.threshold).sum())
            if running <= self.drop_at * m:
                break
        if s.first == 1:
            self.room = max(ROOM, s.size)
        return running

    def update(self, s: Segment, k: int, x: Tensor, h0: Tensor, c0: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Update number k of a segment: s^n from s^{n-1}, its activations kept."""
        H, kind, h = self.H, self.rules.kind, s.h[k]
        if kind is LSTM:
            assert c0 is not None
            gates, c, tanh_c = s.gates[k], s.c[k], s.tanh_c[k]
            self.product(h0, self.transposed, x, gates)
            i, f, g, o = gates.split(H, 1)
            gates[:, : 2 * H].sigmoid_()
            g.tanh_()
            o.sigmoid_()
            torch.mul(f, c0, out=c).addcmul_(i, g)
            torch.tanh(c, out=tanh_c)
            return torch.mul(o, tanh_c, out=h), c
        if kind is GRU:
            assert self.bias_n is not None
            gates = s.gates[k]
            r, z, q, v = gates.split(H, 1)
            gates[:, : 3 * H] = self.product(h0, self.transposed, None, h0.new_empty(len(h0), 3 * H))
            gates[:, : 2 * H].add_(x[:, : 2 * H]).sigmoid_()
            q += self.spread(self.bias_n, len(h0))
            torch.addcmul(x[:, 2 * H :], r, q, out=v).tanh_()
            return torch.lerp(v, h0, z, out=h), None
        self.product(h0, self.transposed, x, h)
        return (h.tanh_() if kind is RNN_TANH else h.relu_()), None

    def add_up(self, s: Segment, mean: Tensor, mean_c: Tensor | None, steps: Tensor, remainder: Tensor) -> None:
        """p of a segment's updates, and their shares of the means, N and R of the rows."""
        s.cut()
        before, after = s.totals[: s.size], s.totals[1 : s.size + 1]
        made, going = before < self.threshold, after < self.threshold
        if s.first + s.size - 1 == self.limit:
            going[-1] = False
        last = made & ~going
        R = torch.where(last, 1 - before, 0)
        s.p = torch.where(going, s.prob, R)
        if self.rules.force_steps is not None:
            s.p = s.prob
        s.going = going
        counts, R = made.sum(0), R.sum(0)
        for whole, parts in ((mean, s.h), (mean_c, s.c)):
            if whole is None:
                continue
            total = whole if s.rows is None else torch.zeros_like(s.h0)
            for p, part in zip(s.p.unsqueeze(2), parts, strict=False):
                total.addcmul_(p, part)
            if s.rows is not None:
                whole.index_add_(0, s.rows, total)
        if s.rows is None:
            steps += counts
            remainder += R
        else:
            steps.index_add_(0, s.rows, counts)
            remainder.index_add_(0, s.rows, R)

    def backward(self, d_mean: Tensor, d_h: Tensor, d_c: Tensor | None, d_remainder: Tensor) -> Sums:
        """The sums of the backward pass. What the forward pass kept is used up."""
        E, B, H = self.E, self.B, self.H
        G = d_h.reshape(E * B, H).clone()
        Gc = None if d_c is None else d_c.reshape(E * B, H).clone()
        grad = Gradients(self)
        while self.segments:
            steps = [self.segments.pop()]
            while steps[-1].first > 1:
                steps.append(self.segments.pop())
            first = steps[-1]
            real = slice(None) if first.rows is None else first.totals[0] < self.threshold
            rows = slice(None) if first.rows is None else first.rows[real]
            G[rows] += d_mean[:, first.t].flatten(0, 1)[rows]
            D, Dc = grad.input_step(steps, G, Gc, d_remainder[:, first.t].flatten())
            G[rows] = D[real]
            if Gc is not None and Dc is not None:
                Gc[rows] = Dc[real]
        grad.flush()
        shape = (E, B, H)
        return Sums(
            grad.xw, grad.flag, grad.weight, grad.bias_n, grad.halt.unsqueeze(1), grad.halt_bias.unsqueeze(1),
            G.view(shape), None if Gc is None else Gc.view(shape),
        )  # fmt: skip

    def trace(self) -> list[Update]:
        """Every update of the first network."""
        updates = []
        everyone = torch.arange(self.B)
        for s in self.segments:
            assert s.p is not None
            made = s.totals[: s.size] < self.threshold
            rows = everyone if s.rows is None else s.rows
            for k in range(s.size):
                m = made[k]
                updates.append(Update(s.t, s.first + k, rows[m], s.prob[k][m], s.p[k][m], s.h[k][m]))
        return updates


# Rows of derivatives gathered before they are multiplied into the weight gradient.
WEIGHT_ROWS = 512


class Gradients:
    """The sums of the backward pass."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.xw, self.flag, self.weight, self.halt, self.halt_bias = (
            a.new_zeros(a.shape) for a in (run.xw, run.flag, run.inputs.weight_hh, run.halt, run.halt_bias)
        )
        self.bias_n = None if run.bias_n is None else torch.zeros_like(run.bias_n)
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.waiting = 0

    def input_step(
        self, segments: list[Segment], G: Tensor, Gc: Tensor | None, r: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The segments of an input step, the last one first; returns the derivatives by s_{t-1} of its rows."""
        end_dot = G.new_zeros(len(G))
        D: Tensor | None = None
        Dc: Tensor | None = None
        kept: Tensor | None = None
        for s in segments:
            if D is None:
                D, Dc = torch.zeros_like(s.h0), None if Gc is None else torch.zeros_like(s.h0)
            elif kept is not None:
                D = torch.zeros_like(s.h0).index_add_(0, kept, D)
                Dc = None if Dc is None else torch.zeros_like(s.h0).index_add_(0, kept, Dc)
            D, Dc = self.segment(s, G, Gc, end_dot, r, D, Dc)
            kept = s.kept
        assert D is not None
        return D, Dc

    def segment(
        self, s: Segment, G: Tensor, Gc: Tensor | None, end_dot: Tensor, r: Tensor, D: Tensor, Dc: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """A segment backwards: from the derivatives by its last state to those by the state before it."""
        run = self.run
        assert s.p is not None
        if s.rows is not None:
            G, Gc = G[s.rows], None if Gc is None else Gc[s.rows]
        d_logit = self.by_halting(s, G, Gc, end_dot, r)
        if run.rules.kind.slots == 1:
            s.gates = torch.empty_like(s.h)
        halt = run.spread(run.halt, len(G))
        for k in reversed(range(s.size)):
            p = s.p[k].unsqueeze(1)
            dh = torch.addcmul(D, p, G)
            if d_logit is not None:
                dh.addcmul_(d_logit[k].unsqueeze(1), halt)
            dc = None if Dc is None or Gc is None else torch.addcmul(Dc, p, Gc)
            D, Dc = self.update(s, k, dh, dc)
        self.by_sums(s)
        return D, Dc

    def by_halting(self, s: Segment, G: Tensor, Gc: Tensor | None, end_dot: Tensor, r: Tensor) -> Tensor | None:
        """d(loss)/d(h^n) h^n (1 - h^n) = (G . (s^n - s^N) - r) h^n (1 - h^n) for n < N, 0 for n = N; [size, m]."""
        run = self.run
        if run.rules.force_steps is not None:
            return None
        assert s.going is not None
        dot = torch.linalg.vecdot(s.h, G)
        if Gc is not None:
            dot += torch.linalg.vecdot(s.c[: s.size], Gc)
        last = (s.totals[: s.size] < run.threshold) & ~s.going
        ended = torch.where(last, dot, 0).sum(0)
        if s.rows is None:
            end_dot += ended
        else:
            end_dot.index_add_(0, s.rows, ended)
            end_dot, r = end_dot[s.rows], r[s.rows]
        d_logit = torch.where(s.going, (dot - end_dot - r) * s.prob * (1 - s.prob), 0)
        each = d_logit.view(s.size, run.E, -1).transpose(0, 1).reshape(run.E, 1, -1)
        self.halt += torch.bmm(each, self.by_network(s.h)).squeeze(1)
        self.halt_bias += each.sum((1, 2))
        return d_logit

    def by_network(self, a: Tensor) -> Tensor:
        """``[k, E m, w]`` as ``[E, k m, w]``."""
        (k, rows, width), E = a.shape, self.run.E
        return a.view(k, E, rows // E, width).transpose(0, 1).reshape(E, k * rows // E, width)

    def update(self, s: Segment, k: int, dh: Tensor, dc: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Update k of a segment backwards: activations become derivatives; returns those by s^{n-1}."""
        run, H = self.run, self.run.H
        kind, gates = run.rules.kind, s.gates[k]
        h0, c0 = (s.h0, s.c0) if k == 0 else (s.h[k - 1], s.c[k - 1] if dc is not None else None)
        direct = None
        d_c0 = None
        if kind is LSTM:
            assert dc is not None and c0 is not None
            tanh_c = s.tanh_c[k]
            i, f, g, o = gates.split(H, 1)
            dc = dc + aten.tanh_backward(dh * o, tanh_c)
            d_c0 = dc * f
            aten.sigmoid_backward(dh.mul_(tanh_c), o, grad_input=o)
            d_i = dc * g
            aten.tanh_backward(dc * i, g, grad_input=g)
            aten.sigmoid_backward(d_i, i, grad_input=i)
            aten.sigmoid_backward(dc.mul_(c0), f, grad_input=f)
        elif kind is GRU:
            r, z, q, v = gates.split(H, 1)
            direct, d_z = dh * z, dh * (h0 - v)
            d_v = aten.tanh_backward(dh.mul_(1 - z), v)
            aten.sigmoid_backward(d_z, z, grad_input=z)
            v.copy_(d_v)
            d_r = d_v * q
            torch.mul(d_v, r, out=q)
            aten.sigmoid_backward(d_r, r, grad_input=r)
            gates = gates[:, : 3 * H]
        elif kind is RNN_TANH:
            aten.tanh_backward(dh, s.h[k], grad_input=gates)
        else:
            aten.threshold_backward(dh, s.h[k], 0, grad_input=gates)
        return run.product(gates, run.inputs.weight_hh, direct, torch.empty_like(dh)), d_c0

    def by_sums(self, s: Segment) -> None:
        """What a segment's derivatives add to the sums."""
        run, H, gates = self.run, self.run.H, s.gates
        d_x, first = gates.sum(0), gates[0]
        if self.bias_n is not None:
            self.bias_n += d_x[:, 2 * H : 3 * H].reshape(run.E, -1, H).sum(1)
            d_x, first = (torch.cat([a[:, : 2 * H], a[:, 3 * H :]], 1) for a in (d_x, first))
        whole = self.xw[:, s.t]
        if s.rows is None:
            whole += d_x.view(whole.shape)
        elif run.E == 1:
            whole[0].index_add_(0, s.rows, d_x)
        else:
            self.xw[:, s.t] = whole.flatten(0, 1).index_add(0, s.rows, d_x).view(whole.shape)
        if s.first == 1:
            self.flag += first.view(run.E, -1, first.shape[1]).sum(1)
        P = run.inputs.weight_hh.shape[1]
        self.pending += [(gates[:1, :, :P], s.h0.unsqueeze(0)), (gates[1:, :, :P], s.h[:-1])]
        self.waiting += gates.shape[0] * gates.shape[1]
        if self.waiting >= WEIGHT_ROWS * run.E:
            self.flush()

    def flush(self) -> None:
        """Add the gathered rows to the weight gradient with one product."""
        if self.pending:
            d, h = (torch.cat([self.by_network(a) for a in parts], 1) for parts in zip(*self.pending, strict=True))
            self.weight.baddbmm_(d.transpose(1, 2), h)
        self.pending, self.waiting = [], 0
