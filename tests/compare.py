"""The one way in which tests compare numbers, and the one table of tolerances."""

from typing import Any

import torch
from torch import Tensor

# A type, or the name of a row for what no type says.
Precision = torch.dtype | str

# The largest difference, as a share of the largest number in the expected tensor (of 1 where that is smaller).
TOLERANCE: dict[Precision, float] = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    # Cut to 10 bits after the point a factor loses up to 2^-10, two of them 2e-3, and all in the same direction.
    "tf32": 5e-3,
    torch.bfloat16: 2e-2,
    # Made of rounded derivatives and of rounded states.
    "bfloat16 gradients": 4e-2,
    # Losses summed over the rows of a batch, where the roundings of tf32 and bfloat16 cancel.
    "sums": 1e-3,
    # Trained weights, in learning rates: the first step of Adam, which is the sign of the gradient; and the mean
    # difference after a few, as signs change where a gradient is smaller than its error.
    "step": 1e-2,
    "float32 weights": 5e-5,
    "tf32 weights": 2e-2,
    "bfloat16 weights": 1e-1,
}


def assert_same(actual: Any, expected: Any, dtype: Precision | None = None, where: str = "") -> None:
    """Assert that two trees have the same structure, shapes and, to the tolerance of ``dtype``, numbers.

    ``dtype``: a row of the table, None for the narrowest of the two tensors compared. Integers must be equal.
    """
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), f"{where}: expected a tensor, got {type(actual).__name__}"
        assert_same_tensor(actual, expected, dtype, where)
    elif isinstance(expected, dict):
        assert isinstance(actual, dict) and actual.keys() == expected.keys(), f"{where}: {actual} != {expected}"
        for key in expected:
            assert_same(actual[key], expected[key], dtype, f"{where}.{key}")
    elif isinstance(expected, (tuple, list)):
        assert isinstance(actual, (tuple, list)) and len(actual) == len(expected), f"{where}: {actual} != {expected}"
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_same(a, e, dtype, f"{where}[{i}]")
    else:
        assert actual == expected, f"{where}: {actual} != {expected}"


def assert_same_tensor(actual: Tensor, expected: Tensor, dtype: Precision | None, where: str) -> None:
    assert actual.shape == expected.shape, f"{where}: shape {list(actual.shape)} != {list(expected.shape)}"
    assert actual.is_floating_point() == expected.is_floating_point(), f"{where}: {actual.dtype}, {expected.dtype}"
    if not expected.is_floating_point():
        assert torch.equal(actual.long(), expected.long()), f"{where}: {actual.tolist()} != {expected.tolist()}"
        return
    narrowest = max((actual.dtype, expected.dtype), key=lambda d: torch.finfo(d).eps)
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.isfinite().all() and expected.isfinite().all(), f"{where}: {actual} != {expected}"
    if expected.numel() == 0:
        return
    difference = float((actual - expected).abs().max())
    bound = TOLERANCE[dtype or narrowest] * max(1.0, float(expected.abs().max()))
    assert difference <= bound, f"{where}: differs by {difference:.2e}, more than {bound:.2e}"
