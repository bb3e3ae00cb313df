"""Networks that train inside a kernel, each against itself trained alone by the reference in float64.

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

import pondertime.learner as learners
from compare import assert_same
from pondertime.config import TrainConfig, make_config
from pondertime.ensemble.gpu import AHEAD, PACKING, GpuGroup, eagerness, why_not_gpu_group
from pondertime.runs import make_task
from pondertime.tasks.logic import Logic
from pondertime.train import make_learner

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
on_device = [] if INTERPRETED else on_gpu

# The largest difference of a mean of gradients (as a share of its norm), of a weight in learning rates, and of
# summed losses. A gradient may be a small difference of large numbers, as that of the halting unit is.
TOLERANCE = {
    "float32": {"moments": 1e-3, "weights": 0.2, "sums": 1e-5},
    "tf32": {"moments": 5e-2, "weights": 4.0, "sums": 1e-3},
    "bfloat16": {"moments": 1e-1, "weights": 4.0, "sums": 1e-3},
}


def configs(task: str, **options: Any) -> list[TrainConfig]:
    """Networks that differ in tau, clipping and rate, and one without halting."""
    shared: dict[str, Any] = {"iterations": 100, "log_every": 2, "halt_bias": -1.0, **options}
    return [
        make_config(task, tau=0.01, seed=0, learning_rate=1e-3, clip=0.1, **shared),
        replace(make_config(task, tau=0.0003, seed=1, learning_rate=2e-3, cooldown=1.0, **shared), iterations=20),
        make_config(task, force_steps=3, seed=9, learning_rate=1e-3, **shared),
    ]


def assert_each_is_itself(group: GpuGroup, updates: int) -> None:
    from ensemble_alone import compare_members

    worst = compare_members(group, updates)
    bound = TOLERANCE[group.precision]
    assert group.iterations == [updates] * len(group.configs)
    assert worst["flips"] <= 1, worst
    assert worst["moments"] <= bound["moments"] and worst["sums"] <= bound["sums"], worst
    assert worst["weights"] <= bound["weights"] * 2e-3, worst


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
        assert_each_is_itself(group, 5)


@pytest.mark.parametrize(
    ("precision", "batch", "hidden"), [("bfloat16", 16, 128), ("bfloat16", 1, 100), ("float32", 5, 17)]
)
class TestLogic:
    pytestmark = on_gpu

    def test_each_network_is_itself(self, precision: str, batch: int, hidden: int) -> None:
        made = configs("logic", batch_size=batch, hidden_size=hidden, max_steps=6)
        group = GpuGroup(made, make_task(made[0]), DEVICE, precision=precision, per_chunk=4)
        assert_each_is_itself(group, 3)


class TestSmall:
    """Small enough for the interpreter."""

    pytestmark = on_device

    def test_parity(self) -> None:
        made = configs("parity", batch_size=5, hidden_size=7, bits=9, max_steps=5)
        assert_each_is_itself(GpuGroup(made, make_task(made[0]), DEVICE, precision="float32", per_chunk=2), 5)

    def test_logic(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pondertime.ensemble.launch.LSTMLaunch.rows", 32)
        made = configs("logic", batch_size=3, hidden_size=6, max_steps=3)
        assert_each_is_itself(GpuGroup(made, Logic(3, 2), DEVICE, precision="float32", per_chunk=2), 3)

    def test_a_checkpoint_goes_on_where_it_was(self) -> None:
        """More networks than programs, several launches, stopped and loaded in the middle: the same numbers."""
        made = configs("parity", batch_size=4, hidden_size=5, bits=6, max_steps=4)
        whole, first, second = (
            GpuGroup(made, make_task(made[0]), DEVICE, precision="float32", per_chunk=2, quantum=quantum)
            for quantum in (10**6, 1, 12)
        )
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_a_heavy_network_trains_as_a_stack_of_one(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learners, "HEAVY", 16)
    if device == "cuda":
        from pondertime.fused import triton_loop_run, triton_plan

        # It would fit the multiprocessors, but goes by ticks.
        monkeypatch.setattr(triton_loop_run, "blocks_for", lambda *sizes: None)
        monkeypatch.setattr(triton_plan, "_plans", {})
    config = make_config("addition", hidden_size=24, batch_size=5)
    learner: Any = make_learner(config, make_task(config), device, "fused")
    assert learner.half == (device == "cuda")
    learner.half = False
    alone, expected = learner.closed_form(learner.batches[0], 1e-3)
    learner.half = True  # on a CPU this changes the shapes alone
    seen, gradients = learner.closed_form(learner.batches[0], 1e-3)
    assert seen.output.dtype == torch.float32
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    assert_same((seen.output, seen.task_loss, seen.steps), (alone.output, alone.task_loss, alone.steps), dtype)
    for made, known in zip(gradients, expected, strict=True):
        assert_same(made.squeeze(0).reshape(known.shape), known, dtype)


SMALL = {"hidden_size": 24, "batch_size": 5, "halt_bias": -1.0, "max_steps": 6, "tau_warmup": 20}


RECORDED = {
    "stack": make_config("addition", members=3, **SMALL),
    "taus": replace(make_config("addition", members=2, **SMALL), taus=(1e-4, 0.3)),
    "heavy": make_config("addition", **SMALL),
    "alone": make_config("addition", **{**SMALL, "hidden_size": 12}),
    "full length": make_config("wikipedia", members=2, data="excerpt", length=12, **SMALL),
}


@pytest.mark.parametrize("config", [pytest.param(c, marks=on_gpu, id=name) for name, c in RECORDED.items()])
def test_recorded_updates_are_those_of_plain_calls(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from pondertime.fused import triton_loop_run, triton_plan

    monkeypatch.setattr(learners, "HEAVY", 16)
    monkeypatch.setattr(triton_loop_run, "blocks_for", lambda *sizes: None)
    monkeypatch.setattr(triton_plan, "_plans", {})
    config = replace(config, iterations=30, cooldown=0.5)
    both: list[Any] = [make_learner(config, make_task(config), "cuda", "fused") for _ in range(2)]
    recorded, plain = both
    monkeypatch.setattr(plain, "stepper", lambda batch: None)
    rate = config.learning_rate
    for i in range(30):
        plain.load(recorded.tensors(), recorded.counters())
        if i == 20 and config.size > 1:
            recorded.failed[1] = plain.failed[1] = 20
        for learner in both:
            learner.advance(10**9)
        a, b = recorded.weights, plain.weights
        assert int(a.step) == int(b.step) == i + 1
        # The sum over a longer tape is made in another order.
        assert float((a.all - b.all).abs().max()) <= 0.02 * rate
        assert float((a.exp_avg - b.exp_avg).norm() / b.exp_avg.norm()) <= 1e-4
        assert_same(recorded.sums, plain.sums, torch.float32)
    space = recorded.stepper(recorded.batches[29]).run.space
    assert space.begun is not None and 0 < len(space.steps) < 15  # the others were played


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
