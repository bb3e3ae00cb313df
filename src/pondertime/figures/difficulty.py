"""Ponder time and error against the difficulty of the input."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pondertime.figures import style
from pondertime.figures.plots import CROWD, log_ticks, runs_and_mean
from pondertime.results import read_difficulty
from pondertime.results.select import groups, missing

# Ponder of more steps than this is shown on a logarithmic axis, where growth that is linear is no straight line.
WIDE = 20
# What a task's difficulty counts.
UNITS = {
    "parity": "bits",
    "logic": "gates per vector",
    "addition": "digits per number",
    "sort": "numbers to sort",
}


def draw(task: str, results_dir: Path, preset: str | None) -> Figure:
    """Faint lines for runs and bold lines for their means, with and without ACT."""
    shown = groups(results_dir, task, preset)
    points = read_difficulty(results_dir, task)
    count = sum(row.key in points for group in shown for row in group.rows)
    if not count:
        raise missing(results_dir, task, "results by difficulty")
    made, axes = style.panels(style.DOUBLE, 2.6, 2)
    for panel, quantity, label in zip(axes, ("steps", "error"), ("ponder", "sequence error rate"), strict=True):
        for group in shown:
            lines = [
                np.array(sorted((point.difficulty, getattr(point, quantity)) for point in points[row.key]), float)
                for row in group.rows
                if row.key in points
            ]
            runs_and_mean(panel, group, lines, crowd=count > CROWD)
        panel.set_xlabel(f"difficulty ({UNITS[task]})")
        panel.set_ylabel(label)
        panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        panel.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=quantity == "steps"))
        panel.set_ylim(bottom=0)
        if quantity == "steps" and panel.get_ylim()[1] > WIDE:
            panel.set_yscale("log")
            log_ticks(panel.yaxis)
            panel.set_ylim(0.93)
    style.tau_key(made, axes, [group.tau for group in shown])
    return made
