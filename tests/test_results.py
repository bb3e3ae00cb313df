"""Result tables are read back as they were written, whatever happens on the way."""

import json
import math
import multiprocessing
import os
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from fake_results import add, make_curve, make_points, make_results, make_row, make_traces
from pondertime import results

CURVE = ("updates", "error", "target_error", "bpc", "steps")


def snapshot(folder: Path, task: str) -> tuple:
    """All that the tables hold, in a form that can be compared."""
    curves = results.read_curves(folder, task)
    return (
        results.read_rows(folder, task),
        {
            key: [np.nan_to_num(getattr(curve, name), nan=-9).tolist() for name in CURVE]
            for key, curve in curves.items()
        },
        results.read_difficulty(folder, task),
        results.read_traces(folder, task),
    )


@pytest.mark.parametrize("task", ["parity", "addition", "wikipedia"])
def test_results_round_trip(tmp_path, task):
    rows = [
        make_row(task, tau, seed, preset=preset) for preset in ("fast", "paper") for tau, seed in ((0.01, 3), (None, 0))
    ]
    rows.append(make_row(task, None, 1, halting="fixed-3", command='pondertime train, "quoted"\nsecond line'))
    for row in reversed(rows):
        add(tmp_path, row)
    found = {row.key: row for row in results.read_rows(tmp_path, task)}
    assert found == {row.key: row for row in rows}
    for row in rows:
        curve, made = results.read_curves(tmp_path, task)[row.key], make_curve(row)
        for name in CURVE:
            np.testing.assert_array_equal(getattr(curve, name), getattr(made, name))
        points = results.read_difficulty(tmp_path, task).get(row.key, [])
        for point, drawn in zip(points, make_points(row), strict=True):
            assert asdict(point) == pytest.approx(asdict(drawn), rel=1e-6)
        for stored, trace in zip(results.read_traces(tmp_path, task).get(row.key, []), make_traces(row), strict=True):
            assert (stored.input, stored.output, stored.target, stored.steps) == (
                trace.input,
                trace.output,
                trace.target,
                trace.steps,
            )
            assert stored.rho == pytest.approx(trace.rho, rel=1e-6)
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith((".staged", ".ready"))]


def test_the_files_are_those_of_the_design(tmp_path):
    make_results(tmp_path, "parity", taus=[0.01], seeds=2)
    row = make_row("parity", 0.01, 5)
    results.add_row(tmp_path, "parity", row, make_curve(row, points=20))
    head = (tmp_path / "parity.csv").read_text().splitlines()[0]
    assert head == (
        "task,preset,halting,tau,seed,updates,workers,error,target_error,steps,rho,bpc,seconds,device,commit,command"
    )
    head = (tmp_path / "parity-difficulty.csv").read_text().splitlines()[0]
    assert head == "task,preset,halting,tau,seed,updates,difficulty,samples,error,target_error,steps,rho"
    with np.load(tmp_path / "parity-curves.npz") as file:
        assert set(file) == {"preset", "halting", "tau", "seed", "workers", *CURVE}
        assert file["updates"].shape == file["error"].shape == (5, 60)
        assert (file["updates"][2, 20:] == -1).all()
        assert np.isnan(file["error"][2, 20:]).all()
        assert np.isnan(file["tau"][3:]).all()
        assert file["error"].dtype == np.float32
    assert json.loads((tmp_path / "parity-traces.json").read_text()) == []


def test_long_curves_are_thinned():
    numbers = np.array([0.5, 0.3, 0.2, 0.0, 0.1])
    curve = results.Curve(np.arange(10, 60, 10), numbers, 2 * numbers, np.full(5, np.nan), 3 * numbers)
    short = curve.thinned(3)
    assert curve.thinned(5) is curve and short.updates.tolist() == [20, 40, 50]
    np.testing.assert_allclose(short.error, [0.4, 0.1, 0.1], rtol=1e-6)
    np.testing.assert_allclose(short.steps, [1.2, 0.3, 0.3], rtol=1e-6)
    assert np.isnan(short.bpc).all()
    nothing = results.Curve(*(np.empty(0) for _ in range(5)))
    assert nothing.thinned(3) is nothing


def test_mappings_stand_for_records(tmp_path):
    row = make_row("addition", 0.01, 2)
    add(tmp_path / "a", row)
    curve = {name: getattr(make_curve(row), name).tolist() for name in CURVE} | {"bpc": [None] * 60}
    points = [asdict(point) | {"more": 1} for point in make_points(row)]
    results.add_row(tmp_path / "b", "addition", row, curve, points, [asdict(trace) for trace in make_traces(row)])
    assert snapshot(tmp_path / "a", "addition") == snapshot(tmp_path / "b", "addition")


def test_a_row_replaces_the_one_with_its_key(tmp_path):
    make_results(tmp_path, "addition")
    old = snapshot(tmp_path, "addition")
    row = make_row("addition", 0.01, 2, updates=320_000, error=0.5)
    results.add_row(tmp_path, "addition", row, make_curve(row, points=7))
    new = snapshot(tmp_path, "addition")
    assert len(new[0]) == len(old[0])
    assert row in new[0]
    assert len(new[1][row.key][0]) == 7
    assert row.key in old[2]
    assert row.key not in new[2]
    assert row.key not in new[3]


@pytest.mark.parametrize("moves", range(5))
def test_a_write_that_is_cut_off_leaves_old_or_new(tmp_path, monkeypatch, moves):
    make_results(tmp_path / "a", "addition")
    make_results(tmp_path / "b", "addition")
    row = make_row("addition", 0.01, 2, updates=320_000, error=0.5)
    old = snapshot(tmp_path / "a", "addition")
    add(tmp_path / "b", row)
    new = snapshot(tmp_path / "b", "addition")

    class Killed(BaseException):
        pass

    left, move = [moves], os.replace

    def dying(source, target):
        if not left[0]:
            raise Killed
        left[0] -= 1
        move(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying)
        with pytest.raises(Killed):
            add(tmp_path / "a", row)
    assert snapshot(tmp_path / "a", "addition") == (new if moves else old)
    other = make_row("addition", None, 9)
    for folder in ("a", "b"):
        add(tmp_path / folder, row)
        add(tmp_path / folder, other)
    assert snapshot(tmp_path / "a", "addition") == snapshot(tmp_path / "b", "addition")


def test_a_full_disk_leaves_the_old_tables(tmp_path, monkeypatch):
    make_results(tmp_path, "parity")
    old, names = snapshot(tmp_path, "parity"), {path.name for path in tmp_path.iterdir()}

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            add(tmp_path, make_row("parity", 0.5, 0))
    assert snapshot(tmp_path, "parity") == old
    assert {path.name for path in tmp_path.iterdir()} == names


def _add_many(folder: Path, first: int) -> None:
    for seed in range(first, first + 8):
        add(folder, make_row("sort", 0.01, seed))


def test_two_processes_add_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_add_many, args=(tmp_path, first)) for first in (0, 8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    assert [row.seed for row in results.read_rows(tmp_path, "sort")] == list(range(16))
    assert len(results.read_traces(tmp_path, "sort")) == 16


def test_missing_tables_are_empty(tmp_path):
    assert snapshot(tmp_path / "nowhere", "parity") == ([], {}, {}, {})
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("12.5", "12,5", r"parity\.csv, line 2: expected 16 columns, got 17"),
        (",12.5,", ",abc,", r"parity\.csv, line 2: seconds: expected a finite number, got 'abc'"),
        (",12.5,", ",nan,", r"parity\.csv, line 2: seconds: expected a finite number, got 'nan'"),
        (",160000,", ",1e5,", r"parity\.csv, line 2: updates: expected a whole number, got '1e5'"),
        (",act,0.001,", ",act,,", r"parity\.csv, line 2: tau: expected a number with act"),
        (",act,", ",maybe,", r"parity\.csv, line 2: halting: expected act, none or fixed-K, got 'maybe'"),
        (",16,", ",0,", r"parity\.csv, line 2: expected workers >= 1"),
        ("parity,fast", "logic,fast", r"parity\.csv, line 2: task: expected parity, got 'logic'"),
        ("target_error", "wrongs", r"parity\.csv, line 1: expected the columns task,preset"),
        (",0.001,1,", ",0.001,0,", r"parity\.csv, line 3: expected every network once"),
    ],
)
def test_a_bad_table_is_named_with_its_line(tmp_path, old, new, message):
    make_results(tmp_path, "parity", seeds=2)
    path = tmp_path / "parity.csv"
    path.write_text(path.read_text().replace(old, new, 1))
    bad = path.read_bytes()
    for call in (lambda: results.read_rows(tmp_path, "parity"), lambda: add(tmp_path, make_row("parity", 0.5, 0))):
        with pytest.raises(ValueError, match=message):
            call()
    assert path.read_bytes() == bad


@pytest.mark.parametrize("content", [b"", b"\x00\xff\xfe junk", b"PK\x03\x04 cut", b'{"a": 1}', b'[{"preset": 1}]'])
@pytest.mark.parametrize("suffix", [".csv", "-curves.npz", "-difficulty.csv", "-traces.json"])
def test_a_foreign_file_is_named(tmp_path, suffix, content):
    make_results(tmp_path, "parity", taus=[0.01], seeds=1)
    path = tmp_path / f"parity{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"parity{suffix}.*: expected"):
        snapshot(tmp_path, "parity")


def test_a_damaged_archive_and_a_trace_of_other_shape(tmp_path):
    make_results(tmp_path, "addition")
    path = tmp_path / "addition-curves.npz"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"addition-curves\.npz: expected the learning curves"):
        results.read_curves(tmp_path, "addition")
    path = tmp_path / "addition-traces.json"
    networks = json.loads(path.read_text())
    networks[1]["sequences"][0]["rho"].pop()
    path.write_text(json.dumps(networks))
    with pytest.raises(ValueError, match=r"addition-traces.json, network 2: .*rho: expected a list with one item"):
        results.read_traces(tmp_path, "addition")


@pytest.mark.parametrize(
    "changes",
    [{"halting": "fixed-0", "tau": None}, {"tau": None}, {"tau": -1.0}, {"steps": math.nan}, {"error": None}],
)
def test_a_row_must_make_sense(changes):
    with pytest.raises(ValueError, match="expected"):
        replace(make_row("parity", 0.01, 0), **changes)


def test_a_row_of_another_task_is_refused(tmp_path):
    with pytest.raises(ValueError, match="task: expected logic, got a row of parity"):
        results.add_row(tmp_path, "logic", make_row("parity", 0.01, 0))
    assert not list(tmp_path.iterdir())
