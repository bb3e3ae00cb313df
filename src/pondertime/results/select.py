"""Which stored networks a figure or a claim is about, and their means."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pondertime.results import Key, Row, SequenceTrace, read_rows, read_traces


class MissingResults(FileNotFoundError):
    """Results are not there; the message names the command that makes them."""


# The tau of the network whose sequences the paper shows.
SHOWN = {"addition": 9e-4, "sort": 1e-3, "wikipedia": 6e-3}


class Group(NamedTuple):
    """The networks with one time penalty, or those without ACT (tau None)."""

    tau: float | None
    rows: list[Row]


class Summary(NamedTuple):
    """A mean and its standard error, which is 0 for a single value."""

    mean: float
    error: float


def missing(results_dir: Path, task: str, what: str) -> MissingResults:
    return MissingResults(
        f"no {what} of {task} in {results_dir}: make them with `pondertime sweep {task} --results {results_dir}`; "
        "those of the docs are in the repository's results/, named with --results"
    )


def groups(results_dir: Path, task: str, preset: str | None) -> list[Group]:
    """The networks of one preset by rising tau, those without ACT last."""
    rows = [row for row in read_rows(results_dir, task) if row.halting in ("act", "none")]
    rows = [row for row in rows if getattr(row, metric(task)) is not None]
    if not rows:
        raise missing(results_dir, task, "results")
    presets = Counter(row.preset for row in rows)
    if preset is None:
        preset = max(presets, key=lambda name: (presets[name], name))
    rows = [row for row in rows if row.preset == preset]
    if not rows:
        raise MissingResults(
            f"results of {task} in {results_dir} are for {', '.join(sorted(presets))} only: "
            f"make them with `pondertime sweep {task} --preset {preset}`"
        )
    taus = sorted({row.tau for row in rows}, key=lambda tau: math.inf if tau is None else tau)
    return [Group(tau, [row for row in rows if row.tau == tau]) for tau in taus]


def metric(task: str) -> str:
    """The column that is a task's error in the paper's figures."""
    return "bpc" if task == "wikipedia" else "error"


def value(row: Row) -> float:
    return float(getattr(row, metric(row.task)))


def summary(values: Iterable[float]) -> Summary:
    numbers = np.array(list(values), float)
    spread = numbers.std(ddof=1) / math.sqrt(len(numbers)) if len(numbers) > 1 else 0.0
    return Summary(float(numbers.mean()), float(spread))


def mean_line(lines: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of lines [K, 2] of x and y: at every x that occurs, where all of them reach, linear in between."""
    lines = [line for line in lines if len(line)]
    if not lines:
        return np.empty((0, 2))
    x = np.unique(np.concatenate([line[:, 0] for line in lines]))
    x = x[(x >= max(line[0, 0] for line in lines)) & (x <= min(line[-1, 0] for line in lines))]
    return np.stack([x, np.mean([np.interp(x, line[:, 0], line[:, 1]) for line in lines], axis=0)], axis=1)


def from_shown(task: str, tau: float | None) -> float:
    """How far a time penalty is from the one whose sequences the paper shows, in orders of magnitude."""
    return abs(math.log10(max(tau or 0, 1e-9) / SHOWN[task]))


def traced(results_dir: Path, task: str, preset: str | None) -> tuple[Row, list[SequenceTrace]]:
    """The best network whose tau is nearest to the one the paper shows, among those with traces."""
    traces: dict[Key, list[SequenceTrace]] = read_traces(results_dir, task)
    rows = [row for group in groups(results_dir, task, preset) for row in group.rows]
    rows = [row for row in rows if row.tau is not None and traces.get(row.key)]
    if not rows:
        raise missing(results_dir, task, "traces")

    def rank(row: Row) -> tuple[float, float, int]:
        return round(from_shown(task, row.tau), 6), value(row), row.seed

    best = min(rows, key=rank)
    return best, traces[best.key]


def digits(inputs: Sequence[str]) -> list[int]:
    """How many digits the two numbers have that are summed at each step: the sum so far and the input."""
    counts, total = [], ""
    for number in inputs:
        number = "".join(letter for letter in number if letter.isdecimal())
        counts.append(len(total) + len(number))
        total = str(int(total or 0) + int(number or 0))
    return counts
