"""Ponder time during single sequences of addition and sort."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from pondertime.figures import style
from pondertime.results import SequenceTrace
from pondertime.results.select import digits, traced


def draw(task: str, results_dir: Path, preset: str | None) -> Figure:
    """Three sequences: inputs below, outputs above (wrong ones in red), rho as the black line.

    The number of updates at a step is rho rounded up, less one. For addition the grey line is the number of digits
    of the two numbers that are summed.
    """
    row, sequences = traced(results_dir, task, preset)
    chosen = longest(sequences) if task == "addition" else spread(sequences)
    made, axes = style.panels(
        style.SINGLE if task == "addition" else style.DOUBLE, 1.35 * len(chosen) + 0.25, len(chosen), rows=True
    )
    greys = [digits(sequence.input) if task == "addition" else [] for sequence in chosen]
    top = max(max([*sequence.rho, *grey]) for sequence, grey in zip(chosen, greys, strict=True))
    for panel, sequence, grey in zip(axes, chosen, greys, strict=True):
        _panel(panel, sequence, grey)
        panel.set_ylim(0, 1.08 * top)
    handles = [Line2D([], [], color=style.BLACK, label="ponder ρ")]
    if task == "addition":
        handles.append(Line2D([], [], color=style.GREY, label="digits"))
    if any(wrong(sequence, t) for sequence in chosen for t in range(len(sequence.input))):
        handles.append(Line2D([], [], color=style.WRONG, linestyle="", marker="s", markersize=4, label="wrong output"))
    made.legend(handles=handles, loc="outside upper center", ncols=3, title=f"τ = {row.tau:g}, seed {row.seed}")
    return made


def longest(sequences: list[SequenceTrace], count: int = 3) -> list[SequenceTrace]:
    """The first few of the longest sequences."""
    return sorted(sequences, key=lambda sequence: -len(sequence.input))[:count]


def spread(sequences: list[SequenceTrace], count: int = 3) -> list[SequenceTrace]:
    """A few sequences with lengths as different as there are, the shortest of one third of the longest."""
    ordered = sorted(sequences, key=lambda sequence: len(sequence.input))
    if len(ordered) <= count:
        return ordered
    top = len(ordered[-1].input)
    chosen = []
    for part in range(1, count + 1):
        wanted = top * part / count
        best = min(ordered, key=lambda sequence: abs(len(sequence.input) - wanted))
        ordered.remove(best)
        chosen.append(best)
    return chosen


def wrong(sequence: SequenceTrace, t: int) -> bool:
    return bool(sequence.target[t]) and sequence.output[t] != sequence.target[t]


def _panel(axes: Axes, sequence: SequenceTrace, grey: list[int]) -> None:
    length = len(sequence.input)
    edges = [t - 0.5 for t in range(length + 1)]
    axes.stairs(sequence.rho, edges, fill=True, color=style.LIGHT, zorder=1)
    axes.stairs(sequence.rho, edges, baseline=None, color=style.BLACK, linewidth=1.4, zorder=3)
    if grey:
        axes.stairs(grey, edges, baseline=None, color=style.GREY, linewidth=1.4, zorder=2)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylabel("ponder ρ")
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.set_xticks(range(length), [text.replace("-", "−") for text in sequence.input])
    axes.tick_params("x", length=0, rotation=90 if length > 15 else 0)
    above = axes.secondary_xaxis("top")
    above.set_xticks(range(length), [_shown(sequence, t) for t in range(length)])
    above.tick_params("x", length=0)
    above.spines["top"].set_visible(False)
    for t, text in enumerate(above.get_xticklabels()):
        text.set_color(style.WRONG if wrong(sequence, t) else style.BLACK)
    for text, y, side in (("output", 1, 1), ("input", 0, -1)):
        axes.annotate(
            text,
            (0, y),
            (-6, side * 4),
            xycoords="axes fraction",
            textcoords="offset points",
            style="italic",
            fontsize=7,
            ha="right",
            va="bottom" if side > 0 else "top",
            color=style.GREY,
        )


def _shown(sequence: SequenceTrace, t: int) -> str:
    """An output where there is a target, without the markers behind a number."""
    return sequence.output[t].rstrip("*") if sequence.target[t] else ""
