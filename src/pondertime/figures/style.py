"""The look of all figures: sizes, fonts, and one colour for one tau everywhere."""

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

# Inches: one column and two columns of a page.
SINGLE, DOUBLE = 3.3, 6.8
DPI = 200

BLACK = "#000000"
GREY = "#8a8a8a"
LIGHT = "#e4e4e4"
WRONG = "#d55e00"
WITHOUT = "without ACT"

RC: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.monospace": ["DejaVu Sans Mono"],
    "mathtext.fontset": "dejavusans",
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.title_fontsize": 8,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.unicode_minus": True,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "lines.linewidth": 1.4,
    "figure.dpi": DPI,
    "savefig.dpi": DPI,
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "pondertime",
}

# The grid of the paper; what lies outside takes the colour of the nearer end. Viridis without its pale end.
_SCALE = LogNorm(1e-4, 1, clip=True)
_MAP = ListedColormap(colormaps["viridis"]([i / 255 * 0.92 for i in range(256)]))
MANY = 8


def metric(task: str) -> str:
    """The name of a task's error."""
    return "bits per character" if task == "wikipedia" else "sequence error rate"


def colour(tau: float | None) -> str:
    """The colour of a time penalty, by its logarithm; black without ACT."""
    return BLACK if tau is None else to_hex(_MAP(_SCALE(max(tau, 1e-4))))


def line_style(tau: float | None) -> tuple[float, Sequence[float]]:
    """Dashed without ACT."""
    return (0, (4, 2)) if tau is None else (0, ())


def name(tau: float | None) -> str:
    return WITHOUT if tau is None else f"{tau:g}"


def figure(width: float, height: float) -> Figure:
    """An empty figure with a canvas of its own, unknown to pyplot."""
    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure for a drawing: one panel without axes, whose unit is an inch."""
    made = Figure(figsize=(width, height))
    FigureCanvasAgg(made)
    axes = made.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return made, axes


def panels(width: float, height: float, count: int, *, rows: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` panels side by side, or one above the other."""
    made = figure(width, height)
    axes = made.subplots(count, 1, squeeze=False) if rows else made.subplots(1, count, squeeze=False)
    return made, list(axes.flat)


def tau_key(made: Figure, axes: Sequence[Axes], taus: Iterable[float | None]) -> None:
    """Say which colour is which tau: a legend for a few, a colour bar for many."""
    taus = list(taus)
    many = sum(tau is not None for tau in taus) > MANY
    if many:
        bar = made.colorbar(ScalarMappable(_SCALE, _MAP), ax=list(axes), aspect=28, pad=0.02)
        bar.set_label("time penalty τ")
        bar.ax.yaxis.set_major_locator(FixedLocator([1e-4, 1e-3, 1e-2, 1e-1, 1]))
        bar.ax.yaxis.set_minor_locator(NullLocator())
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda tau, _: f"{tau:g}"))
        bar.outline.set_visible(False)  # pyrefly: ignore
        taus = [tau for tau in taus if tau is None]
    handles = [Line2D([], [], color=colour(tau), linestyle=line_style(tau), label=_legend(tau)) for tau in taus[::-1]]
    if handles:
        made.legend(handles=handles, loc="outside upper right" if many else "outside right center")


def _legend(tau: float | None) -> str:
    return WITHOUT if tau is None else f"τ = {tau:g}"


def short(number: float, _: object = None) -> str:
    """A count for an axis: 200K, 1M."""
    for size, letter in ((1e6, "M"), (1e3, "K")):
        if abs(number) >= size:
            return f"{number / size:g}{letter}"
    return f"{number:g}"
