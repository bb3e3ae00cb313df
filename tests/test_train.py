"""Training: repeatable, killed at any moment and resumed, stopped when asked, when done and when it diverges."""

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pondertime import train as training
from pondertime.batches import Batches
from pondertime.config import Interrupted, OutOfTime, TrainConfig, make_config
from pondertime.learner import Diverged, Learner
from pondertime.runs import RunFolder, build_all, make_task
from pondertime.train import train
from small_runs import assert_same_run, contents, kill_often, metrics, result, small, trained, updates, weights


class Killed(BaseException):
    """Stands for a SIGKILL at a chosen place."""


def test_the_same_seed_gives_the_same_run(tmp_path: Path):
    first, second = trained(tmp_path / "1"), trained(tmp_path / "2")
    assert len(metrics(first)) == 3
    assert_same_run(second, first)
    other = trained(tmp_path / "3", small(seed=2))
    assert weights(other) != weights(first) and metrics(other) != metrics(first)


def test_a_run_killed_at_ten_random_moments_ends_as_an_unbroken_one(tmp_path: Path):
    config = small(iterations=600, log_every=7)
    unbroken = trained(tmp_path / "unbroken", config)
    broken = RunFolder(tmp_path / "broken")
    kill_often(config, broken, times=10, most=35, seed=3)
    assert 0 < updates(broken) < 600
    train(config, broken)
    assert_same_run(broken, unbroken)


@pytest.mark.parametrize("place", range(1, 16))
def test_a_run_killed_before_any_rename_ends_as_an_unbroken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
):
    config = small(iterations=8, log_every=3)
    unbroken = trained(tmp_path / "unbroken", config)
    renames = 0
    rename = os.replace

    def replace(source: Path, target: Path) -> None:
        nonlocal renames
        renames += 1
        if renames == place:
            raise Killed
        rename(source, target)

    broken = RunFolder(tmp_path / "broken")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(Killed):
            train(config, broken, checkpoint_seconds=0)
    train(config, broken)
    assert_same_run(broken, unbroken)
    assert not list(broken.path.glob("*.new")) and not (broken.path / "checkpoint.old").exists()


def test_more_iterations_go_on_as_if_never_ended(tmp_path: Path):
    unbroken = trained(tmp_path / "unbroken", small(iterations=75))
    grown = trained(tmp_path / "grown", small(iterations=30))
    # The rest of an interval is logged at the end, and cut off again when the run goes on.
    assert [line["iterations"] for line in metrics(grown)] == [20, 30]
    trained(grown.path, small(iterations=75))
    assert [line["iterations"] for line in metrics(grown)] == [20, 40, 60, 75]
    assert_same_run(grown, unbroken)


def test_a_finished_run_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = trained(tmp_path / "run")
    before, first = contents(folder.path), folder.result()
    monkeypatch.setattr(training, "loop", lambda session: pytest.fail("it trains"))
    assert train(small(), folder) == first
    assert contents(folder.path) == before


def test_what_the_metrics_say(tmp_path: Path):
    config = small(iterations=40, log_every=4, tau=0.5, tau_warmup=20)
    folder = trained(tmp_path / "run", config)
    lines = metrics(folder)
    assert [line["iterations"] for line in lines] == list(range(4, 41, 4))
    for i, line in enumerate(lines):
        counts = {int(n): c for n, c in line["histogram"].items()}
        assert sum(counts.values()) == config.batch_size, "one batch of the interval is measured"
        assert line["steps"] == sum(n * c for n, c in counts.items()) / config.batch_size
        assert line["at_max"] == counts.get(config.max_steps, 0) / config.batch_size
        assert 0 <= line["error"] == line["target_error"] <= 1 and line["bpc"] == line["task_loss"] / math.log(2)
        # Update i x 4 is the measured one.
        tau = 0.5 * min(1.0, (4 * i + 1) / 20)
        assert line["loss"] == pytest.approx(line["task_loss"] + tau * line["rho"], rel=1e-5)
        assert line["steps"] < line["rho"] <= line["steps"] + 1


def test_a_batch_is_a_function_of_seed_worker_and_number():
    config = small()
    task = make_task(config)

    def batch(seed: int, worker: int, *numbers: int) -> torch.Tensor:
        batches = Batches(task, 16, [seed], worker, "cpu")
        return [batches[i].input for i in numbers][-1]

    assert torch.equal(batch(1, 0, 0, 1, 70, 71), batch(1, 0, 71))
    assert torch.equal(batch(1, 0, 71, 3), batch(1, 0, 3))
    distinct = [batch(1, 0, 3), batch(1, 0, 4), batch(1, 1, 3), batch(2, 0, 3), batch(1, 0, 3 + 64)]
    assert all(not torch.equal(a, b) for i, a in enumerate(distinct) for b in distinct[:i])


def interrupt_at(monkeypatch: pytest.MonkeyPatch, place: int, signum: signal.Signals) -> None:
    update = training.Learner.update

    def and_interrupt(learner: Any, i: int) -> None:
        update(learner, i)
        if i == place:
            signal.raise_signal(signum)

    monkeypatch.setattr(training.Learner, "update", and_interrupt)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_writes_a_checkpoint_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
):
    before = signal.getsignal(signum)
    folder = RunFolder(tmp_path / "run")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 32, signum)
        with pytest.raises(Interrupted, match=r"^stopped at iteration 33; checkpoint in .*checkpoint; the same comm"):
            train(small(), folder)
    assert signal.getsignal(signum) == before
    assert updates(folder) == 33 and folder.result() is None
    train(small(), folder)
    assert_same_run(folder, trained(tmp_path / "unbroken"))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("late", [False, True])
def test_an_interrupt_stops_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool, signum: signal.Signals
):
    """Or came in the last update, too late to stop the training; what is left is done by the same command."""
    folder, before = RunFolder(tmp_path / "run"), signal.getsignal(signum)
    evaluate_all = training.evaluate_all

    def interrupted(*args: Any, **options: Any) -> Any:
        signal.raise_signal(signum)
        return evaluate_all(*args, **options)

    with monkeypatch.context() as patch:
        if late:
            interrupt_at(patch, 59, signum)
            patch.setattr(training.Session, "between", lambda session: None)
        else:
            patch.setattr(training, "evaluate_all", interrupted)
        with pytest.raises(Interrupted, match=r"^stopped before it was evaluated; the same command does that$"):
            train(small(), folder)
    assert updates(folder) == 60 and folder.result() is None and signal.getsignal(signum) == before
    monkeypatch.setattr(training.Learner, "update", lambda *args: pytest.fail("it trains"))
    train(small(), folder)
    monkeypatch.undo()
    assert_same_run(folder, trained(tmp_path / "unbroken"))


def test_max_minutes(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(OutOfTime, match=r"^stopped by --max-minutes at iteration 1; .* the same command goes on"):
        train(small(), folder, max_minutes=1e-9)
    train(small(), folder)
    assert_same_run(folder, trained(tmp_path / "unbroken"))


def test_a_learning_rate_that_rises_again_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for cooldown, iterations, said in ((0.0, 60, False), (0.0, 80, False), (0.5, 60, False), (0.5, 80, True)):
        train(small(cooldown=cooldown, iterations=iterations), RunFolder(tmp_path / f"run{cooldown}"))
        assert ("the learning rate had fallen, and rises again" in "".join(capsys.readouterr())) == said


def test_another_backend_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = RunFolder(tmp_path / "run")
    for iterations, backend in ((20, "reference"), (40, "reference"), (60, "compact")):
        train(small(iterations=iterations), folder, backend=backend)
    said = capsys.readouterr().err.splitlines()
    name = small().name
    assert f"{name}: goes on from iteration 20" in said
    assert f"{name}: goes on from iteration 40 by compact (before: reference)" in said


def test_until_error(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    stopped = train(small(), folder, until_error=0.9)
    assert (stopped["stopped"], stopped["until_error"], stopped["iterations"]) == ("until_error", 0.9, 20)
    assert train(small(), folder, until_error=0.95) == stopped, "that error has been reached"
    assert train(small(), folder, until_error=1e-9)["stopped"] == "iterations"
    assert weights(folder) == weights(trained(tmp_path / "unbroken"))


def test_until_error_waits_for_a_measurement(tmp_path: Path):
    assert train(small(log_every=3), RunFolder(tmp_path / "run"), until_error=1e-9)["stopped"] == "iterations"


def broken_by(config: TrainConfig, folder: RunFolder, backend: str = "auto") -> None:
    kept = weights(folder)
    with pytest.raises(Diverged, match=r"not finite at iteration \d+; the last good .* is kept.*lower --learning-rate"):
        train(config, folder, backend=backend)
    assert weights(folder) == kept


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_diverging_run_stops_with_its_last_good_checkpoint(tmp_path: Path, backend: str):
    config = small(learning_rate=1e38)
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(Diverged, match=r"not finite at iteration \d+; the last good checkpoint is kept. Try"):
        train(config, folder, backend=backend)
    assert updates(folder) == 0 and folder.result() is None
    assert all(v.isfinite().all() for v in load_file(folder.checkpoint / "model.safetensors").values())
    broken_by(config, folder, backend)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_nan_weight_stops_the_run(tmp_path: Path, backend: str):
    folder = trained(tmp_path / "run")
    path = folder.checkpoint / "model.safetensors"
    tensors = load_file(path)
    tensors["cell.weight_hh"][0] = math.nan
    save_file(tensors, path)
    broken_by(small(iterations=90), folder, backend)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"halt_bias": 10.0}, "the network never ponders (N stays at 1); try a lower --tau or --tau-warmup"),
        ({"halt_bias": -10.0}, "N stays at its limit 10; try a higher --tau or a lower --learning-rate"),
    ],
    ids=["at 1", "at M"],
)
def test_a_warning_once_when_n_stays_at_an_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: str
):
    trained(tmp_path / "run", small(log_every=2, **changes))
    assert capsys.readouterr().err.count(f"warning: {words}\n") == 1
    trained(tmp_path / "short", small(log_every=2, iterations=18, **changes))
    trained(tmp_path / "fixed", make_config("parity", act=False, bits=8, hidden_size=8, iterations=40, log_every=2))
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("task", ["logic", "addition", "sort", "wikipedia"])
def test_every_task_trains_and_resumes(tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pondertime.evaluate.SEQUENCES", 50)
    monkeypatch.setattr("pondertime.evaluate.WIKIPEDIA_SEQUENCES", 5)
    options = {"data": "excerpt", "length": 20} if task == "wikipedia" else {}
    whole = trained(tmp_path / "whole", small(task, iterations=6, log_every=2, **options))
    parts = trained(tmp_path / "parts", small(task, iterations=3, log_every=2, **options))
    assert_same_run(trained(parts.path, small(task, iterations=6, log_every=2, **options)), whole)
    assert ("bpc" in result(whole)) == (task == "wikipedia")
    assert json.loads((whole.path / "env.json").read_text())["device"] == "cpu"


def test_killed_twice_before_the_second_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What was logged after the last checkpoint is cut off, and the log goes on from there."""
    config, folder = small(iterations=60), RunFolder(tmp_path / "run")
    advance = Learner.advance
    for stop in (30, 45):

        def killed(learner: Learner, until: int, stop: int = stop) -> None:
            if learner.iterations[0] == stop:
                raise KeyboardInterrupt
            advance(learner, until)

        with monkeypatch.context() as patch:
            patch.setattr(Learner, "advance", killed)
            with pytest.raises(KeyboardInterrupt):
                train(config, folder, checkpoint_seconds=1000)
    with pytest.raises(Interrupted):
        train(config, folder, max_minutes=1e-6)
    train(config, folder)
    assert [line["iterations"] for line in metrics(folder)] == [20, 40, 60]


def test_plain_calls_resume_bit_for_bit(tmp_path: Path):
    config = small("logic", iterations=40, halt_bias=-1.0)
    unbroken = trained(tmp_path / "unbroken", config, backend="fused-calls")
    broken = trained(tmp_path / "broken", replace(config, iterations=23), backend="fused-calls")
    train(config, broken, backend="fused-calls")
    assert weights(broken) == weights(unbroken)


@pytest.mark.parametrize(("i", "share"), [(0, 1.0), (48, 1.0), (51, 0.75), (59, 1 / 12)])
def test_the_rate_falls_to_zero_at_the_end(i: int, share: float):
    """The first update of Adam moves a weight by the learning rate, whatever its gradient is."""
    config = small(iterations=60, learning_rate=1e-3, cooldown=0.2)
    task = make_task(config)
    learner = Learner(config, task, build_all(config, task), "cpu")
    before = learner.weights.all.clone()
    learner.update(i)
    assert float((learner.weights.all - before).abs().max()) == pytest.approx(1e-3 * share, rel=1e-3)
