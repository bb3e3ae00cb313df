"""Adaptive computation time once more, row by row, written from the paper and from nothing else.

One row, one input step and one update at a time, decisions by ``if`` on Python floats. All values are
float64 tensors without a batch axis, so that autograd through these lines gives every gradient.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Weights = Mapping[str, Tensor]


def affine(w: Weights, name: str, x: Tensor) -> Tensor:
    return w[f"{name}.weight"] @ x + w[f"{name}.bias"]


def recurrent(w: Weights, x: Tensor, h: Tensor) -> Tensor:
    return w["cell.weight_ih"] @ x + w["cell.bias_ih"] + w["cell.weight_hh"] @ h + w["cell.bias_hh"]


def rnn_tanh(w: Weights, x: Tensor, h: Tensor) -> Tensor:
    return torch.tanh(recurrent(w, x, h))


def rnn_relu(w: Weights, x: Tensor, h: Tensor) -> Tensor:
    return torch.clamp(recurrent(w, x, h), min=0)


def gru(w: Weights, x: Tensor, h: Tensor) -> Tensor:
    H = len(h)
    a = w["cell.weight_ih"] @ x + w["cell.bias_ih"]
    b = w["cell.weight_hh"] @ h + w["cell.bias_hh"]
    reset = torch.sigmoid(a[:H] + b[:H])
    update = torch.sigmoid(a[H : 2 * H] + b[H : 2 * H])
    new = torch.tanh(a[2 * H :] + reset * b[2 * H :])
    return new + update * (h - new)


def lstm(w: Weights, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    h, c = state
    H = len(h)
    gates = recurrent(w, x, h)
    write, forget, out = (torch.sigmoid(gates[k * H : (k + 1) * H]) for k in (0, 1, 3))
    c = forget * c + write * torch.tanh(gates[2 * H : 3 * H])
    return out * torch.tanh(c), c


def memory(w: Weights, x: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """The cell of ``zoo.MemoryCell``: content-based reading that avoids slots used lately."""
    hidden, (slots, used) = state["hidden"], state["memory"]
    score = torch.exp(slots @ affine(w, "cell.key", hidden) - used)
    weight = score / score.sum()
    hidden = torch.tanh(affine(w, "cell.mix", torch.cat([x, weight @ slots, hidden])))
    value = torch.tanh(affine(w, "cell.value", hidden))
    slots = torch.stack([(1 - a) * slot + a * value for a, slot in zip(weight, slots, strict=True)])
    return {"hidden": hidden, "memory": (slots, used / 2 + weight)}


STEP: dict[str, Callable[..., Any]] = {
    "rnn_tanh": rnn_tanh,
    "rnn_relu": rnn_relu,
    "gru": gru,
    "lstm": lstm,
    "memory": memory,
}


def visible(kind: str, state: Any) -> Tensor:
    if kind == "lstm":
        return state[0]
    return state["hidden"] if kind == "memory" else state


class Answer(NamedTuple):
    output: Tensor  # [T, B, O]
    state: Any
    steps: Tensor  # [T, B]
    remainder: Tensor
    rho: Tensor
    cost: Tensor  # [B]


def act(
    kind: str, w: Weights, x: Tensor, state: Any, lengths: Sequence[int], *, epsilon: float, max_steps: int
) -> Answer:
    """ACT with the named cell and the weights of a ``state_dict`` on ``x [T, B, I]``; zeros at padding."""
    T, B = x.shape[:2]
    y = [[x.new_zeros(len(w["output.bias"])) for _ in range(B)] for _ in range(T)]
    N = torch.zeros(T, B, dtype=torch.int64)
    R = [[x.new_zeros(()) for _ in range(B)] for _ in range(T)]
    rho = [[x.new_zeros(()) for _ in range(B)] for _ in range(T)]
    last, cost = [], []
    for b in range(B):
        s = tree_map(lambda leaf: leaf[b], state)  # noqa: B023
        for t in range(lengths[b]):
            s, y[t][b], steps, R[t][b] = one_step(kind, w, x[t, b], s, epsilon, max_steps)
            N[t, b] = steps
            rho[t][b] = steps + R[t][b]
        last.append(s)
        cost.append(sum((rho[t][b] for t in range(T)), x.new_zeros(())))
    state = tree_map(lambda *leaves: torch.stack(leaves), last[0], *last[1:])
    y, R, rho = (torch.stack([torch.stack(row) for row in table]) for table in (y, R, rho))
    return Answer(y, state, N, R, rho, torch.stack(cost))


def one_step(
    kind: str, w: Weights, x: Tensor, s: Any, epsilon: float, max_steps: int
) -> tuple[Any, Tensor, int, Tensor]:
    """Ponder one input step of one row; returns s_t, y_t, N(t), R(t)."""
    states, outputs, hs = [], [], []
    total = 0.0
    while True:
        flag = 1.0 if not hs else 0.0
        s = STEP[kind](w, torch.cat([x, x.new_tensor([flag])]), s)
        v = visible(kind, s)
        h = torch.sigmoid(affine(w, "halt", v))[0]
        states.append(s)
        outputs.append(affine(w, "output", v))
        hs.append(h)
        total += float(h.detach())
        if total >= 1 - epsilon or len(hs) == max_steps:
            break
    remainder = x.new_ones(())
    for h in hs[:-1]:
        remainder = remainder - h
    p = [*hs[:-1], remainder]
    return mean(p, states), mean(p, outputs), len(hs), remainder


def mean(p: list[Tensor], values: list[Any]) -> Any:
    def mix(*leaves: Tensor) -> Tensor:
        return torch.stack([a * leaf for a, leaf in zip(p, leaves, strict=True)]).sum(0)

    return tree_map(mix, values[0], *values[1:])
