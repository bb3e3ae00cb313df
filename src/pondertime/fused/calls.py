"""The loop in plain torch calls: needs no compiler, and serves E networks with batched products.

Few calls an update are what makes it fast. So updates are made in segments, as many as the last input step needed,
and only then is looked who has halted: p, N and R of all its updates are made at once. Within a segment the batch
stays whole: a row that has halted is computed on with weight 0. Rows are dropped between segments, where it pays.
What is one number a row and update is left to numpy, whose calls cost a fifth of torch's.

Rows of all networks lie in one axis: row e * m + j is row j of network e. The networks of a segment have the same
number m of rows; where one has fewer running, rows that have halted fill it up. States are ``[leaves, rows, H]``.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pondertime.fused.buffers import Buffers, lend
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
# Multiply-adds of a segment before anything is known of the halting, and the most updates that are guessed.
SMALL_UPDATES, MOST = 16_000_000, 32


@dataclass
class Segment:
    """Some updates of the same rows at input step t."""

    t: int
    first: int  # the n of its first update
    size: int
    rows: Tensor | None  # [m] places among all rows; None: all of them
    kept: Tensor | None  # [m] places among the rows of the segment before; None: the same rows
    buffers: Buffers
    prob: np.ndarray  # [size, m]
    totals: np.ndarray  # [size, m] sums of h^n after each update
    going: np.ndarray  # [size, m] whether another update follows
    made: np.ndarray | None  # [size, m] whether the row was still running; None: always
    p: np.ndarray  # [size, m]

    @property
    def last(self) -> np.ndarray:
        """Which update was a row's last, ``[size, m]``."""
        return ~self.going if self.made is None else self.made & ~self.going


class Run:
    """A forward pass of E networks, and what its backward pass needs."""

    def __init__(self, inputs: Inputs, rules: Rules, *, keep: bool, seen: bool = False) -> None:
        self.inputs = i = inputs if rules.stacked else each(lambda a: a.unsqueeze(0), inputs)
        self.rules, self.keep = rules, keep or seen
        # Updates that the segments of the last input step needed. Not of the last call: what is computed, to the last
        # bit, depends on the call alone.
        self.rooms: list[int] = []
        self.E, self.T, self.B, self.H = *i.x.shape[:3], i.h.shape[2]
        self.xw, bias_n = project(i, rules.kind)
        self.flag = i.weight_ih[:, :, -1].clone()
        if bias_n is not None:
            self.bias_n = bias_n.contiguous()
        self.halt, self.halt_bias = i.halt.squeeze(1), i.halt_bias
        # One by one: torch is quicker with a matrix than with a stack of them.
        self.transposed = i.weight_hh.new_empty(self.E, self.H, i.weight_hh.shape[1])
        for to, a in zip(self.transposed, i.weight_hh, strict=True):
            to.copy_(a.t())
        if rules.kind is LSTM:
            # tanh g = 2 sigmoid(2 g) - 1: all four gates become sigmoids, one call.
            for a in (self.xw, self.flag, self.transposed):
                a[..., 2 * self.H : 3 * self.H] *= 2
        self.threshold = 1 - rules.epsilon
        self.limit = rules.force_steps or rules.max_steps
        # A relu cell may overflow where it is computed on, and 0 times inf is no 0: its rows are dropped at once.
        self.at_once = rules.kind is RNN_RELU and rules.force_steps is None
        self.segments: list[Segment] = []
        self.out: Any = self.forward()

    def add_product(self, out: Tensor, a: Tensor, weight: Tensor) -> None:
        """out += a [E m, k] times weight [E, k, n]."""
        if self.E == 1:
            out.addmm_(a, weight[0])
        else:
            out.view(self.E, -1, out.shape[1]).baddbmm_(a.view(self.E, -1, a.shape[1]), weight)

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

    def fill_up(self, state: Tensor, real: Tensor) -> Tensor:
        """States of a segment's rows, zero where a row only fills it up."""
        return state if self.E == 1 else torch.where(real.unsqueeze(1), state, 0)

    def forward(self) -> Outputs:
        E, T, B, H, i, lengths = self.E, self.T, self.B, self.H, self.inputs, self.rules.lengths
        state = torch.stack([a.reshape(E * B, H) for a in (i.h, i.c) if a is not None])
        first = self.xw + self.flag.view(E, 1, 1, -1)
        means, steps, remainder = [], np.zeros((T, E * B), np.int64), np.zeros((T, E * B), prob_type(state))
        for t, (xw, x1) in enumerate(zip(self.xw.unbind(1), first.unbind(1), strict=True)):
            present = None if lengths is None else (lengths > t).flatten()
            segments = self.ponder(t, x1.flatten(0, 1), xw.flatten(0, 1), present, state)
            mean = self.add_up(segments, state, steps[t], remainder[t])
            means.append(mean[0])
            state = mean if present is None else torch.where(present.unsqueeze(1), mean, state)
        mean = torch.stack(means)
        if self.rules.force_steps is not None and mean.isnan().any():
            raise nan_error(int(mean.isnan().flatten(1).any(1).nonzero()[0]), 1)
        front = self.rules.front(E)
        self.mean = mean.view(T, E, B, H).transpose(0, 1)
        self.steps, R = (torch.from_numpy(a).view(T, E, B).transpose(0, 1).contiguous() for a in (steps, remainder))
        y = self.mean if i.weight_y is None else read_out(i, self.mean, None if lengths is None else self.steps)
        # Copies: what is kept for the backward pass is not theirs to change.
        return Outputs(
            y.reshape(*front, T, B, -1).clone(),
            state[0].reshape(*front, B, H).clone(),
            None if i.c is None else state[1].reshape(*front, B, H).clone(),
            self.steps.view(*front, T, B).clone(),
            R.view(*front, T, B).clone(),
        )

    def add_up(self, segments: Iterable[Segment], state: Tensor, steps: np.ndarray, remainder: np.ndarray) -> Tensor:
        """The mean state of an input step for all rows, zeros without an input; N and R are written."""
        mean: Tensor | None = None
        for s in segments:
            share = (torch.from_numpy(s.p).unsqueeze(2) * s.buffers.states[:, 1 : s.size + 1]).sum(1)
            rows = slice(None) if s.rows is None else s.rows.numpy()
            steps[rows] += s.size if s.made is None else s.made.sum(0)
            remainder[rows] += np.where(s.going, 0, s.p).sum(0)
            if self.keep:
                self.segments.append(s)
            else:
                s.buffers.give_back()
            if s.rows is None:
                mean = share if mean is None else mean.add_(share)
            else:
                mean = torch.zeros_like(state) if mean is None else mean
                mean.index_add_(1, s.rows, share)
        return torch.zeros_like(state) if mean is None else mean

    def ponder(self, t: int, first: Tensor, later: Tensor, present: Tensor | None, state: Tensor) -> Iterator[Segment]:
        """The segments of input step t, one after the other; what the first update adds to its product, and later."""
        rows, kept, n = None, None, 1
        total: Any = None
        if present is not None:
            rows, real = self.choose(present)
            if len(rows) == 0:
                return
            first, later, state = first[rows], later[rows], self.fill_up(state[:, rows], real)
            total = np.where(real.numpy(), 0, 2).astype(prob_type(state))
        # Updates that nobody needs cost less than another segment where they are small.
        guess = max(2, min(8, SMALL_UPDATES // (state.shape[1] * self.H * self.transposed.shape[2])))
        for number in range(self.limit):
            if number == len(self.rooms):
                self.rooms.append(guess)
            room = self.limit if self.rules.force_steps else 1 if self.at_once else self.rooms[number]
            b = lend(self.rules.kind, state, min(room, self.limit - n + 1))
            b.before.copy_(state)
            self.begin(b, first, later)
            (self.lstm if self.rules.kind is LSTM else self.gru if self.rules.kind is GRU else self.rnn)(b)
            s, running = self.halting(t, n, b, number, total)
            s.rows, s.kept, n = rows, kept, n + s.size
            if running:
                # Taken now: the segment's memory may be another's afterwards.
                state, total = b.states[:, s.size].clone(), s.totals[-1]
                # As if h stayed as it is; for the next segment, if there was none before.
                going, prob = s.going[-1], s.prob[-1]
                guess = min(MOST, math.ceil(((self.threshold - total[going]) / prob[going].clip(1 / MOST)).max()))
            yield s
            if not running:
                return
            first, kept = later, None
            if self.drops(running, state.shape[1]):
                kept, real = self.choose(torch.from_numpy(total < self.threshold))
                rows, later = kept if rows is None else rows[kept], later[kept]
                state, first = self.fill_up(state[:, kept], real), later
                total = np.where(real.numpy(), total[kept.numpy()], 2).astype(total.dtype)

    def drops(self, running: int, m: int) -> bool:
        """Whether to go on with the running rows only."""
        worth = m * self.H * self.transposed.shape[2] >= WORTH_A_GATHER and running <= DROP_AT * m
        return worth or (self.at_once and running < m)

    def begin(self, b: Buffers, first: Tensor, later: Tensor) -> None:
        """Put in their places what the updates of a segment add to their products."""
        if self.rules.kind is not GRU:
            b.first.copy_(first)
            b.later.copy_(later)
            return
        H = self.H
        for inner, sums, x in ((b.inner[1:], b.sums[1:], later), (b.inner[0], b.sums[0], first)):
            inner[:] = x[:, 2 * H :]
            sums[..., : 2 * H] = x[:, : 2 * H]
        b.sums[..., 2 * H :] = self.spread(self.bias_n, len(later))

    def rnn(self, b: Buffers) -> None:
        """All updates of a segment."""
        activate, weight = torch.tanh_ if self.rules.kind is RNN_TANH else torch.relu_, self.transposed
        for h0, h1 in zip(b.h, b.h[1:], strict=False):
            self.add_product(h1, h0, weight)
            activate(h1)

    def lstm(self, b: Buffers) -> None:
        weight, mul, tanh = self.transposed, torch.mul, torch.tanh
        c0 = b.c[0]
        for h0, h1, c1, sums, (i, f, g, o), tanh_c in zip(
            b.h, b.h[1:], b.c[1:], b.rows, b.each_gate, b.tanh, strict=False
        ):
            self.add_product(sums, h0, weight)
            sums.sigmoid_()
            # c = f c + i (2 g - 1)
            mul(f, c0, out=c1).addcmul_(i, g, value=2).sub_(i)
            mul(o, tanh(c1, out=tanh_c), out=h1)
            c0 = c1

    def gru(self, b: Buffers) -> None:
        weight = self.transposed
        for h0, h1, sums, sigmoids, (r, z, q, v), inner in zip(
            b.h, b.h[1:], b.rows, b.sigmoids, b.each_gate, b.inner.unbind(), strict=False
        ):
            self.add_product(sums, h0, weight)
            sigmoids.sigmoid_()
            torch.addcmul(inner, r, q, out=v).tanh_()
            torch.lerp(v, h0, z, out=h1)

    def halting(self, t: int, n: int, b: Buffers, number: int, total: np.ndarray | None) -> tuple[Segment, int]:
        """h, p and who goes on after the updates from n on, cut to what was needed; and how many rows run."""
        size, h = b.room, b.after[0]
        m = h.shape[1]
        if self.rules.force_steps is not None:
            made = None if total is None else np.tile(total < self.threshold, (size, 1))
            prob = np.zeros((size, m), prob_type(h))
            prob[-1] = 1
            p = prob if made is None else prob * made
            return Segment(t, n, size, None, None, b, prob, prob, prob == 0, made, p), 0
        if self.E == 1:
            logit = torch.addmv(self.halt_bias[0], h.view(size * m, -1), self.halt[0])
        else:
            logit = torch.matmul(h.view(size, self.E, -1, self.H), self.halt.unsqueeze(2)).squeeze(3)
            logit += self.halt_bias
        prob = logit.sigmoid_().view(size, m).numpy()
        totals = np.empty((size + 1, m), prob.dtype)
        totals[0], totals[1:] = 0 if total is None else total, prob
        np.cumsum(totals, 0, out=totals)
        if np.isnan(totals[-1]).any():
            place = int(np.isnan(totals[-1]).argmax())
            raise nan_error(t, n + int(np.isnan(totals).any(1).argmax()) - 1, place // (m // self.E))
        below = totals < self.threshold
        if n + size - 1 == self.limit:
            below[-1] = False
        running = below.sum(1).tolist()[1:]
        self.rooms[number] = next((k + 1 for k, a in enumerate(running) if a == 0 or self.drops(a, m)), 2 * size)
        if running[-1] == 0:
            size = running.index(0) + 1
        made, going = below[:size], below[1 : size + 1]
        p = np.where(going, prob[:size], 1 - totals[:size])
        whole = total is None and (size == 1 or running[size - 2] == m)
        if not whole:
            p *= made
        s = Segment(t, n, size, None, None, b, prob[:size], totals[1 : size + 1], going, None if whole else made, p)
        return s, running[size - 1]

    def backward(self, d: Grads, *, x: bool) -> Inputs:
        """Derivatives by every input, by x only where it is asked for. What the forward pass kept is used up."""
        E, T, B, H, i = self.E, self.T, self.B, self.H, self.inputs
        steps = None if self.rules.lengths is None else self.steps
        d_y, d_h, d_c, d_remainder = d.filled(i, T)
        d_mean, d_weight_y, d_bias_y = by_read_out(i, d_y.reshape(E, T, B, -1), self.mean, steps)
        G = torch.stack([a.reshape(E * B, H) for a in (d_h, d_c) if a is not None])
        d_remainder = d_remainder.reshape(E, T, B).transpose(0, 1).flatten(1, 2)
        sums = Gradients(self).all_steps(d_mean.transpose(0, 1).flatten(1, 2), G, d_remainder)
        made = by_inputs(i, sums, x=x)._replace(weight_y=d_weight_y, bias_y=d_bias_y)
        return made if self.rules.stacked else each(lambda a: a.squeeze(0), made)

    def trace(self) -> list[Update]:
        """Every update of the first network."""
        updates = []
        everyone = torch.arange(self.B)
        for s in self.segments:
            rows = everyone if s.rows is None else s.rows
            prob, p = torch.from_numpy(s.prob), torch.from_numpy(s.p)
            for k in range(s.size):
                m = slice(None) if s.made is None else torch.from_numpy(s.made[k])
                updates.append(Update(s.t, s.first + k, rows[m], prob[k][m], p[k][m], s.buffers.h[k + 1][m]))
        return updates


def prob_type(a: Tensor) -> type:
    """numpy's name of a tensor's type."""
    return np.float64 if a.dtype == torch.float64 else np.float32
