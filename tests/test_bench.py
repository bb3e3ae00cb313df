"""The benchmark measures what it says: the updates asked for, equality first, one table."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from pondertime import bench
from pondertime.bench import cuda, floors, rates

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


def test_floors_by_hand() -> None:
    """An LSTM of 2 units, 3 inputs and 1 output: W_h 8 x 2, W_x 8 x 4, W_y 1 x 2; 5 rows, 2 steps of 3 updates."""
    w = bench.Workload("lstm", 2, 5, 2, 3, 3, 1)
    peak = floors.Peak({"float32": 100.0, "bfloat16": 1e9}, 1e3, on_chip=64)
    inference = floors.floor(w, 5, "float32", peak, train=False)
    assert inference == (30 * 16 + 10 * (32 + 2), 4 * (16 + 34) + 4 * 10 * (3 + 1))
    # Back: by the states, by W_h, by W_x, and twice the read-out; W_h once more, all gradients, a tape of 2 H + 4 H
    # numbers for each of 30 updates of a row, written and read.
    training = floors.floor(w, 5, "float32", peak, train=True)
    assert training.multiply_adds - inference.multiply_adds == 2 * 30 * 16 + 10 * 32 + 2 * 10 * 2
    assert training.bytes - inference.bytes == 4 * 16 + 4 * (16 + 34) + 2 * 4 * 30 * 12
    assert training.seconds(peak, "float32") == 2 * training.multiply_adds / 100
    assert training.seconds(peak, "bfloat16") == training.bytes / 1e3
    # Weights that do not fit are read at each of the six updates.
    small = peak._replace(on_chip=63)
    assert floors.floor(w, 5, "float32", small, train=False).bytes - inference.bytes == 4 * 5 * 16
    assert floors.peak_of("NVIDIA H200 NVL") == floors.PEAKS["H200"] and floors.peak_of("NVIDIA T4") is None


def test_the_busiest_multiprocessor() -> None:
    assert cuda.busiest([5, 1, 1, 1, 4], 2) == 7  # 5 | 1 1 1 4
    assert cuda.busiest([3], 2) == 3


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize("precision", cuda.EQUAL)
def test_the_rows_of_a_gpu(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU in its place, and nothing that only a GPU can tell."""
    pytest.importorskip("triton", reason="needs Triton")
    make, before = bench.contestants, torch.backends.cuda.matmul.allow_tf32

    def contestants(*args: Any, device: str, **options: Any) -> dict[str, Any]:
        assert torch.backends.cuda.matmul.allow_tf32 == (precision == "tf32")
        calls = make(*args, **options)
        return {"cuDNN" if name == "torch.nn" else name: call for name, call in calls.items()}

    monkeypatch.setattr(cuda, "EQUAL", {precision: 1.0})
    monkeypatch.setattr(cuda, "WORKLOADS", TINY)
    monkeypatch.setattr(cuda, "contestants", contestants)
    monkeypatch.setattr(cuda, "machine", lambda device: "NVIDIA H200")
    for name, value in {"check": 1e-6, "kernel_time": 0.5, "memory_of": 2**21}.items():
        monkeypatch.setattr(cuda, name, lambda *args, value=value: value)
    rows = cuda.run_in(precision, "lstm", 0.02, lambda text: None)
    assert {row["mode"] for row in rows} == {f"train, {precision}", f"inference, {precision}"}
    names = {row["contestant"] for row in rows}
    assert names - {"compact"} == {"fused", "fused, whole batch", "cuDNN", "products"}
    assert ("compact" in names) == (precision == "float32")
    inner = cuda.inside("lstm")
    assert [row["contestant"] for row in inner] == ["fused", "cuDNN", "floor", "fused", "cuDNN"] * 2
    assert {row["value"] for row in inner if row["unit"] == "MiB"} == {2.0}
    assert all(row.keys() == rows[0].keys() and row["ratio"] > 0 for row in rows + inner)
    assert torch.backends.cuda.matmul.allow_tf32 == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnAGpu:
    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        small = {"parity": TINY["rnn"], "addition": bench.Workload("lstm", 512, 4, 2, 2, 50, 66)}
        for module in (bench, cuda):
            monkeypatch.setattr(module, "WORKLOADS", small)
        monkeypatch.setattr(cuda, "TILES", 3)

    @pytest.mark.parametrize("precision", cuda.EQUAL)
    def test_a_table(self, precision: str) -> None:
        rows = cuda.run_in(precision, "parity", 0.02, lambda text: None)
        assert all(row["value"] >= 0 and precision in row["mode"] for row in rows)
        assert {row["contestant"] for row in rows} >= {"fused", "fused, whole batch", "cuDNN", "products"}

    def test_kernels_and_memory(self) -> None:
        rows = cuda.inside("parity")
        for what in ("kernels", "memory"):
            values = [row["value"] for row in rows if what in row["mode"] and row["contestant"] == "fused"]
            assert len(values) == 6 and min(values) > 0, what

    def test_a_curve(self) -> None:
        rows = cuda.curve(0.02)
        assert {row["unit"] for row in rows} == {"ms", "updates"} and all(row["value"] > 0 for row in rows)

    def test_networks_one_by_one_and_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        measured = cuda.rates.learner_rate
        monkeypatch.setattr(cuda.rates, "learner_rate", lambda *args: measured(*args, seconds=0.2, repeats=1))
        rows = cuda.stacked("addition")
        assert [row["mode"] for row in rows] == ["training, float32"] * 2 + ["training, bfloat16"] * 2
        assert all(row["value"] > 0 for row in rows) and [row["ratio"] for row in rows[::2]] == [1, 1]
