"""One thread a worker, a fixed seed a test, and hypothesis that draws the same examples every time."""

from pathlib import Path

import pytest
import torch
from hypothesis import settings

from pondertime.sweep import Places

settings.register_profile("pondertime", deadline=None, derandomize=True, max_examples=40, database=None)
settings.load_profile("pondertime")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """Where a sweep reads and writes; its networks are measured on few sequences."""
    monkeypatch.setattr("pondertime.evaluate.SEQUENCES", 200)
    return Places(tmp_path / "runs", tmp_path / "results")


@pytest.fixture(params=["reference", "compact"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param
