"""Halted rows drop out: counted by the cell itself, with the numbers of the whole batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pondertime as pt
from compare import assert_same
from zoo import BatchNormCell, differentiate, gradients, make, random_state


class Counter(nn.Module):
    """A cell that counts the rows it receives; a row's first feature decides whether it halts at once.

    The state's first unit says how often the row has been updated in this input step: rows of type 1 halt
    at update 1, the others at update 10.
    """

    def __init__(self) -> None:
        super().__init__()
        self.input_size = 3
        self.mix = nn.Linear(3 + 2, 2)
        self.rows: list[int] = []

    def forward(self, x: Tensor, state: Tensor | None) -> Tensor:
        self.rows.append(len(x))
        state = x.new_zeros(len(x), 3) if state is None else state
        hidden = torch.tanh(self.mix(torch.cat([x, state[:, 1:]], 1)))
        first = x[:, -1] == 1
        count = torch.where(first, 1, state[:, 0] + 1)
        halt = torch.where(x[:, 0] == 1, 1.0, (count == 10).to(x.dtype))
        return torch.cat([torch.stack([count - halt * 100], 1), hidden], 1)


def halting_net(compact: bool) -> Any:
    """h is 1 where the first unit is below -50, else 0 (to 1e-20)."""
    net = pt.ACT(Counter(), 2, compact=compact, dtype=torch.float64)
    with torch.no_grad():
        net.halt.weight.copy_(torch.tensor([[-10.0, 0.0, 0.0]]))
        net.halt.bias.fill_(-100.0)
    return net


@pytest.mark.parametrize("training", [True, False])
def test_half_at_1_and_half_at_10_is_5_and_a_half(training: bool) -> None:
    T, B = 4, 8
    x = torch.randn(T, B, 2, dtype=torch.float64)
    x[..., 0] = torch.stack([torch.randperm(B) % 2 for _ in range(T)])
    nets = [halting_net(compact) for compact in (True, False)]
    nets[1].load_state_dict(nets[0].state_dict())
    with torch.set_grad_enabled(training):
        results = [net(x) for net in nets]
    assert_same(results[0].ponder.steps, torch.where(x[..., 0] == 1, 1, 10))
    assert_same(results[0], results[1])
    dropping, whole = (net.cell.rows for net in nets)
    assert dropping == [B, *[B // 2] * 9] * T
    assert whole == [B] * 10 * T
    assert sum(dropping) / sum(whole) == 5.5 / 10
    if training:
        assert_same(gradients(nets[0], results[0]), gradients(nets[1], results[1]))


@pytest.mark.parametrize("kind", ["rnn_tanh", "gru", "lstm", "memory"])
def test_equals_reference_on_a_large_ragged_batch(kind: str) -> None:
    T, B = 12, 17
    x, state = torch.randn(T, B, 3, dtype=torch.float64), random_state(kind, B, 4)
    lengths = torch.randint(1, T + 1, (B,))
    net = make(kind, backend="compact", max_steps=8)
    compact = differentiate(net, x, state, lengths)
    net.backend = "reference"
    assert_same(compact, differentiate(net, x, state, lengths))


def test_a_batch_that_is_kept_whole() -> None:
    """Batch norm over all rows at every update: one input step written out, statistics included."""
    cell = BatchNormCell(3, 4).double()
    net = pt.ACT(cell, None, compact=False, max_steps=3)
    x = torch.randn(1, 6, 2, dtype=torch.float64)
    counts: list[int] = []
    handle = cell.register_forward_pre_hook(lambda module, args: counts.append(len(args[0])))
    steps = net(x).ponder.steps[0]
    handle.remove()
    assert counts == [6] * int(steps.max()) and cell.norm.num_batches_tracked == steps.max()

    copy: Any = BatchNormCell(3, 4).double()
    copy.load_state_dict(cell.state_dict())
    copy.norm.reset_running_stats()
    forced = pt.ACT(copy, None, compact=False, force_steps=2)
    first = cell(torch.cat([x[0], torch.ones(6, 1).double()], 1), None)
    second = cell(torch.cat([x[0], torch.zeros(6, 1).double()], 1), first)
    assert_same(forced(x).output[0], second)


def test_the_two_ways_of_asking_agree() -> None:
    with pytest.raises(ValueError, match=r"backend 'compact' drops halted rows, but compact=False"):
        make("gru", compact=False, backend="compact")
