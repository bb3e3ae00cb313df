"""Networks that train at once inside a kernel, each against itself trained alone by the reference.

On a GPU in the precisions offered; through Triton's interpreter, in a process of its own, in float32.
"""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pondertime.train as training
from ensemble_alone import compare_members, on_gpu
from pondertime.config import OutOfTime, TrainConfig, make_config
from pondertime.ensemble.gpu import AHEAD, PACKING, GpuGroup, eagerness, multiprocessors, why_not_gpu_group
from pondertime.ensemble.gpu_learner import GpuLearner
from pondertime.runs import RunFolder, make_task
from pondertime.tasks.logic import Logic
from pondertime.train import make_learner, train
from small_runs import metrics, result, weights

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
on_device = [] if INTERPRETED else on_gpu


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' scratch memory is full of NaN, so that a number left unwritten shows."""
    begin = GpuGroup.__init__

    def made(group: GpuGroup, *args: Any, **options: Any) -> None:
        begin(group, *args, **options)
        for scratch in group.kernel.scratch:
            scratch.fill_(float("nan"))

    monkeypatch.setattr(GpuGroup, "__init__", made)


def configs(task: str, **options: Any) -> list[TrainConfig]:
    """Networks that differ in tau, clipping and rate, which falls for one, and one without halting."""
    shared: dict[str, Any] = {"iterations": 100, "log_every": 2, "halt_bias": -1.0, **options}
    return [
        make_config(task, tau=0.01, seed=0, learning_rate=1e-3, clip=0.1, **shared),
        replace(make_config(task, tau=0.0003, seed=1, learning_rate=2e-3, cooldown=1.0, **shared), iterations=10),
        make_config(task, force_steps=3, seed=9, learning_rate=1e-3, **shared),
    ]


def assert_same_networks(folder: RunFolder, expected: RunFolder) -> None:
    """Two runs of several networks ended with the same weights, bit for bit, and the same lines of each network."""
    assert weights(folder) == weights(expected)
    lines = [sorted(metrics(f), key=lambda line: (line["member"], line["iterations"])) for f in (folder, expected)]
    assert lines[0] == lines[1]
    for member, known in zip(result(folder)["members"], result(expected)["members"], strict=True):
        assert member == pytest.approx(known)


def test_networks_with_a_small_tau_go_ahead() -> None:
    eager = eagerness([0.1, None, 0.001, 0.1])
    assert eager == pytest.approx([AHEAD**0.5, 1, AHEAD, AHEAD**0.5]) and eagerness([0.1, 0.1]) == [1, 1]
    group: Any = SimpleNamespace(eagerness=eager, cost=[6.0] * 4, quantum=100, per_chunk=1000, programs=2)
    shares = GpuGroup._budgets(group, {0: 1000.0, 1: 1000.0, 2: 1000.0, 3: 1000.0})
    # The first gets a whole program, the others what is left, a little less than fits.
    assert shares[2] == 100 and shares[0] == shares[3] == pytest.approx(AHEAD**0.5 * shares[1])
    assert sum(shares.values()) == pytest.approx(100 + 100 * PACKING)
    # Nobody gets more than it has to do.
    assert GpuGroup._budgets(group, {1: 1000.0, 2: 5.0}) == {1: 100, 2: 5}


@pytest.mark.parametrize(
    ("precision", "batch", "hidden", "bits"),
    [
        ("bfloat16", 128, 128, 64),
        ("bfloat16", 33, 100, 40),
        ("tf32", 128, 128, 64),
        ("tf32", 1, 3, 7),
        ("float32", 5, 17, 50),
    ],
)
class TestParity:
    pytestmark = on_gpu

    def test_each_network_is_itself(self, precision: str, batch: int, hidden: int, bits: int) -> None:
        made = configs("parity", batch_size=batch, hidden_size=hidden, bits=bits, max_steps=8)
        group = GpuGroup(made, make_task(made[0]), DEVICE, precision=precision, per_chunk=4)
        compare_members(group, 5)


@pytest.mark.parametrize(
    ("precision", "batch", "hidden"), [("bfloat16", 16, 128), ("bfloat16", 1, 100), ("float32", 5, 17)]
)
class TestLogic:
    pytestmark = on_gpu

    def test_each_network_is_itself(self, precision: str, batch: int, hidden: int) -> None:
        made = configs("logic", batch_size=batch, hidden_size=hidden, max_steps=6)
        group = GpuGroup(made, make_task(made[0]), DEVICE, precision=precision, per_chunk=4)
        compare_members(group, 3)


@pytest.mark.parametrize("task", ["parity", "logic"])
class TestMany:
    pytestmark = on_gpu

    def test_more_networks_than_multiprocessors(self, task: str) -> None:
        """Three as alone, and all, bit for bit, as in groups where each has a program of its own."""
        sizes: dict[str, Any] = {"batch_size": 5, "hidden_size": 7, "max_steps": 5, "log_every": 2, "iterations": 9}
        # As many in each group that their counters lie alike in memory (4 numbers are 16 bytes): the same kernel.
        count, part = multiprocessors(torch.device("cuda")), 64
        made = [
            make_config(task, tau=(0.01, 0.0003)[e % 2], seed=e, halt_bias=-0.5 - e % 3, learning_rate=1e-3, **sizes)
            for e in range(4 * (count // 2 + 1))
        ]
        group = GpuGroup(made, make_task(made[0]), "cuda", precision="float32", per_chunk=4)
        assert group.programs == count < len(made)
        compare_members(group, 5, [0, count, len(made) - 1])
        tensors = group.tensors()
        for first in range(0, len(made), part):
            few = GpuGroup(made[first : first + part], group.task, "cuda", precision="float32", per_chunk=4)
            assert few.programs == len(few.configs)
            few.run(5)
            for kind, named in few.tensors().items():
                for name, value in named.items():
                    assert torch.equal(value, tensors[kind][name][first : first + part]), name


class TestSmall:
    """Small enough for the interpreter."""

    pytestmark = on_device

    def test_parity(self) -> None:
        made = configs("parity", batch_size=5, hidden_size=7, bits=9, max_steps=5)
        compare_members(GpuGroup(made, make_task(made[0]), DEVICE, precision="float32", per_chunk=2), 5)

    def test_logic(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pondertime.ensemble.launch.LSTMLaunch.rows", 32)
        made = configs("logic", batch_size=3, hidden_size=6, max_steps=3)
        compare_members(GpuGroup(made, Logic(3, 2), DEVICE, precision="float32", per_chunk=2), 3)

    def test_a_checkpoint_goes_on_where_it_was(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """More networks than programs, several launches, stopped and loaded in the middle: the same numbers."""
        monkeypatch.setattr("pondertime.ensemble.gpu.multiprocessors", lambda device: 2)
        made = configs("parity", batch_size=4, hidden_size=5, bits=6, max_steps=4)
        whole, first, second = (
            GpuGroup(made, make_task(made[0]), DEVICE, precision="float32", per_chunk=2, quantum=quantum)
            for quantum in (10**6, 1, 12)
        )
        assert whole.programs == 2 < len(made)
        whole.run(7)
        first.run(3)
        second.load(first.tensors(), first.iterations, first.sums())
        second.run(7)
        for group in ("model", "optimiser"):
            for name, value in whole.tensors()[group].items():
                assert torch.equal(value, second.tensors()[group][name]), name
        assert torch.equal(whole.sums(), second.sums())
        intervals = first.take_intervals() + second.take_intervals()
        assert sorted(intervals) == whole.take_intervals()

    def test_a_network_without_numbers_stops_alone(self) -> None:
        made = configs("parity", batch_size=4, hidden_size=5, bits=6, max_steps=4)
        group = GpuGroup(made, make_task(made[0]), DEVICE, precision="float32", per_chunk=2)
        tensors = group.tensors()
        tensors["model"]["cell.bias_ih"][1] = float("nan")
        group.load(tensors, [0, 0, 0])
        group.run(3)
        assert group.iterations == [3, 0, 3] and group.diverged() == [1]

    def run(self, folder: RunFolder, iterations: int, **options: Any) -> dict[str, Any]:
        """Train three networks, or go on with them."""
        config = make_config(
            "parity", members=3, iterations=iterations, learning_rate=1e-2, batch_size=4, hidden_size=5, bits=6,
            max_steps=4, halt_bias=-1.0, log_every=3,
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pondertime.ensemble.gpu.CHUNK", 4)  # a launch makes few updates
            patch.setattr("pondertime.evaluate.SEQUENCES", 100)
            if INTERPRETED:
                patch.setattr(training, "make_learner", lambda c, task, *_: GpuLearner(c, task, "cpu", "float32"))
            return train(config, folder, device=DEVICE, precision="float32", **options)

    def test_a_run_that_is_stopped_goes_on(self, tmp_path: Path) -> None:
        """By the clock, in its middle, then at its end, for more iterations: as if it had made all at once."""
        stopped, whole = RunFolder(tmp_path / "stopped"), RunFolder(tmp_path / "whole")
        with pytest.raises(OutOfTime):
            self.run(stopped, 8, max_minutes=0)
        _, counters = stopped.load() or ({}, {})
        assert 0 < counters["updates"] <= max(counters["iterations"]) < 8 and stopped.result() is None
        assert stopped.environment()["backend"] == "one program a network, float32 products"
        assert self.run(stopped, 8)["stopped"] == "iterations"
        assert self.run(stopped, 11)["iterations"] == self.run(whole, 11)["iterations"] == 11
        assert_same_networks(stopped, whole)
        assert [line["iterations"] for line in stopped.metrics(2)] == [3, 6, 9, 11]

    def test_an_interval_that_a_checkpoint_logs_is_heeded(self, tmp_path: Path) -> None:
        folder = RunFolder(tmp_path / "run")
        assert self.run(folder, 40, until_error=0.999, checkpoint_seconds=0)["stopped"] == "until_error"
        assert max(line["iterations"] for line in folder.metrics(0)) < 40

    def test_a_run_leaves_a_network_behind_that_fails(self, tmp_path: Path) -> None:
        """Also when it goes on; the others are as they would have been."""
        failed, whole = RunFolder(tmp_path / "failed"), RunFolder(tmp_path / "whole")
        self.run(failed, 2)
        tensors, counters = failed.load() or ({}, {})
        tensors["model"]["output.weight"][1] = float("nan")
        failed.save(tensors, counters)
        self.run(failed, 4)
        found, expected = self.run(failed, 5), self.run(whole, 5)
        assert [member["failed"] for member in found["members"]] == [None, 2, None]
        for e in (0, 2):
            assert found["members"][e] == pytest.approx(expected["members"][e])
        assert found["error"] == pytest.approx((found["members"][0]["error"] + found["members"][2]["error"]) / 2)


@pytest.mark.parametrize(
    ("task", "device", "members", "backend", "chosen"),
    [
        ("parity", "cuda", 3, "auto", True),
        ("logic", "cuda", 3, "fused", True),
        ("parity", "cuda", 1, "auto", False),
        ("parity", "cpu", 3, "auto", False),
        ("sort", "cuda", 3, "auto", False),
        ("parity", "cuda", 3, "fused-calls", False),
    ],
)
def test_which_networks_have_a_program_each(
    task: str, device: str, members: int, backend: str, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stacked(*args: Any, **options: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(training, "GpuLearner", lambda config, task, device, precision: precision)
    monkeypatch.setattr(training, "build_all", stacked)
    config = make_config(task, members=members)
    if chosen:
        assert make_learner(config, make_task(config), device, backend) == "bfloat16"
    else:
        with pytest.raises(NotImplementedError):
            make_learner(config, make_task(config), device, backend)


@pytest.mark.parametrize("task", [pytest.param(task, marks=on_gpu) for task in ("parity", "logic")])
def test_members_by_the_command_line(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program each; stopped by the clock, taken up, then with more iterations: as if all had been made at once."""
    pytest.importorskip("tyro", reason="needs the command line")
    from pondertime.cli import main

    monkeypatch.setattr("pondertime.evaluate.SEQUENCES", 200)
    sizes = "--hidden-size 16 --batch-size 16 --max-steps 10 --log-every 20 --halt-bias -1 --device cuda"
    command = ["train", task, *sizes.split(), "--members", "3", "--seed", "5"]
    folders = stopped, whole = RunFolder(tmp_path / "stopped"), RunFolder(tmp_path / "whole")
    with pytest.raises(SystemExit) as leave:
        main([*command, "--iterations", "60", "--max-minutes", "1e-6", "--out", str(stopped.path)])
    _, counters = stopped.load() or ({}, {})
    assert leave.value.code == 0 and 0 < counters["updates"] <= max(counters["iterations"]) < 60
    assert stopped.environment()["backend"] == "one program a network, bfloat16 products"
    for folder, iterations in ((stopped, 60), (stopped, 90), (whole, 90)):
        main([*command, "--iterations", str(iterations), "--out", str(folder.path)])
    assert [result(folder)["iterations"] for folder in folders] == [90, 90]
    assert_same_networks(stopped, whole)
    assert [line["iterations"] for line in stopped.metrics(1)] == [20, 40, 60, 80, 90]
    capsys.readouterr()
    main(["evaluate", str(stopped.path), "--seed", "6", "--sequences", "200", "--device", "cuda"])
    assert f"error {result(stopped)['members'][1]['error']:.2%}" in capsys.readouterr().out


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_through_the_interpreter() -> None:
    """The small ones on a CPU, in a process of their own."""
    quiet = ["-W", "ignore:Conversion of an array:DeprecationWarning"]  # the interpreter's own
    command = [sys.executable, "-m", "pytest", "-q", "-x", *quiet, "-p", "no:cacheprovider", f"{__file__}::TestSmall"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def test_says_what_it_cannot_train() -> None:
    sort = make_config("sort")
    assert why_not_gpu_group([sort], make_task(sort)) == "it knows parity and logic, not sort"
    small, large = make_config("parity", hidden_size=64), make_config("parity")
    assert why_not_gpu_group([small, large], make_task(large)) == "the networks differ in hidden_size"


class TestRing:
    pytestmark = on_gpu

    @pytest.mark.parametrize("task", ["parity", "logic"])
    def test_a_recorded_chunk_is_what_the_task_draws(self, task: str) -> None:
        from pondertime.ensemble.ring import Ring

        configs = [make_config(task, seed=s) for s in (3, 4)]
        rings = [
            Ring(configs, make_task(configs[0]), "cuda", signed=task == "parity", per_chunk=4)
            for _ in ("recorded", "drawn")
        ]
        rings[1].stream = None
        for ring in rings:
            for e, number in ((0, 0), (1, 0), (0, 5)):
                ring.draw(e, number)
            ring.settle()
        for name in ("words", "target", "lengths"):
            recorded, drawn = (getattr(ring, name) for ring in rings)
            assert torch.equal(recorded, drawn)
        assert not torch.equal(rings[0].words[0, 0], rings[0].words[1, 0])
