"""The halting distribution against numbers worked out by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import pondertime as pt
from compare import assert_same


def column(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("h", "epsilon", "p", "steps", "remainder"),
    [
        ([0.5, 0.3, 0.4, 0.9], 0.01, [0.5, 0.3, 0.2, 0], 3, 0.2),
        ([0.1, 0.2, 0.3], 0.01, [0.1, 0.2, 0.7], 3, 0.7),  # the threshold is never met: N = n
        ([0.99, 0.5], 0.01, [1, 0], 1, 1),
        ([0.98, 0.5], 0.01, [0.98, 0.02], 2, 0.02),
        ([0.5, 0.25, 0.25, 0.5], 0.25, [0.5, 0.5, 0, 0], 2, 0.5),  # met exactly
        ([0.0, 0.0, 1.0], 0.5, [0, 0, 1], 3, 1),
        ([0.2], 0.01, [1], 1, 1),
    ],
)
def test_by_hand(h: list[float], epsilon: float, p: list[float], steps: int, remainder: float) -> None:
    halting = pt.halting_distribution(column(*h), epsilon=epsilon)
    assert_same(halting, (column(*p), torch.tensor(steps), column(remainder)[0]))


def test_columns_are_independent_and_keep_their_layout() -> None:
    h = torch.tensor([[[0.5, 0.995], [0.1, 0.4]], [[0.6, 0.3], [0.2, 0.7]]], dtype=torch.float64)
    halting = pt.halting_distribution(h)
    assert_same(halting.steps, torch.tensor([[2, 1], [2, 2]]))
    assert_same(halting.p, torch.tensor([[[0.5, 1], [0.1, 0.4]], [[0.5, 0], [0.9, 0.6]]], dtype=torch.float64))


@given(
    st.lists(st.floats(0, 1, exclude_min=True), min_size=1, max_size=12),
    st.floats(0.001, 0.999),
)
def test_it_is_a_distribution(h: list[float], epsilon: float) -> None:
    p, steps, remainder = pt.halting_distribution(column(*h), epsilon=epsilon)
    N = int(steps)
    assert_same(p.sum(), column(1)[0])
    assert (p >= 0).all() and (p[N:] == 0).all() and 1 <= N <= len(h)
    assert len(h) == N or sum(h[:N]) >= 1 - epsilon
    assert sum(h[: N - 1]) < 1 - epsilon
    assert_same(p[N - 1], remainder)


def test_narrow_types_are_summed_in_float32() -> None:
    # 0.99 is 0.98828 in bfloat16: below the threshold in float32, at it where the threshold is rounded as well.
    p, steps, remainder = pt.halting_distribution(column(0.99, 1, dtype=torch.bfloat16))
    assert p.dtype == remainder.dtype == torch.float32
    assert_same(steps, torch.tensor(2))
    # 300 times 1/512 is lost in a bfloat16 sum, whose numbers near 1/2 are 1/256 apart.
    h = torch.full((600,), 1 / 512, dtype=torch.bfloat16)
    assert_same(pt.halting_distribution(h).steps, torch.tensor(507))


def test_the_threshold_has_the_type_of_the_sums() -> None:
    # float32(0.99) is a little more than 0.99 and float32(0.7) a little less than 0.7: both meet their threshold.
    assert_same(pt.halting_distribution(column(0.99, 0.5, dtype=torch.float32)).steps, torch.tensor(1))
    steps = pt.halting_distribution(column(0.7, 0.5, dtype=torch.float32), epsilon=0.3).steps
    assert_same(steps, torch.tensor(1))


def test_the_remainder_is_linear_and_ends_before_the_last_update() -> None:
    h = torch.tensor([[0.5, 0.1, 0.995], [0.3, 0.1, 0.5], [0.4, 0.1, 0.5], [0.9, 0.1, 0.5]], dtype=torch.float64)
    h.requires_grad_()
    remainder = pt.halting_distribution(h).remainder
    (gradient,) = torch.autograd.grad(remainder.sum(), h, create_graph=True)
    # N = 3, N = n = 4, N = 1.
    assert_same(gradient, torch.tensor([[-1, -1, 0], [-1, -1, 0], [0, -1, 0], [0, 0, 0]], dtype=torch.float64))


@pytest.mark.parametrize("epsilon", [0.0, 1.0, -0.1, 2.0, float("nan")])
def test_epsilon_is_checked(epsilon: float) -> None:
    with pytest.raises(ValueError, match=rf"epsilon: expected a number between 0 and 1, got {epsilon}"):
        pt.halting_distribution(column(0.5), epsilon=epsilon)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3)])
def test_shapes_are_checked(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"h: expected \[n, \*batch\] with n >= 1, got shape"):
        pt.halting_distribution(torch.zeros(shape))


def test_types_are_checked() -> None:
    with pytest.raises(TypeError, match=r"h: expected floating-point probabilities, got torch.int64"):
        pt.halting_distribution(torch.ones(3, dtype=torch.int64))
