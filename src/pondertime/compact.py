"""The same as the reference for any batch-first cell, with halted rows dropped from the batch."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pondertime.cells import Network
from pondertime.halting import State, sum_dtype, weigh
from pondertime.reference import (
    PonderStep,
    Record,
    Recorder,
    Result,
    linear_read_out,
    read_out_after,
    take,
    unroll,
)


def ponder_compact(
    step: PonderStep, x: Any, state: State, epsilon: float, max_steps: int, record: Record | None = None
) -> tuple[State, Any, Tensor, Tensor]:
    """Ponder one input step, each row for its own N updates; returns s_t, y_t, N, R.

    ``rows`` are the places of the running rows in the whole batch; x, state, y, h and ``total``, the
    sum of h before the update, have only these.
    """
    rows = N = total = torch.empty(0)
    means: Any = None
    ended: list[tuple[Tensor, Tensor]] = []
    for n in range(1, max_steps + 1):
        state, y, h = step(x, state, n)
        h = h.to(sum_dtype(h.dtype))
        if n == 1:
            # A 0 that depends on h, so that R has a gradient (zeros) where every N is 1.
            rows, total = torch.arange(len(h), device=h.device), 0 * h
            N = torch.zeros_like(rows)
            means = tree_map(lambda a: torch.zeros_like(a, dtype=sum_dtype(a.dtype)), (state, y))
        going = (total + h < 1 - epsilon) & (n < max_steps)
        R = 1 - total
        p = torch.where(going, h, R)
        means = tree_map(lambda mean, a: add_rows(mean, rows, weigh(p, a)), means, (state, y))  # noqa: B023
        N = add_rows(N, rows, torch.ones_like(rows))
        if record is not None:
            record(n, rows, h, p, y)
        running = going.nonzero().squeeze(1)
        total = total + h
        if len(running) < len(rows):
            halted = (~going).nonzero().squeeze(1)
            ended.append((rows[halted], R[halted]))
            if len(running) == 0:
                break
            rows, total = rows[running], total[running]
            x, state = take(x, running), take(state, running)
    s, y = tree_map(lambda mean, a: mean.to(a.dtype), means, (state, y))
    places, R = (torch.cat(parts) for parts in zip(*ended, strict=True))
    return s, y, N, torch.empty_like(R).index_copy(0, places, R)


def add_rows(mean: Tensor, rows: Tensor, value: Tensor) -> Tensor:
    """``mean`` with the running rows' share added."""
    return mean + value if len(rows) == len(mean) else mean.index_add_(0, rows, value)


def compact(net: Network, x: Tensor, state: State, lengths: Tensor | None, record: Recorder | None = None) -> Result:
    """ACT on ``x [T, B, I]`` (or int ``[T, B]``), computing no row that has halted."""
    last = record is not None or linear_read_out(net.output)
    result = unroll(ponder_compact, net, x, state, lengths, record, read_out=not last, written_out=False)
    return read_out_after(net, result, padded=lengths is not None) if last else result
