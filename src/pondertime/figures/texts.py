"""Ponder time, prediction loss and prediction entropy along a piece of Wikipedia."""

import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pondertime.figures import style
from pondertime.results import SequenceTrace
from pondertime.results.select import missing, traced

# How many characters fit two columns.
WIDTH = 84
# The first characters are read with an empty state.
START = 20
SPACES = {" ": "␣", "\n": "↵", "↵": "↵", "\t": "→"}
# What the piece shown should be full of.
WANTED = {"prose": re.compile(r"[A-Za-z ,.]"), "tags": re.compile(r"</?\w[^<>]*>|\d")}


def draw(kind: str, results_dir: Path, preset: str | None) -> Figure:
    """Three panels over the same characters; ``kind`` is prose or tags. Spaces are marked by bands."""
    row, sequences = traced(results_dir, "wikipedia", preset)
    sequences = [sequence for sequence in sequences if sequence.loss is not None and sequence.entropy is not None]
    found = best_window(kind, sequences)
    if found is None:
        raise missing(results_dir, "wikipedia", "traces with XML tags" if kind == "tags" else "traces with loss")
    sequence, start = found
    part = slice(start, start + WIDTH)
    made, axes = style.panels(style.DOUBLE, 3.3, 3, rows=True)
    quantities = (("ponder ρ", sequence.rho), ("loss (bits)", sequence.loss), ("entropy (bits)", sequence.entropy))
    for panel, (label, values) in zip(axes, quantities, strict=True):
        shown = (values or [])[part]
        _panel(panel, sequence.input[part], shown)
        panel.set_ylabel(label)
        panel.set_ylim(0, 1.1 * max(*shown, 1e-9))
    made.align_ylabels(axes)
    axes[0].set_title(f"τ = {row.tau:g}, seed {row.seed}", loc="right", fontsize=7, pad=3)
    return made


def best_window(kind: str, sequences: list[SequenceTrace]) -> tuple[SequenceTrace, int] | None:
    """The piece of text with the most of what is wanted, that in the middle of equals; None where there is nothing."""
    best: list[tuple[SequenceTrace, int]] = []
    most = 0
    for sequence in sequences:
        text = "".join(letter if len(letter) == 1 else "\0" for letter in sequence.input)
        hits = [0] * (len(text) + 1)
        for match in WANTED[kind].finditer(text):
            hits[match.start()] = 4 if match.group()[0] in "<,." else 1
        if kind == "tags" and 4 not in hits:
            continue
        begin = min(START, max(0, len(text) - WIDTH))
        for start in range(begin, max(begin, len(text) - WIDTH) + 1):
            count = sum(hits[start : start + WIDTH])
            if count > most:
                best, most = [], count
            if count == most > 0:
                best.append((sequence, start))
    return best[len(best) // 2] if best else None


def glyph(letter: str) -> str:
    """A character as it stands below the axis: white space visible, what is no ASCII a dot."""
    return SPACES.get(letter) or (letter if len(letter) == 1 and "!" <= letter <= "~" else "·")


def _panel(axes: Axes, letters: Sequence[str], values: Sequence[float]) -> None:
    axes.stairs(values, [t - 0.5 for t in range(len(values) + 1)], baseline=None, color=style.BLACK, linewidth=1.0)
    for t, letter in enumerate(letters):
        if letter in SPACES:
            axes.axvspan(t - 0.5, t + 0.5, color=style.LIGHT, linewidth=0, zorder=0)
    axes.set_xlim(-0.5, len(values) - 0.5)
    axes.set_xticks(range(len(letters)), [glyph(letter) for letter in letters], family="monospace", parse_math=False)
    axes.tick_params("x", length=0, pad=2)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
