"""The loop in plain torch calls: needs no compiler, and serves E networks with batched products.

Few calls an update are what makes it fast. So updates are made in segments, as many as the last input step needed,
and only then is looked who has halted: p, N and R of all its updates are made at once. Within a segment the batch
stays whole: a row that has halted is computed on with weight 0. Rows are dropped between segments, where it pays.

Rows of all networks lie in one axis: row e * m + j is row j of network e. The networks of a segment have the same
number m of rows; where one has fewer running, rows that have halted fill it up.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pondertime.fused.calls_backward import Gradients
from pondertime.fused.common import (
    GRU,
    LSTM,
    RNN_RELU,
    RNN_TANH,
    Grads,
    Inputs,
    Outputs,
    Rules,
    Update,
    by_inputs,
    by_read_out,
    each,
    nan_error,
    project,
    read_out,
)

# Rows are dropped when no more than this share of a segment's still run, and its product has so many multiply-adds.
DROP_AT = 0.75
WORTH_A_GATHER = 2_000_000
# Updates of a segment before anything is known of the halting.
ROOM = 4


@dataclass
class Segment:
    """Some updates of the same rows at input step t."""

    t: int
    first: int  # the n of its first update
    rows: Tensor | None  # [m] places among all rows; None: all of them
    kept: Tensor | None  # [m] places among the rows of the segment before; None: the same rows
    h: Tensor  # [size + 1, m, H] the state before it, then those after its updates
    c: Tensor | None
    gates: Tensor  # [size, m, slots, H] of an LSTM o, i, f, g, of a GRU r, z, U_n h + b, n; an RNN keeps none
    tanh_c: Tensor | None  # [size, m, H]
    prob: Tensor  # [size, m]
    totals: Tensor  # [size + 1, m] sums of h^n before the segment, then after its updates
    going: Tensor  # [size, m] whether another update follows
    p: Tensor  # [size, m]
    made: Tensor | None = None  # [size, m] whether the row was still running; None: always

    @property
    def size(self) -> int:
        return len(self.prob)

    def cut(self, size: int) -> None:
        """Forget the updates that nobody needed."""
        for name in ("gates", "tanh_c", "prob"):
            a = getattr(self, name)
            setattr(self, name, None if a is None else a[:size])
        self.h, self.totals = self.h[: size + 1], self.totals[: size + 1]
        self.c = None if self.c is None else self.c[: size + 1]


class Run:
    """A forward pass of E networks, and what its backward pass needs."""

    def __init__(self, inputs: Inputs, rules: Rules, *, keep: bool, seen: bool = False, rooms: list[int]) -> None:
        self.inputs = i = inputs if rules.stacked else each(lambda a: a.unsqueeze(0), inputs)
        self.rules, self.keep, self.rooms = rules, keep or seen, rooms
        self.E, self.T, self.B, self.H = *i.x.shape[:3], i.h.shape[2]
        if rules.kind is LSTM:
            # The order o, i, f, g puts the sigmoids beside each other, and what goes through c.
            i = each_gate(i, lambda a: a.roll(self.H, 1))
        self.gate_inputs = i
        self.xw, bias_n = project(i, rules.kind)
        self.flag = i.weight_ih[:, :, -1].contiguous()
        if bias_n is not None:
            self.bias_n = bias_n.contiguous()
        self.halt, self.halt_bias = i.halt.squeeze(1), i.halt_bias
        self.transposed = i.weight_hh.transpose(1, 2).contiguous()
        self.threshold = 1 - rules.epsilon
        self.limit = rules.force_steps or rules.max_steps
        # A relu cell may overflow where it is computed on, and 0 times inf is no 0: its rows are dropped at once.
        self.at_once = rules.kind is RNN_RELU and rules.force_steps is None
        self.segments: list[Segment] = []
        self.out: Any = self.forward()

    def product(self, a: Tensor, weight: Tensor, add: Tensor, out: Tensor) -> None:
        """out = add + a [E m, k] times weight [E, k, n]."""
        if self.E == 1:
            torch.addmm(add, a, weight[0], out=out)
        else:
            shape = (self.E, -1, out.shape[1])
            torch.baddbmm(add.view(shape), a.view(self.E, -1, a.shape[1]), weight, out=out.view(shape))

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
        mean = self.xw.new_empty(T, E * B, H) if self.rules.lengths is None else self.xw.new_zeros(T, E * B, H)
        steps, remainder = torch.zeros(T, E * B, dtype=torch.int64), self.xw.new_zeros(T, E * B)
        h = i.h.reshape(E * B, H)
        c = None if i.c is None else i.c.reshape(E * B, H)
        for t in range(T):
            present = None if self.rules.lengths is None else (self.rules.lengths > t).flatten()
            if present is not None and not bool(present.any()):
                break
            mean_c = None if c is None else torch.empty_like(c)
            for s in self.ponder(t, present, h, c):
                self.add_up(s, mean[t], mean_c, steps[t], remainder[t])
                if self.keep:
                    self.segments.append(s)
            if present is None:
                h, c = mean[t], mean_c
            else:
                column = present.unsqueeze(1)
                h = torch.where(column, mean[t], h)
                c = None if c is None or mean_c is None else torch.where(column, mean_c, c)
        if mean.isnan().any():
            bad = mean.isnan().any(2)
            t = int(bad.any(1).nonzero()[0])
            raise nan_error(t, int(steps[t][bad[t]].min()))
        by_network = [a.view(T, E, B, *a.shape[2:]).transpose(0, 1) for a in (mean, steps, remainder)]
        self.mean, self.steps = by_network[:2]
        y = read_out(i, self.mean, self.steps)
        # Copies: what is kept for the backward pass is not theirs to change.
        front = self.rules.front(E)
        return Outputs(
            y.reshape(*front, T, B, -1) if i.weight_y is not None else y.reshape(*front, T, B, -1).clone(),
            h.reshape(*front, B, H).clone(),
            None if c is None else c.reshape(*front, B, H).clone(),
            self.steps.reshape(*front, T, B).clone(),
            by_network[2].reshape(*front, T, B),
        )

    def ponder(self, t: int, present: Tensor | None, h: Tensor, c: Tensor | None) -> Iterator[Segment]:
        """The segments of input step t, one after the other."""
        xw = self.xw[:, t].flatten(0, 1)
        rows, kept, total, n = None, None, None, 1
        if present is not None:
            rows, real = self.choose(present)
            xw, h, total = xw[rows], self.fill_up(h[rows], real), torch.where(real, 0.0, 2.0).to(h.dtype)
            c = None if c is None else self.fill_up(c[rows], real)
        for number in range(self.limit):
            s, running = self.segment(t, n, number, rows, kept, xw, h, c, total)
            yield s
            n += s.size
            if running == 0:
                return
            h, total = s.h[-1], s.totals[-1]
            c, kept = None if s.c is None else s.c[-1], None
            if self.drops(running, len(h)):
                kept, real = self.choose(total < self.threshold)
                rows, xw = kept if rows is None else rows[kept], xw[kept]
                h, total = self.fill_up(h[kept], real), torch.where(real, total[kept], 2.0)
                c = None if c is None else self.fill_up(c[kept], real)

    def drops(self, running: int, m: int) -> bool:
        """Whether to go on with the running rows only."""
        worth = m * self.H * self.transposed.shape[2] >= WORTH_A_GATHER and running <= DROP_AT * m
        return worth or (self.at_once and running < m)

    def segment(
        self,
        t: int,
        n: int,
        number: int,
        rows: Tensor | None,
        kept: Tensor | None,
        xw: Tensor,
        h: Tensor,
        c: Tensor | None,
        total: Tensor | None,
    ) -> tuple[Segment, int]:
        """Make updates from n on, as many as this segment of an input step needed last; how many rows run then."""
        (m, H), kind = h.shape, self.rules.kind
        if number == len(self.rooms):
            self.rooms.append(ROOM)
        room = self.limit if self.rules.force_steps else 1 if self.at_once else self.rooms[number]
        room = min(room, self.limit - n + 1)
        s = Segment(
            t, n, rows, kept, h.new_empty(room + 1, m, H), None if c is None else h.new_empty(room + 1, m, H),
            h.new_empty(room, m, kind.slots if kind.slots > 1 else 0, H), None if c is None else h.new_empty(room, m, H),
            *[h.new_empty(0)] * 4,
        )  # fmt: skip
        s.h[0] = h
        if s.c is not None:
            s.c[0] = c
        first = xw + self.spread(self.flag, m) if n == 1 else xw
        {LSTM: self.lstm, GRU: self.gru}.get(kind, self.rnn)(s, first, xw)
        return s, self.halting(s, number, total)

    def rnn(self, s: Segment, x: Tensor, later: Tensor) -> None:
        """All updates of a segment; x is what the first adds to the product."""
        activate = torch.tanh_ if self.rules.kind is RNN_TANH else torch.relu_
        h = s.h.unbind()
        for h0, h1 in zip(h, h[1:], strict=False):
            self.product(h0, self.transposed, x, h1)
            activate(h1)
            x = later

    def lstm(self, s: Segment, x: Tensor, later: Tensor) -> None:
        assert s.c is not None and s.tanh_c is not None
        h, c, size, H = s.h.unbind(), s.c.unbind(), len(s.gates), self.H
        flat = s.gates.flatten(2)
        gates, sigmoids, tanhs = flat.unbind(), flat[:, :, : 3 * H].unbind(), flat[:, :, 3 * H :].unbind()
        o, i, f = (a.unbind() for a in s.gates[:, :, :3].unbind(2))
        tanh_c = s.tanh_c.unbind()
        for k in range(size):
            self.product(h[k], self.transposed, x, gates[k])
            sigmoids[k].sigmoid_()
            tanhs[k].tanh_()
            torch.mul(f[k], c[k], out=c[k + 1]).addcmul_(i[k], tanhs[k])
            torch.tanh(c[k + 1], out=tanh_c[k])
            torch.mul(o[k], tanh_c[k], out=h[k + 1])
            x = later

    def gru(self, s: Segment, x: Tensor, later: Tensor) -> None:
        h, H = s.h.unbind(), self.H
        r, z, q, v = (a.unbind() for a in s.gates.unbind(2))
        flat = s.gates.flatten(2)
        sums, sigmoids = flat[:, :, : 3 * H].unbind(), flat[:, :, : 2 * H].unbind()
        bias_n = self.spread(self.bias_n, len(x)).expand(len(x), H)
        adds = [torch.cat([a[:, : 2 * H], bias_n], 1) for a in (x, later)]
        inner = [a[:, 2 * H :] for a in (x, later)]
        for k in range(len(s.gates)):
            self.product(h[k], self.transposed, adds[k > 0], sums[k])
            sigmoids[k].sigmoid_()
            torch.addcmul(inner[k > 0], r[k], q[k], out=v[k]).tanh_()
            torch.lerp(v[k], h[k], z[k], out=h[k + 1])

    def halting(self, s: Segment, number: int, total: Tensor | None) -> int:
        """h, p and who goes on, for all updates of a segment, which is cut to what was needed; how many rows run."""
        size, m = len(s.h) - 1, s.h.shape[1]
        start = s.h.new_zeros(1, m) if total is None else total.unsqueeze(0)
        if self.rules.force_steps is not None:
            s.prob = s.h.new_zeros(size, m)
            s.prob[-1] = 1
            s.totals = torch.cat([start, s.prob]).cumsum_(0)
            s.made = None if total is None else s.totals[:-1] < self.threshold
            s.going = s.prob == 0
            s.p = s.prob if s.made is None else s.prob * s.made
            return 0
        if self.E == 1:
            logit = torch.addmv(self.halt_bias[0], s.h[1:].view(size * m, -1), self.halt[0])
        else:
            logit = torch.matmul(s.h[1:].view(size, self.E, -1, self.H), self.halt.unsqueeze(2)).squeeze(3)
            logit += self.halt_bias
        s.prob = logit.sigmoid_().view(size, m)
        s.totals = torch.cat([start, s.prob]).cumsum_(0)
        going = s.totals[1:] < self.threshold
        if s.first + size - 1 == self.limit:
            going[-1] = False
        running = going.sum(1).tolist()
        needed = next((k + 1 for k, a in enumerate(running) if a == 0 or self.drops(a, m)), 2 * size)
        self.rooms[number] = needed
        if 0 in running:
            s.cut(size := running.index(0) + 1)
        s.going = going[:size]
        before = s.totals[:size]
        s.p = torch.where(s.going, s.prob, 1 - before)
        if total is not None or (size > 1 and running[size - 2] < m):
            s.made = before < self.threshold
            s.p *= s.made
        return running[size - 1]

    def add_up(self, s: Segment, mean: Tensor, mean_c: Tensor | None, steps: Tensor, remainder: Tensor) -> None:
        """A segment's shares of the means, N and R of its rows."""
        R = s.p.masked_fill(s.going, 0).sum(0)
        p = s.p.unsqueeze(2)
        for whole, states in ((mean, s.h), (mean_c, s.c)):
            if whole is None or states is None:
                continue
            share = (p * states[1:]).sum(0)
            if s.rows is None:
                whole.copy_(share) if s.first == 1 else whole.add_(share)
            elif s.first == 1:
                whole.index_copy_(0, s.rows, share)
            else:
                whole.index_add_(0, s.rows, share)
        if s.rows is None:
            steps += s.size if s.made is None else s.made.sum(0)
            remainder += R
        else:
            assert s.made is not None
            steps.index_add_(0, s.rows, s.made.sum(0))
            remainder.index_add_(0, s.rows, R)

    def backward(self, d: Grads, *, x: bool) -> Inputs:
        """Derivatives by every input, by x only where it is asked for. What the forward pass kept is used up."""
        E, T, B, H, i = self.E, self.T, self.B, self.H, self.inputs
        d_y, d_mean = d.y.reshape(E, T, B, -1), None
        d_mean, d_weight_y, d_bias_y = by_read_out(i, d_y, self.mean, self.steps)
        grad = Gradients(self)
        G, d_c = d.h.reshape(E * B, H).clone(), None if d.c is None else d.c.reshape(E * B, H).clone()
        sums = grad.all_steps(d_mean.transpose(0, 1), G, d_c, d.remainder.reshape(E, T, B).transpose(0, 1))
        made = by_inputs(self.gate_inputs, sums, x=x)
        if self.rules.kind is LSTM:
            made = each_gate(made, lambda a: a.roll(-H, 1))
        made = made._replace(weight_y=d_weight_y, bias_y=d_bias_y)
        return made if self.rules.stacked else each(lambda a: a.squeeze(0), made)

    def trace(self) -> list[Update]:
        """Every update of the first network."""
        updates = []
        everyone = torch.arange(self.B)
        for s in self.segments:
            made = s.totals[: s.size] < self.threshold
            rows = everyone if s.rows is None else s.rows
            for k in range(s.size):
                m = made[k]
                updates.append(Update(s.t, s.first + k, rows[m], s.prob[k][m], s.p[k][m], s.h[k + 1][m]))
        return updates


def each_gate(i: Inputs, function: Any) -> Inputs:
    """A function of every tensor whose rows are gates."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    return i._replace(**{k: function(getattr(i, k)) for k in names if getattr(i, k) is not None})
