"""The result tables of a task: one row a network, with its learning curve, difficulty points and traces.

``TASK.csv`` is the table; ``TASK-curves.npz``, ``TASK-difficulty.csv`` and ``TASK-traces.json`` lie beside it
and hold what belongs to its rows; for networks that read text also ``TASK-classes.csv`` and
``TASK-boundaries.csv``. All change together: new files are written into a hidden folder, one
rename makes them count, and then they are moved into place, the csv last. A process that is killed on the way
leaves either the old tables or the new ones; readers and the next writer finish what it began.
"""

import fcntl
import os
import shutil
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pondertime.results.formats import FORMATS
from pondertime.results.records import (
    QUANTITIES,
    Boundary,
    CharacterClass,
    Curve,
    Entry,
    Key,
    Point,
    Row,
    SequenceTrace,
    record,
)

__all__ = [
    "QUANTITIES",
    "Boundary",
    "CharacterClass",
    "Curve",
    "Entry",
    "Key",
    "Point",
    "Row",
    "SequenceTrace",
    "add_row",
    "add_rows",
    "make_entry",
    "read_boundaries",
    "read_classes",
    "read_curves",
    "read_difficulty",
    "read_rows",
    "read_traces",
]


def read_rows(results_dir: Path | str, task: str) -> list[Row]:
    """The table of a task, sorted by preset, halting, tau and seed; empty where there is none."""
    return list(_read(results_dir, task, ".csv").values())


def read_curves(results_dir: Path | str, task: str) -> dict[Key, Curve]:
    """The learning curves of a task's networks."""
    return _read(results_dir, task, "-curves.npz")


def read_difficulty(results_dir: Path | str, task: str) -> dict[Key, list[Point]]:
    """The results of a task's networks against difficulty."""
    return _read(results_dir, task, "-difficulty.csv")


def read_traces(results_dir: Path | str, task: str) -> dict[Key, list[SequenceTrace]]:
    """The single sequences that were kept of a task's networks."""
    return _read(results_dir, task, "-traces.json")


def read_classes(results_dir: Path | str, task: str) -> dict[Key, list[CharacterClass]]:
    """What a task's networks do at each kind of character."""
    return _read(results_dir, task, "-classes.csv")


def read_boundaries(results_dir: Path | str, task: str) -> dict[Key, list[Boundary]]:
    """How well a task's networks tell where words and sentences end."""
    return _read(results_dir, task, "-boundaries.csv")


def add_row(
    results_dir: Path | str,
    task: str,
    row: Row,
    curve: Curve | Mapping[str, Any] | None = None,
    difficulty_rows: Sequence[Point | Mapping[str, Any]] = (),
    traces: Sequence[SequenceTrace | Mapping[str, Any]] = (),
) -> None:
    """Put one network into the tables, in place of an earlier one with the same key.

    Mappings stand for the records with their fields, None for a number that was not measured.
    """
    add_rows(results_dir, task, [make_entry(row, curve, difficulty_rows, traces)])


def make_entry(
    row: Row,
    curve: Curve | Mapping[str, Any] | None = None,
    difficulty_rows: Sequence[Point | Mapping[str, Any]] = (),
    traces: Sequence[SequenceTrace | Mapping[str, Any]] = (),
    classes: Sequence[CharacterClass] = (),
    boundaries: Sequence[Boundary] = (),
) -> Entry:
    """One network as the tables have it; mappings stand for the records with their fields."""
    return Entry(
        row,
        None if curve is None else record(Curve, curve),
        [record(Point, point) for point in difficulty_rows],
        [record(SequenceTrace, trace) for trace in traces],
        classes,
        boundaries,
    )


def add_rows(results_dir: Path | str, task: str, entries: Iterable[Entry]) -> None:
    """Put many networks into the tables with one write."""
    folder, entries = Path(results_dir), list(entries)
    for entry in entries:
        if entry.row.task != task:
            raise ValueError(f"task: expected {task}, got a row of {entry.row.task}")
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, task, write=True):
        _settle(folder, task)
        tables = {suffix: _load(folder, task, suffix) for suffix in FORMATS}
        for entry in entries:
            for table, value in zip(tables.values(), (*entry[1:], entry.row), strict=True):
                table[entry.row.key] = value
        rows = tables[".csv"]
        keys = sorted(rows, key=lambda key: (*key[:2], key[2] or 0.0, key[3]))
        contents = {}
        for suffix, table in tables.items():
            kept = {key: table[key] for key in keys if table.get(key)}
            if kept or FORMATS[suffix].always or (folder / (task + suffix)).exists():
                contents[task + suffix] = FORMATS[suffix].write(rows, kept)
        _commit(folder, task, contents)


def _read(results_dir: Path | str, task: str, suffix: str) -> dict[Key, Any]:
    with _locked(Path(results_dir), task, write=False):
        return _load(Path(results_dir), task, suffix)


def _load(folder: Path, task: str, suffix: str) -> dict[Key, Any]:
    # Where a write that counts was interrupted, its files are the newer ones.
    for path in (folder / f".{task}.ready" / (task + suffix), folder / (task + suffix)):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue
        return FORMATS[suffix].parse(path, data, task)
    return {}


@contextmanager
def _locked(folder: Path, task: str, *, write: bool) -> Generator[None, None, None]:
    """Hold the tables of a task; a reader makes no lock file, so that it needs no right to write."""
    path = folder / f".{task}.lock"
    if not write and not path.exists():
        yield
        return
    with path.open("a" if write else "r") as file:
        fcntl.flock(file, fcntl.LOCK_EX if write else fcntl.LOCK_SH)
        yield


def _commit(folder: Path, task: str, contents: dict[str, bytes]) -> None:
    staged = folder / f".{task}.staged"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    try:
        for name, data in contents.items():
            with (staged / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    os.replace(staged, folder / f".{task}.ready")
    _settle(folder, task)


def _settle(folder: Path, task: str) -> None:
    """Move the files of a write that counts into place, the csv last."""
    ready = folder / f".{task}.ready"
    if ready.is_dir():
        for suffix in FORMATS:
            if (ready / (task + suffix)).exists():
                os.replace(ready / (task + suffix), folder / (task + suffix))
        ready.rmdir()
