"""Reference and compact against the oracle, to 1e-12: every value and every gradient."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import oracle
import pondertime as pt
from compare import assert_same
from zoo import KINDS, differentiate, make, random_state, weighted


def oracle_gradients(
    kind: str, net: pt.ACT, x: Tensor, state: Any, lengths: list[int]
) -> tuple[oracle.Answer, dict[str, Tensor]]:
    """The oracle's answer, and its gradients under the names of ``zoo.differentiate``."""
    w = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    x = x.detach().clone().requires_grad_()
    state = tree_map(lambda leaf: leaf.detach().clone().requires_grad_(), state)
    answer = oracle.act(kind, w, x, state, lengths, epsilon=net.epsilon, max_steps=net.max_steps)
    states = tree_leaves(state)
    sources = [x, *states, *w.values()]
    grads = torch.autograd.grad(weighted(answer), sources, allow_unused=True, materialize_grads=True)
    return answer, dict(zip(["x", *(f"state{i}" for i in range(len(states))), *w], grads, strict=True))


def assert_equals_oracle(kind: str, net: pt.ACT, x: Tensor, state: Any, lengths: list[int]) -> Tensor:
    """Assert that values and gradients are the oracle's; returns N."""
    result, actual = differentiate(net, x, state, torch.tensor(lengths))
    answer, expected = oracle_gradients(kind, net, x, state, lengths)
    assert_same((result.output, result.state, *result.ponder), tuple(answer), torch.float64)
    assert_same(actual, expected, torch.float64)
    return result.ponder.steps


@pytest.mark.parametrize("lengths", [[4, 4, 4, 4, 4], [2, 4, 1, 3, 4]], ids=["whole", "ragged"])
@pytest.mark.parametrize("max_steps", [5, 100], ids=["M reached", "M not reached"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_oracle(kind: str, backend: str, max_steps: int, lengths: list[int]) -> None:
    net = make(kind, max_steps=max_steps, backend=backend)
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    steps = assert_equals_oracle(kind, net, x, random_state(kind, 5, 4), lengths)
    assert (steps.max() == max_steps) == (max_steps == 5)
    assert len(steps[steps > 0].unique()) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_starts_from_zeros(kind: str, backend: str) -> None:
    net = make(kind, backend=backend)
    x = torch.randn(3, 2, 3, dtype=torch.float64)
    zeros = tree_map(torch.zeros_like, random_state(kind, 2, 4))
    answer, _ = oracle_gradients(kind, net, x, zeros, [3, 3])
    result = net(x)
    assert_same((result.output, result.state, *result.ponder), tuple(answer))


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    T = draw(st.integers(1, 4))
    return {
        "kind": draw(st.sampled_from(KINDS)),
        "backend": draw(st.sampled_from(["reference", "compact"])),
        "sizes": [draw(st.integers(1, top)) for top in (4, 5, 3)],
        "T": T,
        "lengths": draw(st.lists(st.integers(1, T), min_size=1, max_size=4)),
        "epsilon": draw(st.floats(0.001, 0.9)),
        "max_steps": draw(st.integers(1, 7)),
        "halt_bias": draw(st.floats(-4, 6)),
        "seed": draw(st.integers(0, 2**31)),
    }


@given(problems())
def test_equals_oracle_anywhere(problem: dict[str, Any]) -> None:
    torch.manual_seed(problem["seed"])
    kind, lengths = problem["kind"], problem["lengths"]
    inputs, hidden, outputs = problem["sizes"]
    options = {name: problem[name] for name in ("epsilon", "max_steps", "halt_bias", "backend")}
    net = make(kind, inputs, hidden, outputs, **options)
    x = torch.randn(problem["T"], len(lengths), inputs, dtype=torch.float64)
    steps = assert_equals_oracle(kind, net, x, random_state(kind, len(lengths), hidden), lengths)
    assert steps.max() <= problem["max_steps"]
