"""What is stored of a task's networks, and the statistics that claims are made of.

A mean comes with its standard error over networks. Where a claim is about an order, such as "faster with a lower tau",
it is the rank correlation over the time penalties of one seed, averaged over seeds.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pondertime.claims.words import number
from pondertime.config import TASK_NAMES
from pondertime.results import (
    Boundary,
    CharacterClass,
    Curve,
    Key,
    Point,
    Row,
    SequenceTrace,
    read_boundaries,
    read_classes,
    read_curves,
    read_difficulty,
    read_rows,
    read_traces,
)
from pondertime.results.select import Group, MissingResults, Summary, from_shown, groups, summary, value

# "About linear" is a correlation above this.
STRAIGHT = 0.95
# The share of the time penalties that tell the order of a seed.
MOST = 0.75


class Evidence(NamedTuple):
    """The stored networks of a task: those of one preset, and apart those of several workers."""

    task: str
    act: list[Group]  # by rising tau
    without: list[Row]
    asynchronous: list[Row]
    curves: dict[Key, Curve]
    points: dict[Key, list[Point]]
    traces: dict[Key, list[SequenceTrace]]
    classes: dict[Key, list[CharacterClass]]
    boundaries: dict[Key, list[Boundary]]
    elsewhere: Mapping[str, "Evidence"]  # the other tasks, where there are networks with ACT


class Finding(NamedTuple):
    """Our answer to a claim: whether it holds (None where the paper gives nothing to compare with), and from what."""

    holds: bool | None
    ours: str
    rows: Sequence[Row]


def load(results_dir: Path | str, task: str, preset: str | None = None) -> Evidence:
    """The results of a task; without rows where there are none."""
    folder = Path(results_dir)
    try:
        shown = groups(folder, task, preset)
    except MissingResults:
        shown = []
    if sum(group.tau is not None for group in shown) < 2 and all(r.workers > 1 for g in shown for r in g.rows):
        # Some networks trained by several workers are no grid.
        shown = []
    act = [group for group in shown if group.tau is not None]
    chosen = {row.key for group in shown for row in group.rows}
    return Evidence(
        task,
        act,
        [row for group in shown if group.tau is None for row in group.rows],
        [row for row in read_rows(folder, task) if row.workers > 1 and row.key not in chosen],
        read_curves(folder, task),
        read_difficulty(folder, task),
        read_traces(folder, task),
        read_classes(folder, task),
        read_boundaries(folder, task),
        {},
    )


def load_all(results_dir: Path | str, preset: str | None = None) -> dict[str, Evidence]:
    """The results of every task, each knowing the others."""
    found = {task: load(results_dir, task, preset) for task in TASK_NAMES}
    there = {task: e for task, e in found.items() if e.act}
    return {
        task: e._replace(elsewhere={other: its for other, its in there.items() if other != task})
        for task, e in found.items()
    }


def rows(chosen: Iterable[Group]) -> list[Row]:
    return [row for group in chosen for row in group.rows]


def error(group: Group | Sequence[Row]) -> Summary:
    """The mean of a task's metric: the sequence error, or bits per character."""
    return summary(value(row) for row in (group.rows if isinstance(group, Group) else group))


def steps(group: Group | Sequence[Row]) -> Summary:
    return summary(row.steps for row in (group.rows if isinstance(group, Group) else group))


def lowest(act: list[Group]) -> list[Group]:
    """The quarter of the time penalties that are lowest, at least one."""
    return act[: max(1, len(act) // 4)]


def highest(act: list[Group]) -> list[Group]:
    return act[-max(1, len(act) // 4) :]


def hardly_pondering(e: Evidence) -> list[tuple[str, list[Row]]]:
    """The networks without ACT and those of the highest time penalties that do not solve the task, by name."""
    good = successful(e)
    top = [group for group in highest(e.act) if group not in good]
    return [("without ACT", e.without), *([(f"tau from {top[0].tau:g} on", rows(top))] if top else [])]


def shown(e: Evidence, table: Mapping[Key, Any]) -> Group | None:
    """The networks at the time penalty nearest to the one whose sequences the paper shows, among those in a table."""
    there = [group for group in e.act if any(table.get(row.key) for row in group.rows)]
    return min(there, key=lambda group: from_shown(e.task, group.tau), default=None)


def successful(e: Evidence) -> list[Group]:
    """The time penalties whose mean error is below half of that without ACT."""
    limit = error(e.without).mean / 2 if e.without else 0.2
    return [group for group in e.act if error(group).mean < limit]


def unsolved(e: Evidence) -> Finding | None:
    """The answer to a claim about networks that solve the task where there are none."""
    if successful(e) or not any(row.key in e.points for row in rows(e.act)):
        return None
    return Finding(False, "no tau has half the error of the networks without ACT, or less", rows(e.act))


def reached(e: Evidence, row: Row, threshold: float) -> float | None:
    """Updates until the training error first fell below a threshold, infinite if it never did."""
    curve = e.curves.get(row.key)
    if curve is None or not len(curve.updates):
        return None
    below = np.flatnonzero(curve.error < threshold)
    return float(curve.updates[below[0]]) if len(below) else math.inf


def difficulty(e: Evidence, row: Row, quantity: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Difficulties and what was measured there."""
    points = sorted(e.points.get(row.key, []), key=lambda point: point.difficulty)
    if len(points) < 2:
        return None
    return np.array([p.difficulty for p in points], float), np.array([getattr(p, quantity) for p in points], float)


def between(e: Evidence, row: Row, quantity: str, low: int, high: int) -> float | None:
    """The mean over difficulties from low to high."""
    line = difficulty(e, row, quantity)
    if line is None:
        return None
    inside = (line[0] >= low) & (line[0] <= high)
    return float(line[1][inside].mean()) if inside.any() else None


def slope(
    e: Evidence, row: Row, low: float = -math.inf, high: float = math.inf, quantity: str = "steps"
) -> float | None:
    """The least-squares slope against difficulty, per unit of it, from low to high."""
    line = difficulty(e, row, quantity)
    if line is None:
        return None
    inside = (line[0] >= low) & (line[0] <= high)
    return float(np.polyfit(line[0][inside], line[1][inside], 1)[0]) if inside.sum() > 1 else None


def linearity(e: Evidence, row: Row) -> float | None:
    """The correlation of ponder with difficulty; 0 where ponder does not change."""
    line = difficulty(e, row, "steps")
    return None if line is None else pearson(*line)


def straight(e: Evidence, chosen: Sequence[Row]) -> Finding | None:
    """Ponder is about linear in the difficulty in most networks."""
    used, found = measured(chosen, lambda row: linearity(e, row))
    if not used:
        return None
    many = sum(r > STRAIGHT for r in found)
    text = f"a linear correlation of {number(summary(found))}, above {STRAIGHT} in {many} of {len(used)} networks"
    grouped = [[row for row in used if row.tau == tau] for tau in {row.tau for row in used}]
    means = [r for own in grouped if (r := of_means(e, own)) is not None]
    if len(means) < len(used):
        text += f", and for {sum(r > STRAIGHT for r in means)} of {len(means)} taus in the mean over their networks"
    return Finding(many > len(used) / 2, text, used)


def of_means(e: Evidence, chosen: Sequence[Row]) -> float | None:
    """The correlation of the mean ponder of some networks with difficulty, where all know the same difficulties."""
    lines = [line for row in chosen if (line := difficulty(e, row, "steps")) is not None]
    if any(len(line[0]) != len(lines[0][0]) or (line[0] != lines[0][0]).any() for line in lines):
        return None
    return pearson(lines[0][0], np.mean([line[1] for line in lines], axis=0))


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """The linear correlation; 0 where y does not change."""
    return float(np.corrcoef(x, y)[0, 1]) if y.std() > 0 else 0.0


def measured(chosen: Iterable[Row], number_of: Callable[[Row], float | None]) -> tuple[list[Row], list[float]]:
    """The networks of which a number is known, and the numbers."""
    found = [(row, n) for row in chosen if (n := number_of(row)) is not None]
    return [row for row, _ in found], [n for _, n in found]


def ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks from 0, the mean of them for equal values; infinite is the highest."""
    array = np.array(values, float)
    return np.array([(array < v).sum() + ((array == v).sum() - 1) / 2 for v in array])


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's; None where all of one are equal."""
    a, b = ranks(x), ranks(y)
    return float(np.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else None


def most_of_the_grid(act: list[Group], seed: int) -> bool:
    """Whether a seed has three time penalties and MOST of them."""
    return sum(any(row.seed == seed for row in group.rows) for group in act) >= max(3, MOST * len(act))


def against_tau(act: list[Group], number_of: Callable[[Row], float | None]) -> tuple[list[Row], list[float]]:
    """The networks of which a number is known, and its rank correlation with tau for every seed.

    A seed must have three time penalties and MOST of them: one that has a part of the grid says nothing of all of it.
    """
    known, numbers = measured(rows(act), number_of)
    found = []
    for seed in sorted({row.seed for row in known}):
        own = [(row.tau or 0, n) for row, n in zip(known, numbers, strict=True) if row.seed == seed]
        if len(own) < max(3, MOST * len(act)):
            continue
        correlation = rank_correlation(*zip(*own, strict=True))
        if correlation is not None:
            found.append(correlation)
    return known, found
