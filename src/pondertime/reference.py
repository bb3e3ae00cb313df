"""The paper turned into PyTorch, one line an equation: the truth that every other path is held to.

Letters: x_t the input, s^n_t the state and y^n_t the output after update n of input step t, h^n_t the
halting unit, p^n_t the halting probability, N(t) the number of updates, R(t) the remainder.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from pondertime.cells import Network, check_state, check_update, like_of, step_function, visible_state
from pondertime.halting import (
    NotANumber,
    State,
    halting_distribution,
    holds_anywhere,
    may_look,
    mean_field,
    sum_dtype,
)

# step(x, state, n) -> (s^n, y^n, h^n), and record(n, rows, h, p, y) of the rows
# that made update n.
PonderStep = Callable[[Any, State, int], tuple[State, Any, Tensor]]
Record = Callable[[int, Tensor, Tensor, Tensor, Any], None]
# For an input step t and the rows that have one (None: all), what records its updates.
Recorder = Callable[[int, Tensor | None], Record]


class Result(NamedTuple):
    """What a backend returns, time first; zeros at padding."""

    output: Tensor  # [T, B, O]
    state: State
    steps: Tensor  # [T, B]
    remainder: Tensor  # [T, B]
    rho: Any = None  # [T, B], where the backend makes it; then cost too
    cost: Any = None  # [B]


def ponder_dense(
    step: PonderStep, x: Any, state: State, epsilon: float, max_steps: int, record: Record | None = None
) -> tuple[State, Any, Tensor, Tensor]:
    """Ponder one input step with the whole batch until its last row has halted; returns s_t, y_t, N, R."""
    states, outputs, hs = [], [], []
    total = None
    for n in range(1, max_steps + 1):
        s, y, h = step(x, state, n)  # s^n = S(s^{n-1}, x^n), y^n = W_y s^n + b_y, h^n = sigma(W_h s^n + b_h)
        states.append(s)
        outputs.append(y)
        hs.append(h.to(sum_dtype(h.dtype)))
        total = hs[0] if total is None else total + hs[-1]
        running = total < 1 - epsilon
        if not holds_anywhere(running, unknown=True):
            break
        # A halted row goes on from the state before its last update, not to states that it did not ask for and
        # that might not be finite; its weight is 0.
        state = s if state is None else keep_halted(running, s, state)
    p, N, R = halting_distribution(torch.stack(hs), epsilon=epsilon)
    if record is not None:
        everyone = torch.arange(len(N), device=N.device)
        for n, (h, p_n, y) in enumerate(zip(hs, p, outputs, strict=True), 1):
            rows = everyone[n <= N]
            record(n, rows, h[rows], p_n[rows], y[rows])
    return mean_field(p, states), mean_field(p, outputs), N, R  # s_t = sum p^n s^n, y_t = sum p^n y^n


def keep_halted(running: Tensor, new: State, old: State) -> State:
    """``new`` where a row runs, ``old`` where it has halted."""

    def choose(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(running.view(-1, *[1] * (a.dim() - 1)), a, b)

    return tree_map(choose, new, old)


def check_nan(h: Tensor, where: str) -> None:
    """Raise if the cell gave NaN."""
    if may_look(h) and holds_anywhere(h.isnan(), unknown=False):
        count = int(h.isnan().sum())
        raise NotANumber(
            f"expected numbers from the cell, got NaN at {where} in {count} of the {len(h)} rows then running"
        )


def network_step(net: Network, t: int, *, read_out: bool, written_out: bool) -> PonderStep:
    """Update n of input step t: ``(x_t, s^{n-1}) -> (s^n, y^n, h^n)``.

    y^n is W_y of the visible state, or that itself where the read-out comes after the mean field.
    """
    cell_step = step_function(net.cell, net.spec, written_out=written_out)

    def step(x: Tensor, state: State, n: int) -> tuple[State, Tensor, Tensor]:
        flag = x.new_full((len(x), 1), 1.0 if n == 1 else 0.0)
        s = cell_step(net.cell, torch.cat([x, flag], 1), state)  # x^n_t: the input and the first-step flag
        if state is None:
            check_state(s, len(x))
        else:
            check_update(state, s, n)
        v = visible_state(s, net.spec)
        logit = net.halt(v).squeeze(-1)
        h = torch.sigmoid(logit.to(sum_dtype(logit.dtype)))
        check_nan(h, f"input step {t}, update {n}")
        if net.force_steps is not None:
            h = 0 * h + (1.0 if n == net.force_steps else 0.0)
        return s, net.output(v) if net.output is not None and read_out else v, h

    return step


def one_hot(x: Tensor, net: Network) -> Tensor:
    """Integers ``[B]`` as one-hot rows of the cell's input size less the flag."""
    size = net.cell.input_size - 1
    return F.one_hot(x.long(), size).to(like_of(net.halt).dtype)


def unroll(
    ponder: Callable[..., tuple[State, Any, Tensor, Tensor]],
    net: Network,
    x: Tensor,
    state: State,
    lengths: Tensor | None,
    record: Recorder | None,
    *,
    read_out: bool,
    written_out: bool,
) -> Result:
    """The loop over t: each input step is pondered by the rows that have one."""
    T, B = x.shape[:2]
    limit = net.max_steps if net.force_steps is None else net.force_steps
    columns = []
    for t, rows in enumerate(rows_with_input(lengths, T, x.device)):
        x_t = x[t] if rows is None else x[t].index_select(0, rows)
        x_t = x_t if x.is_floating_point() else one_hot(x_t, net)
        s = state if rows is None else take(state, rows)
        step = network_step(net, t, read_out=read_out, written_out=written_out)
        s, *values = ponder(step, x_t, s, net.epsilon, limit, record and record(t, rows))
        state = s if rows is None else put(state, rows, s)
        columns.append(values if rows is None else [put(a.new_zeros(B, *a.shape[1:]), rows, a) for a in values])
    columns += [[torch.zeros_like(a) for a in columns[0]]] * (T - len(columns))
    y, N, R = map(torch.stack, zip(*columns, strict=True))
    return Result(y, state, N, R)


def rows_with_input(lengths: Tensor | None, T: int, device: torch.device) -> list[Tensor | None]:
    """For each t up to the longest sequence, the rows that have an input; None: all of them."""
    if lengths is None:
        return [None] * T
    ragged = range(int(lengths.min()), int(lengths.max()))
    return [None] * ragged.start + [(lengths > t).nonzero().squeeze(1).to(device) for t in ragged]


def take(state: State, rows: Tensor) -> State:
    """The given rows of every tensor."""
    return tree_map_only(Tensor, lambda a: a.index_select(0, rows), state)


def put(state: State, rows: Tensor, new: State) -> State:
    """``state`` with the given rows replaced."""
    return tree_map(lambda a, b: a.index_copy(0, rows, b), state, new)


def linear_read_out(output: nn.Module | None) -> bool:
    """Whether the read-out of a mean is the mean of the read-outs."""
    return output is None or type(output) is nn.Linear


def read_out_after(net: Network, result: Result, *, padded: bool) -> Result:
    """y_t = W_y s_t + b_y for all t at once, as the p sum to 1; zeros stay at padding."""
    if net.output is None:
        return result
    y = net.output(result.output)
    if not padded:
        return result._replace(output=y)
    return result._replace(output=torch.where((result.steps > 0).unsqueeze(-1), y, torch.zeros_like(y)))


def reference(net: Network, x: Tensor, state: State, lengths: Tensor | None, record: Recorder | None = None) -> Result:
    """ACT on ``x [T, B, I]`` (or int ``[T, B]``), as the paper writes it.

    With a recorder the read-out comes last, so that the visible states are seen.
    """
    result = unroll(ponder_dense, net, x, state, lengths, record, read_out=record is None, written_out=True)
    return result if record is None else read_out_after(net, result, padded=lengths is not None)
