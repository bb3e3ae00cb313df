"""The one way in which tests compare numbers, and the one table of tolerances."""

from typing import Any

import torch
from torch import Tensor

# The largest difference, as a share of the largest number in the expected tensor (of 1 where that is smaller).
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def assert_same(actual: Any, expected: Any, dtype: torch.dtype | None = None, where: str = "") -> None:
    """Assert that two trees have the same structure, shapes and, to the tolerance of ``dtype``, numbers.

    ``dtype``: None for the narrowest of the two tensors compared. Integers must be equal.
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


def assert_same_tensor(actual: Tensor, expected: Tensor, dtype: torch.dtype | None, where: str) -> None:
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
