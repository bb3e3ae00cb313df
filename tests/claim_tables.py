"""Result tables made by hand, network by network, and what a claim should say of them."""

import math
from pathlib import Path
from typing import Any

import pytest

from fake_results import make_row
from pondertime import results
from pondertime.claims import Evidence, Finding
from pondertime.claims.evidence import load
from pondertime.results import Curve, Entry, Point, Row


class Table:
    """Result tables that grow network by network."""

    def __init__(self, folder: Path, task: str) -> None:
        self.folder, self.task = folder, task

    def add(self, tau: float | None, seed: int, **changes: Any) -> Row:
        parts = {k: changes.pop(k, ()) for k in ("points", "traces", "classes", "boundaries")}
        curve = changes.pop("curve", None)
        changes = {"workers": 1, "steps": 1.0 if tau is None else 2.0, "error": 0.1, "target_error": 0.05} | changes
        row = make_row(self.task, tau, seed, **changes)
        results.add_rows(self.folder, self.task, [Entry(row, curve, **parts)])
        return row

    def errors(self, numbers: dict[float | None, list[float]], **changes: Any) -> None:
        for tau, errors in numbers.items():
            for seed, error in enumerate(errors):
                self.add(tau, seed, error=error, **changes)

    def load(self) -> Evidence:
        return load(self.folder, self.task)


def of(task: str) -> Any:
    return pytest.mark.parametrize("table", [task], indirect=True)


def found(finding: Finding | None, holds: bool | None, *words: str) -> None:
    assert finding is not None
    assert finding.holds is holds, finding.ours
    for word in words:
        assert word in finding.ours, finding.ours


def points(steps: dict[int, float], errors: dict[int, float] | None = None) -> list[Point]:
    return [Point(k, 1000, (errors or {}).get(k, 0.0), 0.0, n, n + 0.5) for k, n in steps.items()]


def curve(*pairs: tuple[int, float], quantity: str = "error") -> Curve:
    updates, values = zip(*pairs, strict=True)
    arrays = {name: [math.nan] * len(pairs) for name in ("error", "target_error", "bpc", "steps")}
    return Curve(**{"updates": updates, **arrays, quantity: values})  # type: ignore[arg-type]
