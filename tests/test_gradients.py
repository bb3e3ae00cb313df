"""Derivatives: by finite differences, by the paper's last equations, and of each result by itself."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

import pondertime as pt
from compare import assert_same
from zoo import KINDS, differentiate, make, random_state


def as_function(net: pt.ACT, x: Tensor, lengths: list[int]) -> tuple[Any, list[Tensor]]:
    """A network as a function of tensors to tensors, and its arguments: the input and all parameters."""
    names = [name for name, _ in net.named_parameters()]

    def run(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        result = functional_call(net, dict(zip(names, parameters, strict=True)), (x, None, lengths))
        return result.output, *tree_leaves(result.state), result.ponder.remainder, result.ponder.cost

    arguments = [x, *net.parameters()]
    return run, [a.detach().clone().requires_grad_() for a in arguments]


@pytest.mark.parametrize("kind", ["rnn_tanh", "gru", "lstm", "memory"])
def test_gradcheck(kind: str, backend: str) -> None:
    net = make(kind, 2, 3, 2, max_steps=4, backend=backend)
    run, arguments = as_function(net, torch.randn(2, 3, 2, dtype=torch.float64), [2, 1, 2])
    assert torch.autograd.gradcheck(run, arguments, fast_mode=True)


@pytest.mark.parametrize("kind", ["rnn_tanh", "gru", "lstm"])
def test_double_backward(kind: str) -> None:
    net = make(kind, 2, 2, 1, max_steps=3, backend="reference")
    run, arguments = as_function(net, torch.randn(2, 2, 2, dtype=torch.float64), [2, 1])
    assert torch.autograd.gradgradcheck(run, arguments, fast_mode=True)


@pytest.mark.parametrize("compact", [False, True])
def test_the_closed_form_of_the_paper(compact: bool) -> None:
    """d/dh^n of (loss + tau * cost) is G_y (y^n - y^N) + G_s (s^n - s^N) - tau for n < N, 0 for n = N."""
    M, B, tau = 6, 5, 0.3
    h = (0.6 * torch.rand(M, B, dtype=torch.float64)).requires_grad_()
    s, y = torch.randn(M, B, 3, dtype=torch.float64), torch.randn(M, B, 2, dtype=torch.float64)
    G_s, G_y = torch.randn(B, 3, dtype=torch.float64), torch.randn(B, 2, dtype=torch.float64)
    calls = []

    def step(rows: Tensor, state: Tensor, first: bool) -> tuple[Tensor, Tensor, Tensor]:
        assert first == (not calls)
        calls.append(len(rows))
        n = len(calls) - 1
        return s[n, rows], y[n, rows], h[n, rows]

    state, output, ponder = pt.ponder(step, torch.arange(B), torch.zeros(B, 3).double(), max_steps=M, compact=compact)
    loss = (G_s * state).sum() + (G_y * output).sum() + tau * ponder.cost.sum()
    (gradient,) = torch.autograd.grad(loss, h)

    expected = torch.zeros(M, B, dtype=torch.float64)
    for b in range(B):
        N = int(ponder.steps[b])
        for n in range(N - 1):
            through_mean = G_y[b] @ (y[n, b] - y[N - 1, b]) + G_s[b] @ (s[n, b] - s[N - 1, b])
            expected[n, b] = through_mean - tau
    assert len(ponder.steps.unique()) > 1
    assert_same(gradient, expected)


@pytest.mark.parametrize("part", ["remainder", "rho", "cost"])
def test_each_part_of_ponder_is_differentiable_alone(part: str, backend: str) -> None:
    """In one input step the halting bias moves R by -sum_{n<N} h^n (1 - h^n), and N not at all."""
    net = make("lstm", backend=backend)
    x = torch.randn(1, 4, 3, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(getattr(net(x).ponder, part).sum(), net.halt.bias)
    h, p = (a[:, 0] for a in net.trace(x)[3:5])
    before = (h > 0) & (h == p)
    assert before.any()
    assert_same(gradient, -(h * (1 - h))[before].sum().reshape(1))


@pytest.mark.parametrize("part", ["remainder", "rho", "cost", "output"])
@pytest.mark.parametrize(
    "options", [{"halt_bias": 50.0}, {"max_steps": 1}, {"force_steps": 1}, {"force_steps": 3}], ids=str
)
def test_halt_gets_zeros_where_nothing_depends_on_it(options: dict[str, Any], part: str, backend: str) -> None:
    net = make("gru", backend=backend, **options)
    result = net(torch.randn(3, 2, 3, dtype=torch.float64), None, [3, 2])
    value = result.output if part == "output" else getattr(result.ponder, part)
    value.sum().backward()
    assert net.halt.weight.grad is not None and net.halt.bias.grad is not None
    assert not net.halt.weight.grad.any() and not net.halt.bias.grad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_constant(kind: str, backend: str) -> None:
    result, _ = differentiate(
        make(kind, backend=backend), torch.randn(2, 2, 3, dtype=torch.float64), random_state(kind, 2, 4)
    )
    assert result.ponder.steps.dtype == torch.int64 and not result.ponder.steps.requires_grad
    assert_same(result.ponder.rho, result.ponder.steps + result.ponder.remainder)
    assert_same(result.ponder.cost, result.ponder.rho.sum(0))
