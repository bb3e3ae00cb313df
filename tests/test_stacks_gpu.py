"""Networks that train at once stacked, or one as a stack of one, each against itself trained alone by the reference."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import pondertime.learner as learners
from compare import assert_same
from ensemble_alone import Alone, Trained, on_gpu
from pondertime.batches import Batches
from pondertime.config import TrainConfig, make_config
from pondertime.runs import make_task
from pondertime.train import make_learner


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


@pytest.mark.parametrize(
    ("device", "precision", "way"),
    [
        ("cpu", "float32", "loop"),
        *(pytest.param("cuda", p, w, marks=on_gpu) for p in ("float32", "bfloat16") for w in ("loop", "ticks")),
    ],
)
@pytest.mark.parametrize("task", ["addition", "sort"])
def test_a_stack_trains_each_network_as_alone(
    task: str, device: str, precision: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two seeds, each with a learning rate of its own, at two time penalties; by ticks the updates are recorded."""
    if way == "ticks":
        from pondertime.fused import triton_loop_run, triton_plan

        monkeypatch.setattr(triton_loop_run, "blocks_for", lambda *sizes: None)
        monkeypatch.setattr(triton_plan, "_plans", {})
    config = replace(make_config(task, members=2, learning_rates=(1e-3, 3e-3), **SMALL), taus=(1e-4, 0.3))
    learner: Any = make_learner(config, make_task(config), device, "fused", precision)
    assert learner.half == (precision == "bfloat16")
    learner.advance(1)
    first, sums = [Trained.of(learner.tensors(), e) for e in range(config.size)], learner.sums.tolist()
    for _ in range(7):
        learner.advance(8)
    if way == "ticks":
        assert learner.stepper(learner.batches[7]).run.space.begun is not None
    for e in range(config.size):
        own = config.member(e)
        batches = Batches(learner.task, own.batch_size, [own.seed], 0, device)
        alone = Alone(own, learner.task, batches, 8)
        alone.compare_first(first[e], sums[e], precision)
        alone.compare_last(Trained.of(learner.tensors(), e), precision)


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
