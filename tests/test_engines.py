"""A sweep in one process and in several: the same rows, and what stops it loses nothing."""

import contextlib
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pondertime import engines, jobs, results, sweep
from pondertime.cli import main
from pondertime.config import Interrupted, OutOfTime, RunError, TrainConfig
from pondertime.engines import inline
from pondertime.jobs import attempt, run_job
from pondertime.runs import RunFolder
from pondertime.sweep import Places, plan, unfinished
from pondertime.train import train
from small_runs import metrics, processes, small, trained
from small_sweeps import assert_rows_equal_results, command, configs, outcomes


def test_two_processes_make_the_same_rows(places: Places, tmp_path: Path):
    every = configs()
    assert all(isinstance(o, results.Row) for o in outcomes(inline(every, places, 2)).values())
    assert_rows_equal_results(places, every)
    job = sweep.together(every, places)[1]
    assert job.members == 2 and job.name == "parity-tau0.01-seeds1-2"
    here = trained(tmp_path / "here", job)
    assert metrics(RunFolder(places.runs / job.name)) == metrics(here)


def test_an_interrupt_stops_the_sweep(places: Places, monkeypatch: pytest.MonkeyPatch):
    def interrupted(config: TrainConfig, folder: RunFolder, **options: Any) -> dict[str, Any]:
        if config.tau == 0.01:
            signal.raise_signal(signal.SIGINT)
        return train(config, folder, **options)

    monkeypatch.setattr(jobs, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        outcomes(inline(configs(), places, 1))
    assert len(unfinished(configs(), places)) == 4


@pytest.mark.parametrize("processes", [1, 2])
def test_a_sweep_that_is_out_of_time_goes_on_later(places: Places, processes: int):
    every = configs()
    with pytest.raises(OutOfTime, match=r"stopped by --max-minutes"):
        outcomes(inline(every, replace(places, deadline=time.monotonic()), processes))
    assert unfinished(every, places) == every
    assert len(outcomes(inline(every, replace(places, deadline=time.monotonic() + 600), processes))) == len(every)
    assert_rows_equal_results(places, every)


def test_the_whole_sweep_says_what_is_done_and_what_failed(
    places: Places, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """When its time is over."""

    def limited(config: TrainConfig, folder: RunFolder, **options: Any) -> dict[str, Any]:
        if config.tau is None:
            raise OutOfTime("stopped by --max-minutes at iteration 7")
        if fails and config.tau == 0.01:
            raise RunError("the loss is not finite")
        return train(config, folder, **options)

    monkeypatch.setattr(jobs, "train", limited)
    for fails, code, left, words in ((True, 1, 6, "; 2 of 6 networks failed, the first "), (False, 0, 4, "")):
        with pytest.raises(SystemExit) as leave:
            main(command(places))
        said = capsys.readouterr().err.splitlines()[-1]
        assert leave.value.code == code
        done = f"stopped by --max-minutes at iteration 7; 2 of {left} networks are done, and in {places.results}"
        assert said.startswith(("error: " if code else "") + done + words) and (fails or said == done)


def test_networks_that_are_done_when_time_is_out_are_kept(places: Places, monkeypatch: pytest.MonkeyPatch):
    """Of four networks that go at their own pace two are done, one failed, and one has updates left."""
    grid = small(iterations=20, taus=(0.1, 0.01), members=2, tau=None)
    whole = trained(places.runs / grid.name, grid).result()
    assert whole is not None

    def out_of_time(config: TrainConfig, folder: RunFolder, **options: Any) -> dict[str, Any]:
        tensors, counters = folder.load() or ({}, {})
        folder.save(tensors, {**counters, "iterations": [20, 20, 19, 20], "failed": {"1": 20}, "seconds": 8.0})
        (folder.path / "result.json").unlink(missing_ok=True)
        raise OutOfTime("stopped by --max-minutes at iteration 19")

    monkeypatch.setattr(jobs, "train", out_of_time)
    with pytest.raises(OutOfTime, match=r"^stopped by .* at iteration 19$"):
        run_job(grid, places)
    rows = {(row.tau, row.seed): row for row in results.read_rows(places.results, "parity")}
    assert rows.keys() == {(0.1, 1), (0.01, 2)}
    for kind, e in {(0.1, 1): 0, (0.01, 2): 3}.items():
        for name in ("error", "target_error", "steps", "rho"):
            assert getattr(rows[kind], name) == whole["members"][e][name]
        assert (rows[kind].updates, rows[kind].seconds) == (20, 2.0)
    assert len(results.read_difficulty(places.results, "parity")) == 2
    every = [grid.member(e) for e in range(4)]
    assert unfinished(every, places) == [every[1], every[2]]
    with monkeypatch.context() as patch, pytest.raises(OutOfTime):
        patch.setattr(jobs, "evaluate_all", lambda *args, **options: pytest.fail("measured again"))
        run_job(grid, places)
    assert rows == {(row.tau, row.seed): row for row in results.read_rows(places.results, "parity")}
    (places.results / "parity.csv").write_text("mine")
    with pytest.raises(RunError, match=r"the result tables cannot take it: .*parity.csv, line 1"):
        run_job(grid, places)


def one_is_late(job: TrainConfig, places: Places, threads: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    if job.tau == 0.1:
        pipe.send(OutOfTime("stopped by --max-minutes"))
    else:
        time.sleep(0.5)
        pipe.send(attempt(job, places))


def test_what_is_trained_when_another_process_is_out_of_time_is_measured(
    places: Places, monkeypatch: pytest.MonkeyPatch
):
    """It had ended before; jobs that nobody has begun are left."""
    monkeypatch.setattr(engines, "work", one_is_late)
    every = configs()
    found: dict[TrainConfig, Any] = {}
    with pytest.raises(OutOfTime, match=r"^stopped by --max-minutes$"):
        for config, outcome in inline(every, places, 2):
            found.update({config: outcome})
    done = [c for c in every if c.tau == 0.01]
    assert list(found) == done and all(isinstance(o, results.Row) for o in found.values())
    assert_rows_equal_results(places, done)
    assert not list(places.runs.glob("*noact*"))


def sends_much(job: TrainConfig, places: Places, threads: int, pipe: Any) -> None:
    if job.tau == 0.1:
        pipe.send([(job, RunError("first"))])
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(0.5)
    with contextlib.suppress(BrokenPipeError):
        pipe.send("x" * 10_000_000)


def test_a_process_that_has_much_to_send_does_not_hold_up_the_end(places: Places, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engines, "work", sends_much)
    every = plan(small(iterations=20), (0.1, 0.01), 1, baseline=False)
    found = inline(every, places, 2)
    assert next(found)[0] == every[0]
    ended = threading.Event()
    # Were the end held up, another interrupt would let go of it.
    too_late = threading.Timer(20, lambda: ended.is_set() or signal.raise_signal(signal.SIGINT))
    too_late.start()
    found.close()  # type: ignore[attr-defined]
    ended.set()
    too_late.cancel()


def sweep_elsewhere(every: list[TrainConfig], places: Places) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a shell
    try:
        outcomes(inline(every, places, 2))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def held(folder: RunFolder) -> bool:
    """Whether a process trains in a folder."""
    try:
        with folder.locked():
            return False
    except RunError:
        return True


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupt_stops_the_processes_with_their_checkpoints(places: Places, signum: signal.Signals):
    """Also if the first process has no time to ask them to."""
    every = [replace(c, iterations=1_000_000) for c in configs()]
    process = processes().Process(target=sweep_elsewhere, args=(every, places))
    process.start()
    first, second = (places.runs / job.name for job in sweep.together(every, places)[:2])
    end = time.monotonic() + 60
    while not ((first / "checkpoint").exists() and (second / "checkpoint").exists()):
        assert time.monotonic() < end
        time.sleep(0.02)
    time.sleep(0.2)
    os.kill(process.pid, signum)
    process.join(30)
    assert process.exitcode == (-signum if signum == signal.SIGKILL else 130)
    for path in (first, second):
        while signum == signal.SIGKILL and held(RunFolder(path)) and time.monotonic() < end:
            time.sleep(0.02)
        with RunFolder(path).locked():
            saved = RunFolder(path).load()
        assert saved is not None and saved[1]["updates"] > 0
    assert len(list(places.runs.iterdir())) == 2


def vanish(config: TrainConfig, places: Places, threads: int, pipe: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_is_one_failure(places: Places, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engines, "work", vanish)
    found = outcomes(inline(configs()[:3], places, 2))
    assert [str(o) for o in found.values()] == [
        "its process ended early (exit code -9); the same command goes on",
    ] * 3
    assert all(isinstance(o, RunError) and not isinstance(o, Interrupted) for o in found.values())
