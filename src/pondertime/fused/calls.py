"""The loop in plain torch calls: needs no compiler; several networks are made one after the other.

Few calls an update are what makes it fast. So updates are made in segments, as many as the last input step needed,
and only then is looked who has halted: p, N and R of all its updates are made at once. Within a segment the batch
stays whole: a row that has halted is computed on with weight 0. Rows are dropped between segments, where it pays.
What is one number a row and update is left to numpy, whose calls cost a fifth of torch's.

States are ``[leaves, rows, H]``. Sums are ``[rows, slots H]``: of a GRU the place of U_n h has a bias of its own.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pondertime.fused.buffers import Buffers, lend
from pondertime.fused.calls_backward import Gradients, number
from pondertime.fused.common import (
    GRU,
    LSTM,
    RNN_RELU,
    RNN_TANH,
    Grads,
    Inputs,
    NotANumber,
    Outputs,
    Rules,
    Update,
    each,
    nan_error,
)

# Rows are dropped when no more than this share of a segment's still run, and its product has so many multiply-adds.
DROP_AT = 0.75
WORTH_A_GATHER = 2_000_000
# Multiply-adds of a segment before anything is known of the halting, and the most updates that are guessed.
SMALL_UPDATES, MOST = 16_000_000, 32
# Numbers of a matrix that are transposed at once.
BLOCK = 2**18


class Segment(NamedTuple):
    """Some updates of the same rows of an input step."""

    first: int  # the n of its first update
    size: int
    rows: Tensor | None  # [m] places among the rows of the input step; None: all of them
    kept: Tensor | None  # [m] places among the rows of the segment before; None: the same rows
    buffers: Buffers
    prob: np.ndarray  # [size, m]
    total: np.ndarray  # [m] sums of h^n after the last update
    going: np.ndarray  # [size, m] whether another update follows
    made: np.ndarray | None  # [size, m] whether the row was still running; None: always
    p: np.ndarray  # [size, m]
    running: int  # rows that go on after it
    before: int = 0  # rows of the segment before, where some were dropped

    @property
    def last(self) -> np.ndarray:
        """Which update was a row's last, ``[size, m]``."""
        return ~self.going if self.made is None else self.made & ~self.going


class InputStep(NamedTuple):
    """The segments of input step t."""

    t: int
    rows: Tensor | None  # which have an input; None: all of them
    segments: list[Segment]


class Run:
    """A forward pass of one network, and what its backward pass needs."""

    def __init__(self, inputs: Inputs, rules: Rules, *, keep: bool, seen: bool = False) -> None:
        self.inputs, self.rules, self.keep = inputs, rules, keep or seen
        self.kind = rules.kind
        self.T, (self.B, self.H) = len(inputs.x), inputs.h.shape
        # Updates that the segments of the last input step needed. Not of the last call: what is computed, to the last
        # bit, depends on the call alone.
        self.rooms: list[int] = []
        self.weight = transposed(inputs.weight_hh)
        self.halt, self.halt_bias = inputs.halt[0], inputs.halt_bias
        self.threshold = 1 - rules.epsilon
        self.limit = rules.force_steps or rules.max_steps
        self.lengths = None if rules.lengths is None else rules.lengths[0].numpy()
        # A relu cell may overflow where it is computed on, and 0 times inf is no 0: its rows are dropped at once.
        self.at_once = self.kind is RNN_RELU and rules.force_steps is None
        self.steps: list[InputStep] = []
        self.out: Any = self.forward()

    def project(self) -> tuple[Tensor, Tensor]:
        """What first updates and later ones add to their products, for all t: ``[T, B, slots H]``."""
        i, H = self.inputs, self.H
        weight, bias = transposed(i.weight_ih), None
        if i.bias_ih is not None and i.bias_hh is not None:
            if self.kind is GRU:
                bias = torch.cat([(i.bias_ih + i.bias_hh)[: 2 * H], i.bias_hh[2 * H :], i.bias_ih[2 * H :]])
            else:
                bias = i.bias_ih + i.bias_hh
        if self.kind is GRU:
            weight = torch.cat([weight[:, : 2 * H], weight.new_zeros(len(weight), H), weight[:, 2 * H :]], 1)
        if self.kind is LSTM:
            # tanh g = 2 sigmoid(2 g) - 1: all four gates become sigmoids, one call.
            for a in (self.weight, weight) if bias is None else (self.weight, weight, bias):
                a[..., 2 * H : 3 * H] *= 2
        table = weight[:-1]
        if not i.x.is_floating_point():
            xw = torch.nn.functional.embedding(i.x.long(), table)
            xw = xw if bias is None else xw.add_(bias)
        else:
            rows = i.x.reshape(self.T * self.B, -1)
            xw = torch.mm(rows, table) if bias is None else torch.addmm(bias, rows, table)
            xw = xw.view(self.T, self.B, -1)
        return xw + weight[-1], xw

    def forward(self) -> Outputs:
        T, B, H, i = self.T, self.B, self.H, self.inputs
        first, later = self.project()
        state = torch.stack([a for a in (i.h, i.c) if a is not None])
        means, N, R = [], np.zeros((T, B), np.int64), np.zeros((T, B), number(state))
        for t, (x1, x) in enumerate(zip(first.unbind(), later.unbind(), strict=True)):
            rows = None if self.lengths is None else np.flatnonzero(self.lengths > t)
            if rows is None or len(rows) == B:
                state = self.input_step(t, None, x1, x, state, N[t], R[t])
                means.append(state[0])
                continue
            means.append(torch.zeros_like(state[0]))
            if len(rows) > 0:
                places = torch.from_numpy(rows)
                n, r = np.zeros(len(rows), N.dtype), np.zeros(len(rows), R.dtype)
                mean = self.input_step(t, places, x1[places], x[places], state[:, places], n, r)
                N[t, rows], R[t, rows] = n, r
                state = state.index_copy(1, places, mean)
                means[-1].index_copy_(0, places, mean[0])
        self.mean = torch.stack(means)
        if self.rules.force_steps is not None and self.mean.isnan().any():
            raise nan_error(int(self.mean.isnan().flatten(1).any(1).nonzero()[0]), 1)
        rho = R + N.astype(R.dtype)
        # Copies: what is kept for the backward pass is not theirs to change.
        h, c, *_ = *(a.clone() for a in state), None
        return Outputs(self.read_out(), h, c, *map(torch.from_numpy, (N, R, rho, rho.sum(0))))

    def read_out(self) -> Tensor:
        """y_t = W_y s_t + b_y for all t, ``[T, B, O]``, zeros without an input."""
        weight, bias = self.inputs.weight_y, self.inputs.bias_y
        if weight is None:
            return self.mean.clone()
        rows = self.mean.view(self.T * self.B, self.H)
        y = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
        return self.present(y.view(self.T, self.B, -1))

    def present(self, a: Tensor) -> Tensor:
        """``[T, B, ...]`` with zeros where there is no input."""
        if self.lengths is None:
            return a
        there = torch.from_numpy(np.arange(self.T)[:, None] < self.lengths)
        return torch.where(there.unsqueeze(-1), a, 0)

    def input_step(
        self, t: int, places: Tensor | None, first: Tensor, later: Tensor, state: Tensor, N: np.ndarray, R: np.ndarray
    ) -> Tensor:
        """The mean state of input step t; its N and R are written."""
        update = self.lstm if self.kind is LSTM else self.gru if self.kind is GRU else self.rnn
        rows, kept, mean, total, n, before, segments = None, None, None, None, 1, 0, []
        # Updates that nobody needs cost less than another segment where they are small.
        guess = max(2, min(4, SMALL_UPDATES // (state.shape[1] * self.weight.numel())))
        needed, so_far = [], 0
        for number in range(self.limit):
            room = self.rooms[number] if number < len(self.rooms) else guess
            room = self.limit if self.rules.force_steps else 1 if self.at_once else room
            b = lend(self.kind, state, min(room, self.limit - n + 1), keep=self.keep)
            b.at[0].copy_(state)
            update(b, first, later)
            if self.rules.force_steps is not None:
                s = self.forced(b)
            else:
                s, need = self.halting(t, n, b, total)
                s = s._replace(rows=rows, kept=kept, before=before)
                so_far += need
                if s.running == 0 or need < s.size or self.drops(s.running, state.shape[1]):
                    needed.append(so_far)
                    so_far = s.size - need
            share = mean_state(b, s)
            ended = np.where(s.going, 0, s.p).sum(0)
            made = s.size if s.made is None else s.made.sum(0)
            if rows is None:
                mean = share if mean is None else mean.add_(share)
                N += made
                R += ended
            else:
                assert mean is not None
                mean.index_add_(1, rows, share)
                N[rows.numpy()] += made
                R[rows.numpy()] += ended
            n += s.size
            if s.running > 0:
                total, first, kept, state = s.total, later, None, b.at[s.size]
                # As if h stayed as it is.
                going = s.going[-1]
                left = (self.threshold - total[going]) / s.prob[-1][going].clip(1 / MOST)
                guess = min(MOST, math.ceil(left.max()))
                if self.drops(s.running, len(total)):
                    chosen, before = np.flatnonzero(going), len(total)
                    kept, total = torch.from_numpy(chosen), total[chosen]
                    rows = kept if rows is None else rows[kept]
                    state = state[:, kept]
                    first = later = later[kept]
                elif not self.keep:
                    # Its memory may be the next segment's.
                    state = state.clone()
            if self.keep:
                segments.append(s)
            else:
                b.give_back()
            if s.running == 0:
                break
        self.rooms = needed
        if self.keep:
            self.steps.append(InputStep(t, places, segments))
        assert mean is not None
        return mean

    def drops(self, running: int, m: int) -> bool:
        """Whether to go on with the running rows only."""
        worth = m * self.weight.numel() >= WORTH_A_GATHER and running <= DROP_AT * m
        return worth or (self.at_once and running < m)

    def rnn(self, b: Buffers, first: Tensor, later: Tensor) -> None:
        """All updates of a segment."""
        activate, weight, addmm, x = torch.tanh_ if self.kind is RNN_TANH else torch.relu_, self.weight, torch.addmm, first
        for h0, h1 in zip(b.h, b.h[1:], strict=False):
            activate(addmm(x, h0, weight, out=h1))
            x = later

    def lstm(self, b: Buffers, first: Tensor, later: Tensor) -> None:
        weight, addmm, mul, tanh, x = self.weight, torch.addmm, torch.mul, torch.tanh, first
        c0 = b.c[0]
        for h0, h1, c1, sums, (i, f, g, o), tanh_c in zip(
            b.h, b.h[1:], b.c[1:], b.rows, b.each_gate, b.tanh, strict=False
        ):
            addmm(x, h0, weight, out=sums).sigmoid_()
            # c = f c + i (2 g - 1)
            mul(f, c0, out=c1).addcmul_(i, g, value=2).sub_(i)
            mul(o, tanh(c1, out=tanh_c), out=h1)
            c0, x = c1, later

    def gru(self, b: Buffers, first: Tensor, later: Tensor) -> None:
        weight, width = self.weight, 3 * self.H
        (x, inner), *after = (a.split([width, self.H], 1) for a in (first, later))
        for h0, h1, sums, sigmoids, (r, z, q, v) in zip(b.h, b.h[1:], b.rows, b.sigmoids, b.each_gate, strict=False):
            torch.addmm(x, h0, weight, out=sums)
            sigmoids.sigmoid_()
            torch.addcmul(inner, r, q, out=v).tanh_()
            torch.lerp(v, h0, z, out=h1)
            x, inner = after[0]

    def forced(self, b: Buffers) -> Segment:
        """A segment of as many updates as were asked for: the mean is the last state."""
        p = np.zeros((b.room, b.states.shape[2]), number(b.states))
        p[-1] = 1
        return Segment(1, b.room, None, None, b, p, p[-1], p == 0, None, p, 0)

    def halting(self, t: int, n: int, b: Buffers, total: np.ndarray | None) -> tuple[Segment, int]:
        """h, p and who goes on after the updates from n on, cut to what was needed; and when rows should be dropped."""
        size, m, threshold = b.room, b.states.shape[2], self.threshold
        prob = torch.addmv(self.halt_bias, b.part(size).after, self.halt).sigmoid_().numpy().reshape(size, m)
        totals = np.empty((size + 1, m), prob.dtype)
        totals[0] = 0 if total is None else total
        for k in range(size):
            np.add(totals[k], prob[k], out=totals[k + 1])
        below = totals < threshold
        if n + size - 1 == self.limit:
            below[-1] = False
        running = [int(np.count_nonzero(a)) for a in below]
        if running[-1] == 0:
            size = running.index(0)
        if np.isnan(totals[size]).any():
            raise nan_error(t, n + int(np.isnan(totals).any(1).argmax()) - 1)
        need = next((k for k in range(1, size) if self.drops(running[k], m)), size)
        made, going, prob = below[:size], below[1 : size + 1], prob[:size]
        p = np.where(going, prob, 1 - totals[:size])
        whole = running[size - 1] == m
        if not whole:
            p *= made
        s = Segment(n, size, None, None, b, prob, totals[size], going, None if whole else made, p, running[size])
        return s, need

    def backward(self, d: Grads, *, x: bool) -> Inputs:
        """Derivatives by every input, by x only where it is asked for. What the forward pass kept is used up."""
        return Gradients(self).all_steps(d, x=x)

    def trace(self) -> list[Update]:
        """Every update."""
        updates = []
        for t, places, segments in self.steps:
            everyone = torch.arange(self.B) if places is None else places
            for s in segments:
                rows = everyone if s.rows is None else everyone[s.rows]
                prob, p = torch.from_numpy(s.prob), torch.from_numpy(s.p)
                for k in range(s.size):
                    m = slice(None) if s.made is None else torch.from_numpy(s.made[k])
                    updates.append(Update(t, s.first + k, rows[m], prob[k][m], p[k][m], s.buffers.h[k + 1][m]))
        return updates


class Runs:
    """Forward passes of E networks, one after the other."""

    def __init__(self, inputs: Inputs, rules: Rules, *, keep: bool, seen: bool = False) -> None:
        self.runs: list[Run] = []
        for e in range(len(inputs.h)):
            lengths = None if rules.lengths is None else rules.lengths[e : e + 1]
            one = replace(rules, lengths=lengths, stacked=False)
            try:
                self.runs.append(Run(each(lambda a, e=e: a[e], inputs), one, keep=keep, seen=seen))
            except NotANumber as error:
                error.network = e
                raise
        self.T = self.runs[0].T
        self.out: Any = Outputs(*stacked([run.out for run in self.runs]))
        for run in self.runs:
            run.out = None

    def backward(self, d: Grads, *, x: bool) -> Inputs:
        """Derivatives by every input, by x only where it is asked for."""
        grads = [Grads(*(None if a is None else a[e] for a in d)) for e in range(len(self.runs))]
        return Inputs(*stacked([run.backward(g, x=x) for run, g in zip(self.runs, grads, strict=True)]))

    def trace(self) -> list[Update]:
        """Every update of the first network."""
        return self.runs[0].trace()


def make(inputs: Inputs, rules: Rules, *, keep: bool, seen: bool = False) -> Run | Runs:
    """Run forward."""
    return (Runs if rules.stacked else Run)(inputs, rules, keep=keep, seen=seen)


def stacked(records: list[Any]) -> Any:
    """The fields of records of tensors, E first."""
    return (None if a[0] is None else torch.stack(a) for a in zip(*records, strict=True))


def transposed(a: Tensor) -> Tensor:
    """A copy with rows and columns swapped, in blocks that stay in the cache."""
    made, block = a.new_empty(a.shape[::-1]), max(64, BLOCK // a.shape[1])
    for k in range(0, len(a), block):
        made[:, k : k + block].copy_(a[k : k + block].t())
    return made


def mean_state(b: Buffers, s: Segment) -> Tensor:
    """The share of a segment in the mean state, sum_n p^n s^n."""
    states, p = b.at[1:], torch.from_numpy(s.p).unsqueeze(2).unbind()
    share = states[0] * p[0]
    for k in range(1, s.size):
        share.addcmul_(states[k], p[k])
    return share

