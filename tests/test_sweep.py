"""The sweep: its plan, what it skips, what it makes of networks that fail, and its result rows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pondertime import results, sweep
from pondertime.cli import main
from pondertime.config import FAST, ConfigError, RunError, make_config, paper_grid
from pondertime.engines import inline
from pondertime.jobs import run_job
from pondertime.runs import RunFolder
from pondertime.sweep import Places, home, plan, unfinished
from small_runs import small, trained
from small_sweeps import assert_rows_equal_results, command, configs, outcomes


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


def test_durations():
    said = [sweep.total_time(s) for s in (0.2, 89, 100, 5399, 7200, 47 * 3600, 3 * 86400)]
    assert said == ["1 s", "89 s", "2 min", "90 min", "2.0 h", "47.0 h", "3 days"]
