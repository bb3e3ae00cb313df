"""The halting distribution of adaptive computation time: pure maths, no network.

Letters as in the paper: h^n the halting unit after update n, p^n the halting probability, N the
number of updates, R the remainder, s^n the state after update n. Axes: n first, then the batch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

# By how much rounding may take a probability out of its range, at least.
SLACK = 1e-5
# A tensor, or any nested tuple, list or dict of tensors with the batch as their first axis.
State = Any


class NotANumber(RuntimeError):
    """The cell gave NaN; of several networks that of one."""

    network = 0


class Halting(NamedTuple):
    """How n halting activations are turned into a distribution over updates."""

    p: Tensor  # [n, *batch], sums to 1 over n
    steps: Tensor  # [*batch] int64, N
    remainder: Tensor  # [*batch], R


class Ponder(NamedTuple):
    """How long a network thought."""

    steps: Tensor  # N, int64
    remainder: Tensor  # R
    rho: Tensor  # N + R, the gradient flows through R
    cost: Tensor  # the sum of rho over a sequence


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type halting sums run in: at least float32, as 0.99 is 0.988 in bfloat16."""
    return torch.promote_types(dtype, torch.float32)


def check_epsilon(epsilon: float) -> None:
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon: expected a number between 0 and 1, got {epsilon}")


def holds_anywhere(mask: Tensor, *, unknown: bool) -> bool:
    """Whether any row is true; ``unknown`` under vmap, where nobody can tell."""
    try:
        return bool(mask.any())
    except RuntimeError:
        if not in_transform():
            raise
        return unknown


def in_transform() -> bool:
    """Whether the call runs inside a ``torch.func`` transform (grad, vmap, jvp)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def may_look(a: Tensor) -> bool:
    """Whether a look at the numbers costs nothing: it would stop a GPU, and end a graph that is traced."""
    return a.device.type == "cpu" and not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()


def check_probabilities(h: Tensor) -> None:
    """Raise for logits, say."""
    slack = max(SLACK, 2 * torch.finfo(h.dtype).eps)
    if may_look(h) and holds_anywhere((h < -slack) | (h > 1 + slack), unknown=False):
        low, high = h.min().item(), h.max().item()
        raise ValueError(
            f"h: expected probabilities, such as a sigmoid gives, got numbers from {low:.3g} to {high:.3g}"
        )


def halting_distribution(h: Tensor, *, epsilon: float = 0.01) -> Halting:
    """Turn halting activations into halting probabilities.

    N = min{n' : sum_{n <= n'} h^n >= 1 - epsilon}, or n where that is never met;
    R = 1 - sum_{n < N} h^n; p^n = h^n for n < N, R for n = N, 0 after it.

    N is a constant to the gradient, R is linear in h. ``h``: ``[n, *batch]``. The sums run in
    order, in float32 or wider.
    """
    check_epsilon(epsilon)
    if h.dim() == 0 or len(h) == 0:
        raise ValueError(f"h: expected [n, *batch] with n >= 1, got shape {list(h.shape)}")
    if not h.is_floating_point():
        raise TypeError(f"h: expected floating-point probabilities, got {h.dtype}")
    check_probabilities(h)
    h = h.to(sum_dtype(h.dtype))

    # sums[n] = sum of h over the updates before update n + 1, one addition at a time. It starts with a 0 that
    # depends on h, so that R has a gradient (zeros) where every N is 1.
    sums = [0 * h[0]]
    for h_n in h:
        sums.append(sums[-1] + h_n)
    before = torch.stack(sums[:-1])

    n = torch.arange(1, len(h) + 1, device=h.device).view(-1, *[1] * (h.dim() - 1))
    # Update n is made where the sum before it is short of the threshold (NaN is not short of it).
    steps = torch.clamp((before < 1 - epsilon).sum(0), min=1)
    remainder = 1 - before.gather(0, steps.unsqueeze(0) - 1).squeeze(0)
    p = torch.where(n < steps, h, torch.where(n == steps, remainder, torch.zeros_like(h)))
    return Halting(p, steps, remainder)


def weigh(p: Tensor, value: Tensor) -> Tensor:
    """p^n times a tensor with the batch first, in the wider of the two types."""
    return p.view(*p.shape, *[1] * (value.dim() - p.dim())) * value


def mean_field(p: Tensor, values: Sequence[State]) -> State:
    """The mean sum_n p^n v^n of n states, leaf by leaf, in the type of the states.

    ``p``: ``[n, B]``; ``values``: n states with tensors ``[B, ...]``.
    """

    def mean(*leaves: Tensor) -> Tensor:
        total = weigh(p[0], leaves[0])
        for p_n, leaf in zip(p[1:], leaves[1:], strict=True):
            total = total + weigh(p_n, leaf)
        return total.to(leaves[-1].dtype)

    return tree_map(mean, values[0], *values[1:])
