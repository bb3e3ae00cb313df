"""The sweep: its plan, what it skips, what it makes of networks that fail, and its result rows."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pondertime import engines, jobs, results, sweep
from pondertime.cli import main
from pondertime.config import FAST, ConfigError, Interrupted, OutOfTime, RunError, TrainConfig, make_config, paper_grid
from pondertime.engines import inline
from pondertime.jobs import attempt, run_job
from pondertime.runs import RunFolder
from pondertime.sweep import Places, home, plan, unfinished
from pondertime.train import train
from small_runs import SIZE_FLAGS, metrics, processes, small, trained


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path / "runs", tmp_path / "results")


@pytest.fixture(autouse=True)
def few_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pondertime.evaluate.SEQUENCES", 200)


def configs(**changes: Any) -> list[TrainConfig]:
    return plan(small(iterations=20, **changes), (0.1, 0.01), 2, baseline=True)


def outcomes(found: Iterator[tuple[TrainConfig, Any]]) -> dict[str, Any]:
    return {config.name: outcome for config, outcome in found}


def command(places: Places, *more: str) -> list[str]:
    where = ["--runs", str(places.runs), "--results", str(places.results)]
    return ["sweep", "parity", *SIZE_FLAGS, *where, "--taus", "0.1,0.01", "--seeds", "2", "--iterations", "20", *more]


def assert_rows_equal_results(places: Places, every: list[TrainConfig]) -> None:
    """One row a network, with the numbers of its result.json; curve, points and traces beside it."""
    rows = {row.key: row for row in results.read_rows(places.results, "parity")}
    assert rows.keys() == {sweep.key(c) for c in every}
    curves = results.read_curves(places.results, "parity")
    points = results.read_difficulty(places.results, "parity")
    traced = results.read_traces(places.results, "parity")
    for config in every:
        (folder, whole), row = home(config, places, sweep.groups(places)), rows[sweep.key(config)]
        outcome = folder.result()
        assert outcome is not None
        if whole.members > 1:
            outcome |= outcome["members"][config.seed - whole.seed]
            outcome["seconds"] = round(outcome["seconds"] / whole.members, 2)
        for name in ("updates", "error", "target_error", "steps", "rho", "seconds"):
            assert getattr(row, name) == outcome[name]
        assert (row.task, row.workers, row.bpc, row.device) == ("parity", 1, None, "cpu")
        assert curves[row.key].updates.tolist() == [
            line["updates"] for line in folder.metrics(config.seed - whole.seed)
        ]
        assert curves[row.key].error.tolist() == pytest.approx(
            [line["error"] for line in folder.metrics(config.seed - whole.seed)]
        )
        assert [point.difficulty for point in points[row.key]] == list(range(1, 9))
        assert len(traced[row.key]) == 3


def test_the_plan():
    every = plan(small(), (0.5, 0.25), 3, baseline=True)
    assert [(c.tau, c.force_steps, c.seed) for c in every] == [
        *((0.5, None, 1), (0.25, None, 1), (None, 1, 1)),
        *((0.5, None, 2), (0.25, None, 2), (None, 1, 2)),
        *((0.5, None, 3), (0.25, None, 3), (None, 1, 3)),
    ]
    assert len({c.name for c in every}) == 9
    assert len(plan(small(), (0.5, 0.25), 3, baseline=False)) == 6
    assert all(c.bits == 8 and c.iterations == 60 for c in every)
    with pytest.raises(ConfigError, match=r"--tau: expected a number of at least 0, got nan"):
        plan(small(), (0.5, float("nan")), 1, baseline=False)


def test_a_grid_on_a_gpu_is_one_job(tmp_path: Path):
    """All networks at once, in a folder of its own for these taus; what was begun goes on with its like."""
    places = Places(tmp_path / "runs", tmp_path / "results", "cuda")
    every = plan(small(), (0.5, 0.25), 3, baseline=True)
    (job,) = sweep.together(every, places)
    assert (job.size, job.taus, job.members) == (9, (0.5, 0.25, None), 3)
    assert {job.member(e) for e in range(9)} == set(every)
    (other,) = sweep.together(plan(small(), (0.5, 0.125), 3, baseline=True), places)
    assert job.name != other.name and job.name.startswith("parity-3taus-") and job.name.endswith("-seeds1-3")
    for one in (job, replace(job, members=1)):
        places = Places(tmp_path / one.name, tmp_path / "results", "cuda")
        RunFolder(places.runs / one.name).path.mkdir(parents=True)
        RunFolder(places.runs / one.name).write_config(one)
        begun = sweep.groups(places)
        assert [home(c, places, begun)[1] for c in every if c.seed == 1] == [one] * 3
        assert sweep.together([c for c in every if c.seed in one.seeds], places) == [one]
        with pytest.raises(RunError, match="this run has hidden_size = 16, asked for 8"):
            unfinished([replace(c, hidden_size=8) for c in every], places)
    big = plan(small("addition"), (0.5, 0.25), 2, baseline=True)
    assert [(j.taus, j.members, j.tau) for j in sweep.together(big, places)] == [((0.5, 0.25), 2, None), ((), 2, None)]
    # Several processes share the taus out.
    big = plan(small("addition"), (0.5, 0.25, 0.125), 2, baseline=False)
    assert [(j.taus, j.tau) for j in sweep.together(big, places, 2)] == [((0.5, 0.25), None), ((), 0.125)]


@pytest.mark.parametrize(("precision", "jobs"), [("auto", 1), ("bfloat16", 1), ("float32", 2)])
def test_float32_on_a_gpu(tmp_path: Path, precision: str, jobs: int) -> None:
    """An LSTM of 128 units has a multiprocessor of its own in bfloat16 only; in float32 those with ACT are stacked."""
    places = Places(tmp_path / "runs", tmp_path / "results", "cuda", precision=precision)
    assert len(sweep.together(plan(make_config("logic"), (0.5, 0.25), 2, baseline=True), places)) == jobs


def test_stacks_fit_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of its memory if all networks ponder to the end: 9.3 GB each, without ACT 2.0 GB."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sweep, "MEMORY", 80 * 10**9)
    places = Places(tmp_path / "runs", tmp_path / "results", "cuda")
    base = make_config("wikipedia", data="excerpt")
    every = plan(base, (0.01, 0.1), 20, baseline=True)
    jobs = sweep.together(every, places)
    assert [(j.tau, j.members) for j in jobs] == [(t, 4) for t in (0.01, 0.1) for _ in range(5)] + [(None, 20)]
    # The networks without ACT come first where the others of a seed are done.
    rest = [c for c in every if c.tau is None or c.seed > 19]
    assert [(j.taus, j.members) for j in sweep.together(rest, places)] == [((0.01, 0.1), 1), ((), 20)]


def test_a_table_holds_networks_of_the_same_settings(tmp_path: Path) -> None:
    """As far as their commands say: a checkout comes with tables."""
    where = tmp_path / "results"
    row = results.read_rows(Path(__file__).parents[1] / "results", "parity")[0]
    assert row.command.startswith("pondertime sweep parity")

    def check(commands: str, ours: str) -> None:
        sweep.check_settings([replace(row, command=commands)], ours, FAST["parity"], where)

    check(row.command, "pytest")
    check("pytest", "pondertime sweep parity")
    check("pondertime sweep parity", "pondertime sweep parity --learning-rate 0.004 --clip 1 --max-steps 3")
    same = "pondertime sweep parity --beta2=0.999 --max_steps 100 --learning-rate 1e-3 --seeds 3"
    check("pondertime sweep parity --learning-rate .001 --max-steps 100 --beta2 .999", same)
    for other, words in (
        ("", "beta2 0.999 there, 0.99 here, learning_rate 0.001 there, 0.004 here, max_steps 100 there, 3 here"),
        (" --max-steps 100 --learning-rate 0.001 --beta2 0.999 --bits 8", "bits None there, 8 here"),
    ):
        message = rf"parity.csv: has networks of other settings \({words}\); name another folder: --results DIR"
        with pytest.raises(ConfigError, match=message):
            check(row.command, "pondertime sweep parity" + other)


def test_the_grid_of_the_paper():
    assert len(paper_grid("parity")) == 37 and len(paper_grid("wikipedia")) == 28
    assert paper_grid("sort")[:3] == (0.0001, 0.0002, 0.0003) and paper_grid("sort")[-1] == 1.0
    names = [c.name for c in plan(small(), paper_grid("parity"), 20, baseline=True)]
    assert len(names) == len(set(names)) == 38 * 20


def test_a_sweep_here_and_again(places: Places):
    every = configs()
    assert unfinished(every, places) == every
    for outcome in outcomes(inline(every, places, 1)).values():
        assert isinstance(outcome, results.Row)
    assert_rows_equal_results(places, every)
    assert unfinished(every, places) == []
    assert unfinished([replace(c, iterations=10) for c in every], places) == []
    more = [replace(c, iterations=30) for c in every]
    assert unfinished(more, places) == more
    # A row whose run has more to do is replaced.
    run_job(more[0], places)
    assert unfinished(more, places) == more[1:]
    assert_rows_equal_results(places, [more[0], *every[1:]])


def test_finished_runs_are_taken_over_without_training(places: Places, monkeypatch: pytest.MonkeyPatch):
    config = configs()[0]
    trained(places.runs / config.name, config)
    monkeypatch.setattr("pondertime.train.loop", lambda session: pytest.fail("it trains"))
    assert unfinished([config], places) == [config]
    run_job(config, places)
    assert_rows_equal_results(places, [config])


def test_what_was_begun_goes_on_in_its_folder(places: Places):
    """Whatever that is called, and the row says where it was trained."""
    every = plan(small(iterations=20), (0.01,), 2, baseline=False)
    (job,) = sweep.together(every, places)
    folder = trained(places.runs / "mine", replace(job, iterations=10))
    env = json.loads((folder.path / "env.json").read_text())
    assert unfinished(every, places) == every
    for outcome in outcomes(inline(every, places, 1)).values():
        assert isinstance(outcome, results.Row) and outcome.device == env["device"] == "cpu"
    assert [path.name for path in places.runs.iterdir()] == ["mine"]
    (folder.path / "env.json").write_text(json.dumps({**env, "device": "cuda"}))
    assert [row.device for _, row in run_job(job, places) if isinstance(row, results.Row)] == ["cuda", "cuda"]


def test_two_processes_make_the_same_rows(places: Places, tmp_path: Path):
    every = configs()
    assert all(isinstance(o, results.Row) for o in outcomes(inline(every, places, 2)).values())
    assert_rows_equal_results(places, every)
    job = sweep.together(every, places)[1]
    assert job.members == 2 and job.name == "parity-tau0.01-seeds1-2"
    here = trained(tmp_path / "here", job)
    assert metrics(RunFolder(places.runs / job.name)) == metrics(here)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_network_that_diverges_does_not_stop_the_rest(
    places: Places, capsys: pytest.CaptureFixture[str], processes: int
):
    every = configs()
    bad = every[1]
    trained(places.runs / bad.name, replace(bad, iterations=10))
    model = places.runs / bad.name / "checkpoint" / "model.safetensors"
    good = model.read_bytes()
    model.write_bytes(good[:-4] + b"\0\0\xc0\x7f")
    with pytest.raises(SystemExit) as leave:
        main(command(places, "--processes", str(processes)))
    said = capsys.readouterr()
    assert leave.value.code == 1
    assert said.err.splitlines()[-1] == f"error: 1 of 6 networks failed, the first {bad.name}"
    assert f"{bad.name}: the loss is not finite at iteration 10" in said.out
    assert_rows_equal_results(places, [c for c in every if c != bad])
    model.write_bytes(good)
    main(command(places, "--processes", str(processes)))
    assert f"6 networks, 5 done (in {places.results}), 1 to train" in capsys.readouterr().out
    assert_rows_equal_results(places, every)


def test_a_dry_run_only_says_what_it_would_do(places: Places, capsys: pytest.CaptureFixture[str]):
    main(command(places, "--dry-run"))
    said = capsys.readouterr().out
    assert said.startswith("parity: 6 networks, 0 done, 6 to train on cpu\n  parity-tau0.1-seed1  20 iterations\n")
    assert "\n  and 1 more\nabout " in said
    assert not places.runs.exists() and not places.results.exists()


def test_runs_of_other_settings_are_not_taken_for_done(places: Places, capsys: pytest.CaptureFixture[str]):
    run_job(configs()[0], places)
    with pytest.raises(SystemExit):
        main(command(places, "--hidden-size", "8"))
    assert "this run has hidden_size = 16, asked for 8" in capsys.readouterr().err


def test_tables_that_cannot_be_read(places: Places):
    places.results.mkdir()
    (places.results / "parity.csv").write_text("nonsense")
    with pytest.raises(ConfigError, match=r"parity.csv, line 1: expected the columns"):
        unfinished(configs(), places)
    with pytest.raises(RunError, match=r"trained, but the result tables cannot take it: .*parity.csv, line 1"):
        run_job(configs()[0], places)
    assert (places.results / "parity.csv").read_text() == "nonsense"


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


def test_durations():
    said = [sweep.total_time(s) for s in (0.2, 89, 100, 5399, 7200, 47 * 3600, 3 * 86400)]
    assert said == ["1 s", "89 s", "2 min", "90 min", "2.0 h", "47.0 h", "3 days"]
