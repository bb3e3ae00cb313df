"""Results as a sweep would leave them, made up: networks that ponder more with a lower tau."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from pondertime import results
from pondertime.results import Curve, Entry, Point, Row, SequenceTrace

TAUS = (0.001, 0.01, 0.1)
GRID = sorted({round(i * 10.0**-j, 6) for i in range(1, 11) for j in range(1, 5)})
DIFFICULTIES = {"parity": range(1, 65, 3), "logic": range(1, 11), "addition": range(1, 6), "sort": range(2, 16)}
SUMS = (("4821", "97", "30558", "6", "774"), ("13", "5", "99021", "40", "8"), ("7", "60412", "935", "88", "10270"))
PROSE = (
    "nce of the early settlers, who had crossed the river in spring, was found again in 1902. The town grew slowly, "
    "and by the end of the century its harbour, bridges and markets were known along the whole coast. In summer, "
)
MARKUP = (
    "l the people of the town.</text>\n    </revision>\n  </page>\n  <page>\n    <title>Harbour</title>\n    "
    "<id>483920</id>\n    <revision>\n      <id>15899317</id>\n      <timestamp>2004-02-11T09:13:52Z</timestamp>\n"
)


def make_row(task: str, tau: float | None, seed: int, **changes) -> Row:
    """A network that ponders more with a lower tau and fails with a high one or without ACT."""
    random = np.random.default_rng([seed, 0 if tau is None else int(tau * 1e6)])
    level = 0.0 if tau is None else math.log10(tau or 1e-6)
    failing = 1.0 if tau is None else 1 / (1 + math.exp(-4 * (level + 1.4)))
    steps = 1.0 if tau is None else 1 + (1 - failing) * (2.0 - 1.6 * level) * random.lognormal(0, 0.25)
    error = float(np.clip(0.4 * failing + abs(random.normal(0, 0.015 + 0.03 * failing)), 0, 1))
    text = task == "wikipedia"
    values: dict[str, Any] = {
        "task": task,
        "preset": "fast",
        "halting": "none" if tau is None else "act",
        "tau": tau,
        "seed": seed,
        "updates": 160_000,
        "workers": 16,
        "error": None if text else error,
        "target_error": None if text else error / 2,
        "steps": steps,
        "rho": steps + 0.4,
        "bpc": 1.5 + 0.2 * error if text else None,
        "seconds": 12.5,
        "device": "cpu",
        "commit": "4532b5e",
        "command": f"pondertime train {task} --tau {tau}",
    }
    return Row(**(values | changes))


def make_curve(row: Row, points: int = 60) -> Curve:
    random = np.random.default_rng(row.seed)
    x = np.linspace(0, 1, points)
    nothing = np.full(points, np.nan)
    end, start, wobble = (row.error or 0), 0.5, random.normal(0, 0.012, points)
    falling = end + (start - end) / (1 + np.exp((x - 0.15 - 0.1 * random.random()) * 25)) + wobble
    bpc = nothing if row.bpc is None else row.bpc + 4 * np.exp(-x * 18) + 0.4 * np.exp(-x * 4) + wobble / 3
    error = nothing if row.error is None else np.abs(falling)
    return Curve(np.round(x * row.updates), error, error / 2, bpc, np.full(points, row.steps))


def make_points(row: Row) -> list[Point]:
    random = np.random.default_rng(row.seed)
    points = []
    levels = DIFFICULTIES.get(row.task, ())
    for level in levels:
        share = level / max(levels)
        steps = 1 + (row.steps - 1) * 2 * share * (1 + 0.1 * random.random())
        error = min(1.0, (row.error or 0) * 2 * share + 0.01 * random.random())
        points.append(Point(level, 1000, error, error / 2, steps, steps + 0.3))
    return points


def make_traces(row: Row) -> list[SequenceTrace]:
    random = np.random.default_rng(row.seed)
    if row.task == "addition":
        return [_sum(numbers, random) for numbers in (*SUMS, ("5", "12"))]
    if row.task == "sort":
        return [_order(random.normal(size=length)) for length in (3, 5, 9, 12, 15)]
    if row.task == "wikipedia":
        return [_text(PROSE, random), _text(MARKUP, random)]
    return []


def _sum(numbers, random) -> SequenceTrace:
    sums = [str(sum(int(number) for number in numbers[: t + 1])) for t in range(len(numbers))]
    target = ["", *(f"{total:*<6}" for total in sums[1:])]
    steps = [len(number) + (len(sums[t - 1]) if t else 0) + 1 for t, number in enumerate(numbers)]
    output = list(target)
    output[-1] = "1" + output[-1][1:]
    return SequenceTrace(list(numbers), output, target, steps, [n - 0.4 * random.random() for n in steps], 5)


def _order(numbers) -> SequenceTrace:
    length = len(numbers)
    order = [str(i) for i in np.argsort(numbers)]
    spike = [1 + 20 * math.exp(-abs(t - length + 1)) * length / 15 for t in range(2 * length)]
    inputs = [f"{number:.2f}" for number in numbers] + [""] * length
    target = [""] * length + order
    return SequenceTrace(inputs, target, target, [math.ceil(s) for s in spike], [s + 0.5 for s in spike], length)


def _text(text, random) -> SequenceTrace:
    rho = [2.1 + (2.5 if letter in " \n" else 4 if letter in ",.<" else 0) + 0.3 * random.random() for letter in text]
    noise = random.gamma(1.2, 1.2, len(text)).tolist()
    after = [*text[1:], " "]
    steps = [int(value) for value in rho]
    return SequenceTrace([*text], after, after, steps, rho, None, noise, [0.7 * value + 0.3 for value in noise])


def make_results(folder: Path, task: str, taus=TAUS, seeds: int = 4, **changes) -> list[Row]:
    rows = [make_row(task, tau, seed, **changes) for tau in (*taus, None) for seed in range(seeds)]
    results.add_rows(folder, task, [Entry(row, make_curve(row), make_points(row), make_traces(row)) for row in rows])
    return rows


def add(folder: Path, row: Row) -> None:
    results.add_row(folder, row.task, row, make_curve(row), make_points(row), make_traces(row))
