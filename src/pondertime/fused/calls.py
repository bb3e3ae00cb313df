"""The loop in plain torch calls: needs no compiler; several networks are made one after the other.

Few calls an update are what makes it fast. So updates are made in segments, as many as the last input step needed,
and only then is looked who has halted: p, N and R of all its updates are made at once. Within a segment the batch
stays whole: a row that has halted is computed on with weight 0. Rows are dropped between segments, where it pays.
What is one number a row and update is left to numpy, whose calls cost a fifth of torch's.

States are ``[leaves, rows, H]``.
"""

import math
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pondertime.fused.buffers import Buffers, lend
from pondertime.fused.calls_backward import Gradients, number
from pondertime.fused.calls_cell import Cell
from pondertime.fused.common import (
    RNN_RELU,
    Grads,
    Inputs,
    Outputs,
    Rules,
    Update,
    each,
    nan_error,
)
from pondertime.halting import NotANumber

# Rows are dropped when no more than this share of a segment's still run, and its product has so many multiply-adds.
DROP_AT = 0.5
WORTH_A_GATHER = 2_000_000
# Multiply-adds of an update that are cheap; of such, updates made before anything is known of the halting, and the
# number that room is made for a multiple of. The most updates that are guessed.
SMALL_UPDATE, FEW, ROOM, MOST = 4_000_000, 4, 8, 32


@dataclass(slots=True)
class Segment:
    """Some updates of the same rows of an input step."""

    first: int  # the n of its first update
    size: int
    buffers: Buffers
    prob: np.ndarray  # [size, m]
    total: np.ndarray  # [m] sums of h^n after the last update
    going: np.ndarray  # [size, m] whether another update follows
    made: np.ndarray | None  # [size, m] whether the row was still running; None: always
    p: np.ndarray  # [size, m]
    ended: np.ndarray  # [m] R of the rows that halted in it, 0 for others
    running: int = 0  # rows that go on after it
    rows: Tensor | None = None  # [m] places among the rows of the input step; None: all of them
    kept: Tensor | None = None  # [m] places among the rows of the segment before; None: the same rows
    before: int = 0  # rows of the segment before, where some were dropped

    @property
    def last(self) -> np.ndarray:
        """Which update was a row's last, ``[size, m]``."""
        assert self.made is not None
        return self.made & ~self.going


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
        self.cell = Cell(inputs, self.kind)
        self.halt, self.halt_bias = inputs.halt[0], inputs.halt_bias
        self.threshold = 1 - rules.epsilon
        self.limit = rules.force_steps or rules.max_steps
        self.lengths = None if rules.lengths is None else rules.lengths[0].numpy()
        # A relu cell may overflow where it is computed on, and 0 times inf is no 0: its rows are dropped at once.
        self.at_once = self.kind is RNN_RELU and rules.force_steps is None
        # Zeros that nobody gave need no product, and no derivative.
        self.fresh = rules.fresh
        self.steps: list[InputStep] = []
        self.out: Any = self.forward()

    def forward(self) -> Outputs:
        T, B, i = self.T, self.B, self.inputs
        first, later = self.cell.project(i.x)
        state = i.h.unsqueeze(0) if i.c is None else torch.stack([i.h, i.c])
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
        # None of these is kept for the backward pass; as data, since a view that autograd knows of is not the caller's.
        h, c, *_ = *(a.data for a in state.unbind()), None
        return Outputs(self.read_out().data, h, c, *map(torch.from_numpy, (N, R, rho, rho.sum(0))))

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
        rows, kept, total, before, segments = None, None, None, 0, []
        mean: Any = None
        n, count, needed, so_far = 1, FEW if self.small(state) else 2, [], 0
        for expected in chain(self.rooms, repeat(None)):
            s, need, ahead = self.segment(t, n, state, first, later, total, expected or count, known=bool(expected))
            s.rows, s.kept, s.before = rows, kept, before
            share, made = mean_state(s), s.size if s.made is None else s.made.sum(0)
            if rows is None:
                mean = share if mean is None else mean.add_(share)
                N += made
                R += s.ended
            else:
                mean.index_add_(1, rows, share)
                N[rows.numpy()] += made
                R[rows.numpy()] += s.ended
            segments.append(s)
            n, count, m, so_far = n + s.size, ahead, state.shape[1], so_far + need
            dropping = self.drops(s.running, m)
            if s.running == 0 or dropping:
                needed.append(so_far)
                so_far = s.size - need
            if s.running == 0:
                break
            total, first, kept, state = s.total, later, None, s.buffers.at[s.size]
            if dropping:
                chosen, before = np.flatnonzero(s.going[-1]), m
                kept, total = torch.from_numpy(chosen), total[chosen]
                rows, state = kept if rows is None else rows[kept], state[:, kept]
                first = later = later[kept]
        self.rooms = needed
        if self.keep:
            self.steps.append(InputStep(t, places, segments))
        else:
            for s in segments:
                s.buffers.give_back()
        return mean

    def segment(
        self, t: int, n: int, state: Tensor, first: Tensor, later: Tensor, total: np.ndarray | None, count: int, *,
        known: bool,
    ) -> tuple[Segment, int, int]:  # fmt: skip
        """Updates from n on, ``count`` of them before it is looked who has halted, and more where there is room.

        Returns also after how many of them rows should have been dropped, and how many more to expect.
        """
        force, limit, m, threshold = self.rules.force_steps, self.limit - n + 1, state.shape[1], self.threshold
        count = force or min(1 if self.at_once else count, limit)
        # To go on in the same memory is cheaper than another segment.
        exact = force or self.at_once or (known and not self.small(state))
        room = count if exact else min(limit, -(-count // ROOM) * ROOM)
        b: Buffers = lend(Buffers, self.kind, state, room, keep=self.keep)
        b.at[0].copy_(state)
        zero = self.fresh and t == 0 and n == 1
        if force:
            self.cell.update(b, 0, force, first, later, zero=zero)
            p = b.p_array
            p[:], p[-1] = 0, 1
            return Segment(n, force, b, p, p[-1], p == 0, None, p, p[-1]), force, 0
        prob, totals = np.empty((room, m), number(state)), np.empty((room + 1, m), number(state))
        # Not below the threshold: no number is never halted, and seen where it is asked how many updates to expect.
        halted = np.empty((room + 1, m), bool)
        totals[0] = 0 if total is None else total
        np.greater_equal(totals[0], threshold, out=halted[0])
        running, size, ahead = [m - np.count_nonzero(halted[0])], 0, 0
        while True:
            self.cell.update(b, size, size + count, first, later, zero=zero)
            first, zero = later, False
            h = b.part(count).after if size == 0 else b.after[size * m : (size + count) * m]
            prob[size : size + count] = torch.addmv(self.halt_bias, h, self.halt).sigmoid_().numpy().reshape(count, m)
            new = slice(size + 1, size + count + 1)
            totals[new] = prob[size : size + count]
            np.add.accumulate(totals[size : new.stop], 0, out=totals[size : new.stop])
            np.greater_equal(totals[new], threshold, out=halted[new])
            running += (m - halted[new].sum(1)).tolist()
            size += count
            if running[size] == 0:
                size = running.index(0)
                break
            # As if h stayed as it is.
            left = float(((threshold - totals[size]) / prob[size - 1].clip(1 / MOST)).max())
            if math.isnan(left):
                raise nan_error(t, n + int(np.isnan(totals[: size + 1]).any(1).argmax()) - 1)
            if size == limit:
                halted[size], running[size] = True, 0
                break
            ahead = min(MOST, math.ceil(left))
            count = min(ahead, room - size)
            if count == 0 or self.drops(running[size], m):
                break
        need = size
        if self.at_once or self.worth(m):
            need = next((k for k in range(1, size) if self.drops(running[k], m)), size)
        going, prob, p = ~halted[1 : size + 1], prob[:size], b.p_array[:size]
        np.subtract(1, totals[:size], out=p)
        ended = p[-1] if running[size] == 0 else np.where(going[-1], 0, p[-1])
        np.copyto(p, prob, where=going)
        made = None
        if running[size - 1] < m:
            made = ~halted[:size]
            p *= made
            ended = np.where(going, 0, p).sum(0)
        return Segment(n, size, b, prob, totals[size], going, made, p, ended, running[size]), need, ahead

    def small(self, state: Tensor) -> bool:
        """Whether updates that nobody needs cost less than to look more often."""
        return state.shape[1] * self.cell.products <= SMALL_UPDATE

    def worth(self, m: int) -> bool:
        """Whether updates of m rows are slow enough to drop some."""
        return m * self.cell.products >= WORTH_A_GATHER

    def drops(self, running: int, m: int) -> bool:
        """Whether to go on with the running rows only."""
        return running < m if self.at_once else running <= DROP_AT * m and self.worth(m)

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
            one = rules._replace(lengths=lengths, stacked=False)
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


def mean_state(s: Segment) -> Tensor:
    """The share of a segment in the mean state, sum_n p^n s^n."""
    states, p = s.buffers.at[1:], s.buffers.p_rows
    share = states[0] * p[0]
    for k in range(1, s.size):
        share.addcmul_(states[k], p[k])
    return share
