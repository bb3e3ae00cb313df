"""Learning curves, and the error against the ponder time."""

import math
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from pondertime.figures import style
from pondertime.results import Curve, Row, read_curves
from pondertime.results.select import Group, groups, mean_line, metric, missing, summary, value

# Above so many single runs their lines become an image inside the SVG.
CROWD = 100
# Mean ponder of more steps than this is shown on a logarithmic axis.
WIDE = 15
# Bits per character that the axis of final values shows.
LEAST = 0.1
# A mean of bits per character is over this share of the training: minibatches differ more than networks do.
WINDOW = 0.05


def draw(task: str, results_dir: Path, preset: str | None) -> Figure:
    """Left the learning curves, faint for a run and bold for the mean; right the error against ponder."""
    shown = groups(results_dir, task, preset)
    curves = read_curves(results_dir, task)
    lines = {row.key: _line(row, curves[row.key]) for group in shown for row in group.rows if row.key in curves}
    if not lines:
        raise missing(results_dir, task, "learning curves")
    made, (left, right) = style.panels(style.DOUBLE, 2.6, 2)
    for group in shown:
        runs = [lines[row.key] for row in group.rows if row.key in lines]
        runs_and_mean(left, group, runs, crowd=len(lines) > CROWD, window=WINDOW if task == "wikipedia" else 0)
    workers = max(row.workers for group in shown for row in group.rows)
    left.set_xlabel(f"iterations of {workers} worker{'s' if workers > 1 else ''}")
    left.xaxis.set_major_formatter(FuncFormatter(style.short))
    left.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    left.set_xlim(0, 1.02 * max(line[-1, 0] for line in lines.values()) or 1)
    left.set_ylabel(style.metric(task))
    if task == "wikipedia":
        _zoom(left, list(lines.values()))
    else:
        left.set_ylim(bottom=0)
    for group in shown:
        _against_ponder(right, group, size=30 if len(shown) <= style.MANY + 1 else 15)
    _ponder_axis(right, [row.steps for group in shown for row in group.rows])
    if task == "wikipedia":
        _at_least(right, LEAST)
    right.set_ylabel(left.get_ylabel())
    style.tau_key(made, [left, right], [group.tau for group in shown])
    return made


def _line(row: Row, curve: Curve) -> np.ndarray:
    """Iterations and error [K, 2]; where nothing was measured during training, the end alone."""
    line = np.stack([curve.updates / row.workers, getattr(curve, metric(row.task))], axis=1)
    line = line[np.isfinite(line).all(1)]
    return line if len(line) else np.array([[row.updates / row.workers, value(row)]])


def runs_and_mean(axes: Axes, group: Group, lines: list[np.ndarray], *, crowd: bool, window: float = 0) -> None:
    """Faint lines [K, 2] of single runs and the bold line of their mean, over a window of that share of the line."""
    tau = group.tau
    # Many faint lines must not add up to a solid patch.
    alpha = 0.12 if crowd else 0.3
    axes.add_collection(
        LineCollection(lines, colors=style.colour(tau), alpha=alpha, linewidths=0.5, zorder=1, rasterized=crowd)
    )
    mean = running_mean(mean_line(lines), window)
    width = 1.0 if crowd and tau is not None else 1.5
    axes.plot(
        mean[:, 0],
        mean[:, 1],
        color=style.colour(tau),
        linestyle=style.line_style(tau),
        linewidth=width,
        marker="o" if len(mean) == 1 else "",
        markersize=4,
        zorder=4 if tau is None else 3,
    )
    axes.autoscale_view()


def running_mean(line: np.ndarray, window: float) -> np.ndarray:
    """A line [K, 2] whose points are means over a share of it; it begins and ends half a window later and sooner."""
    n = max(1, round(window * len(line)))
    return np.lib.stride_tricks.sliding_window_view(line, n, axis=0).mean(-1)


def _zoom(axes: Axes, lines: list[np.ndarray]) -> None:
    """Leave the first fifth of training out of the range of y, as the paper does."""
    start = 0.2 * max(line[-1, 0] for line in lines)
    late = np.concatenate([line[line[:, 0] >= start, 1] for line in lines])
    margin = 0.04 * (late.max() - late.min()) or 0.1
    axes.set_ylim(late.min() - margin, late.max() + margin)


def _at_least(axes: Axes, span: float) -> None:
    """A range of y that does not make much of small differences."""
    low, high = axes.get_ylim()
    more = max(0, span - (high - low)) / 2
    axes.set_ylim(low - more, high + more)


def _against_ponder(axes: Axes, group: Group, *, size: float) -> None:
    """Small dots for runs, a large one for their mean, and around it an ellipse of one standard error each way."""
    steps = [row.steps for row in group.rows]
    errors = [value(row) for row in group.rows]
    ponder, error = summary(steps), summary(errors)
    if group.tau is None:
        axes.axhline(error.mean, color=style.BLACK, linestyle=":", linewidth=1.2, zorder=2)
        edge = axes.get_yaxis_transform()
        axes.text(1, error.mean, style.WITHOUT, transform=edge, ha="right", va="bottom", fontsize=7)
        return
    colour = style.colour(group.tau)
    axes.scatter(steps, errors, s=6, color=colour, alpha=0.4, linewidths=0, zorder=1)
    extent = 2 * ponder.error, 2 * error.error
    axes.add_patch(Ellipse((ponder.mean, error.mean), *extent, facecolor=colour, alpha=0.18, linewidth=0, zorder=2))
    axes.add_patch(
        Ellipse((ponder.mean, error.mean), *extent, facecolor="none", edgecolor=colour, linewidth=0.8, zorder=3)
    )
    axes.scatter([ponder.mean], [error.mean], s=size, color=colour, edgecolors="white", linewidths=0.6, zorder=4)


def log_ticks(axis: Axis) -> None:
    """Steps from 1 to 100 on a logarithmic axis."""
    axis.set_major_locator(FixedLocator([1, 2, 5, 10, 20, 50, 100]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(style.short))


def _ponder_axis(axes: Axes, steps: list[float]) -> None:
    axes.set_xlabel("ponder (mean steps per input)")
    if max(steps) > WIDE:
        axes.set_xscale("log")
        log_ticks(axes.xaxis)
        axes.set_xlim(0.93, max(steps) * 1.1)
    else:
        span = max(max(steps) - 1, 0.2)
        axes.set_xlim(1 - 0.04 * span, 1 + 1.05 * span)
        if span > 2:
            axes.set_xticks(range(1, int(1 + 1.05 * span) + 1, math.ceil(span / 9)))
