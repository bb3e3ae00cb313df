"""E networks at once against each of them alone: values, gradients, training."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pondertime as pt
from compare import assert_same
from pondertime.ensemble import Ensemble
from zoo import make, weighted

E, T, B, INPUTS = 4, 5, 3, 3


def networks(kind: str, **options: Any) -> list[pt.ACT]:
    return [make(kind, INPUTS, 7, **options) for _ in range(E)]


def alone(net: pt.ACT, x: Tensor, lengths: Tensor | None, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """One network by the reference: its N, and the gradients of a loss of all that it returns."""
    net.backend = "reference"
    output, _, ponder = net(x, lengths=lengths)
    loss = weighted((output, ponder.remainder, ponder.cost), seed)
    grads = torch.autograd.grad(loss, list(net.parameters()))
    return ponder.steps, dict(zip(dict(net.named_parameters()), grads, strict=True))


@pytest.mark.parametrize("plain", [False, True], ids=["C", "calls"])
@pytest.mark.parametrize("ragged", [False, True], ids=["whole", "ragged"])
@pytest.mark.parametrize("kind", ["rnn_tanh", "rnn_relu", "gru", "lstm"])
def test_each_network_is_itself(kind: str, ragged: bool, plain: bool) -> None:
    nets = networks(kind, max_steps=9)
    together = Ensemble(nets, plain=plain)
    x = torch.randn(T, E, B, INPUTS, dtype=torch.float64)
    lengths = torch.randint(1, T + 1, (E, B)) if ragged else None
    output, ponder = together(x, lengths)
    loss = torch.zeros((), dtype=torch.float64)
    for e in range(E):
        loss = loss + weighted((output[:, e], ponder.remainder[:, e], ponder.cost[e]), e)
    loss.backward()
    for e, net in enumerate(nets):
        steps, expected = alone(net, x[:, e], None if lengths is None else lengths[e], e)
        assert_same(ponder.steps[:, e], steps)
        grads: dict[str, Any] = {k: together.weights(k).grad for k in expected}
        assert_same({k: g[e] for k, g in grads.items()}, expected, torch.float64)
        assert_same(together.member(e).state_dict(), net.state_dict(), torch.float64)
    assert len(ponder.steps.unique()) > 2


def test_refuses_what_it_cannot_stack() -> None:
    with pytest.raises(ValueError, match="same shape"):
        Ensemble([make("gru", 3, 4), make("gru", 3, 5)])
    with pytest.raises(ValueError, match="halt by the same rules"):
        Ensemble([make("gru", 3, 4), make("gru", 3, 4, force_steps=1)])
    with pytest.raises(ValueError, match="cannot be stacked: it knows"):
        Ensemble([make("memory")])


def test_integers() -> None:
    nets = [pt.ACT(nn.LSTMCell(6, 4), 2, halt_bias=-1.0) for _ in range(2)]
    x = torch.randint(0, 5, (3, 2, 4))
    output, _ = Ensemble(nets)(x)
    for e, net in enumerate(nets):
        assert_same(output[:, e], net(x[:, e]).output)
