"""The benchmark measures what it says: the updates asked for, equality first, one table."""

import csv
from pathlib import Path

import pytest
import torch

from pondertime import bench
from pondertime.bench import rates

TINY = {
    "rnn": bench.Workload("rnn", 8, 9, 1, 3, 4, 1),
    "lstm": bench.Workload("lstm", 8, 5, 2, 2, 4, 3),
}


@pytest.mark.parametrize("name", TINY)
def test_every_row_ponders_as_asked(name: str) -> None:
    w = TINY[name]
    N = bench.ragged(w)
    assert N.mean() <= w.updates and N.max() == 2 * w.updates - 1
    steps = bench.network(w)(bench.inputs(w, N)).ponder.steps
    assert torch.equal(steps, N.long().expand(w.steps, -1))


@pytest.mark.parametrize("name", TINY)
def test_a_table(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WORKLOADS", TINY)
    rows = bench.run(name, 0.02, lambda text: None)
    assert {row["contestant"] for row in rows} >= set(bench.CONTESTANTS)
    assert all(row["value"] > 0 for row in rows)
    assert {row["ratio"] for row in rows if row["contestant"] == "torch.nn"} == {1.0}
    for _ in range(2):
        bench.append(rows, tmp_path / "deep" / "data.csv")
    with open(tmp_path / "deep" / "data.csv") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 2 * len(rows) and tuple(table[0]) == bench.COLUMNS


def test_networks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TOGETHER", 2)
    one, both = bench.together(0.02)
    assert (one["contestant"], one["ratio"], both["contestant"]) == ("one by one", 1.0, "at once")


def test_no_speed_without_equality(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WORKLOADS", TINY)
    monkeypatch.setattr(bench, "inputs", lambda w, N: torch.zeros(w.steps, len(N), w.input_size))
    with pytest.raises(RuntimeError, match="no speed is reported"):
        bench.run("lstm", 0.02, lambda text: None)


def test_how_busy_a_grid_keeps_a_device() -> None:
    """Three costs, of which two are between and beyond what was measured."""
    kernel = {2: 4 / 1.0, 10: 4 / 5.0, 40: 4 / 35.0}  # updates a second of four programs: 1, 5 and 35 seconds an update
    cost = rates.cost_of({n: {"cells": n, "kernel": per_second} for n, per_second in kernel.items()}, 4)
    assert [cost(n) for n in (1, 2, 6, 25, 70)] == pytest.approx([0.5, 1, 3, 20, 65])
    assert rates.busy({"each": [(10, 2.0), (1, 25.0)], "seconds": 15.0}, cost, 4) == pytest.approx(0.5)
