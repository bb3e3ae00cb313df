"""Every layout gives the numbers of each sequence run alone, and padding is never looked at."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves, tree_map

import pondertime as pt
from compare import assert_same
from zoo import KINDS, differentiate, gradients, make, random_state, weighted

T, B, FEATURES = 5, 4, 3
LENGTHS = [2, 5, 1, 4]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def one_by_one(net: pt.ACT, x: Tensor, state: Any, lengths: list[int]) -> Any:
    """Each sequence run alone, unpadded, then put together with zeros after it."""
    alone = [
        net(x[:length, b : b + 1], tree_map(lambda a: a[b : b + 1], state))  # noqa: B023
        for b, length in enumerate(lengths)
    ]

    def padded(parts: list[Tensor]) -> Tensor:
        return torch.cat([torch.cat([a, a.new_zeros(len(x) - len(a), *a.shape[1:])]) for a in parts], 1)

    output = padded([result.output for result in alone])
    states = tree_map(lambda *a: torch.cat(a), *(result.state for result in alone))
    steps, remainder, rho = (padded([result.ponder[i] for result in alone]) for i in range(3))
    return output, states, (steps, remainder, rho, torch.cat([result.ponder.cost for result in alone]))


@pytest.mark.parametrize("kind", KINDS)
def test_lengths(kind: str, backend: str) -> None:
    net = make(kind, backend=backend)
    x, state = randn(T + 1, B, FEATURES), random_state(kind, B, 4)
    given: Any
    for given in (LENGTHS, torch.tensor(LENGTHS), torch.tensor(LENGTHS, dtype=torch.int32)):
        assert_same(tuple(net(x, state, given)), one_by_one(net, x, state, LENGTHS))
    assert_same(tuple(net(x, state, [T + 1] * B)), tuple(net(x, state)))


@pytest.mark.parametrize("kind", ["lstm", "memory"])
def test_batch_first(kind: str, backend: str) -> None:
    net, first = make(kind, backend=backend), make(kind, backend=backend, batch_first=True)
    first.load_state_dict(net.state_dict())
    x, state = randn(T, B, FEATURES), random_state(kind, B, 4)
    output, last, (*per_step, cost) = net(x, state, LENGTHS)
    expected = output.transpose(0, 1), last, (*(a.transpose(0, 1) for a in per_step), cost)
    assert_same(tuple(first(x.transpose(0, 1), state, LENGTHS)), expected)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_unbatched(kind: str, backend: str, batch_first: bool) -> None:
    net = make(kind, backend=backend)
    x, state = randn(T, 1, FEATURES), random_state(kind, 1, 4)
    for given in (None, state):
        output, last, (*per_step, cost) = net(x, given)
        expected = output[:, 0], tree_map(lambda a: a[0], last), (*(a[:, 0] for a in per_step), cost[0])
        net.batch_first = batch_first
        alone = net(x[:, 0], None if given is None else tree_map(lambda a: a[0], given))
        net.batch_first = False
        assert_same(tuple(alone), expected)


def test_integers_are_one_hot(backend: str) -> None:
    net = make("gru", backend=backend)
    x = torch.randint(FEATURES, (T, B))
    hot = F.one_hot(x, FEATURES).double()
    expected = tuple(net(hot, None, LENGTHS))
    for integers in (x, x.to(torch.uint8), x.to(torch.int32)):
        assert_same(tuple(net(integers, None, LENGTHS)), expected)
    assert_same(tuple(net(x[:, 0])), tuple(net(hot[:, 0])))
    packed = pack_padded_sequence(x, torch.tensor(LENGTHS), enforce_sorted=False)
    assert_same(pad_packed_sequence(net(packed).output)[0], expected[0])


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("lengths", [[5, 4, 2, 1], [2, 5, 1, 4], [3, 3, 3, 3]], ids=["sorted", "unsorted", "equal"])
def test_packed(lengths: list[int], backend: str, batch_first: bool) -> None:
    net = make("lstm", backend=backend)
    x, state = randn(max(lengths), B, FEATURES), random_state("lstm", B, 4)
    expected = one_by_one(net, x, state, lengths)
    is_sorted = lengths == sorted(lengths, reverse=True)
    packed = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=is_sorted)
    net.batch_first = batch_first
    output, last, (*per_step, cost) = net(packed, state)
    assert isinstance(output, PackedSequence)
    assert_same(tuple(output[1:]), tuple(packed[1:]))
    assert (output.sorted_indices is None) == is_sorted
    per_step = [a.transpose(0, 1) if batch_first else a for a in per_step]
    assert_same((pad_packed_sequence(output)[0], last, (*per_step, cost)), expected)


def test_packed_gradients_are_those_of_the_sequences(backend: str) -> None:
    net = make("gru", backend=backend)
    sequences = [randn(length, FEATURES).requires_grad_() for length in LENGTHS]
    packed = net(pack_sequence(sequences, enforce_sorted=False)).output
    actual = torch.autograd.grad(weighted(split(packed)), sequences)
    alone = weighted([net(a).output for a in sequences])
    assert_same(actual, torch.autograd.grad(alone, sequences))


def split(packed: PackedSequence) -> list[Tensor]:
    padded, lengths = pad_packed_sequence(packed)
    return [padded[: int(length), b] for b, length in enumerate(lengths)]


@pytest.mark.parametrize("kind", ["rnn_relu", "lstm", "memory"])
def test_nan_in_padding_is_harmless(kind: str, backend: str) -> None:
    net = make(kind, backend=backend)
    x, state = randn(T, B, FEATURES), random_state(kind, B, 4)
    padding = torch.arange(T).unsqueeze(1) >= torch.tensor(LENGTHS)
    spoilt = x.masked_fill(padding.unsqueeze(-1), float("nan"))
    actual, expected = (differentiate(net, a, state, LENGTHS) for a in (spoilt, x))
    assert_same(actual, expected)
    assert not actual[1]["x"][padding].any()
    result = actual[0]
    assert not any(a[padding].any() for a in (result.output, *result.ponder[:3]))
    trace = net.trace(spoilt, state, LENGTHS)
    assert not any(a[:, padding].any() for a in (trace.h, trace.p, trace.visible))


def test_garbage_integers_in_padding_are_harmless(backend: str) -> None:
    net = make("lstm", backend=backend)
    x = torch.randint(FEATURES, (T, B))
    padding = torch.arange(T).unsqueeze(1) >= torch.tensor(LENGTHS)
    results = [net(a, None, LENGTHS) for a in (x.masked_fill(padding, -100), x)]
    assert_same(results[0], results[1])
    assert_same(gradients(net, results[0]), gradients(net, results[1]))


class Watch(nn.Module):
    """A cell that keeps the first feature of every row it was given."""

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.input_size, self.cell = input_size, nn.GRUCell(input_size, 4)
        self.given: list[float] = []

    def forward(self, x: Tensor, state: Tensor | None) -> Tensor:
        self.given += x[:, 0].tolist()
        return self.cell(x, state)


def test_the_cell_never_receives_padding(backend: str) -> None:
    cell = Watch(2)
    net = pt.ACT(cell, 1, force_steps=2, backend=backend)
    x = torch.arange(float(T * B)).reshape(T, B, 1)
    net(x, None, LENGTHS)
    real = sorted(float(x[t, b, 0]) for b, length in enumerate(LENGTHS) for t in range(length))
    assert sorted(cell.given) == sorted(real * 2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_is_each_rows_own_at_its_last_step(kind: str, backend: str) -> None:
    net = make(kind, backend=backend)
    x, state = randn(T, B, FEATURES), random_state(kind, B, 4)
    last = net(x, state, LENGTHS).state
    for b, length in enumerate(LENGTHS):
        at_its_end = net(x[:length], state).state
        assert_same([a[b] for a in tree_leaves(last)], [a[b] for a in tree_leaves(at_its_end)])
