"""The computation graphs of a recurrent network, without and with adaptive computation time."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path

from pondertime.figures import style

INPUT, STATE, OUTPUT, HALT = "#cfe6f5", "#fbe3c0", "#cdebdd", "#ece3f2"
TRANSITION = "$S$"

# Inches: the radius of a unit and of a sum, half the height of a box.
RADIUS, SMALL, BOX = 0.17, 0.1, 0.24

# Heights of the rows of the ACT graph, and where things stand from the left of a step.
Y, S, H, P = 2.8, 1.97, 1.22, 0.47
FIRST, SECOND, DOTS, LAST, EDGE, SUM, FIELD = 0.87, 1.4, 1.77, 2.14, 2.36, 2.6, 3.04

Place = tuple[float, float]


def rnn() -> Figure:
    """Two steps of s_t = S(s_{t-1}, W_x x_t), y_t = W_y s_t + b_y, between dotted lines."""
    made, axes = style.canvas(style.SINGLE, 2.3)
    y, s, x, radius = 1.95, 1.15, 0.35, 0.2
    for centre, t in ((0.95, "t"), (2.35, "{t+1}")):
        _arrow(axes, (centre, x), (centre, s), "$W_x$", beside=(0.16, 0), gaps=(radius, radius))
        _arrow(axes, (centre, s), (centre, y), "$W_y$", beside=(0.16, 0), gaps=(radius, radius))
        _unit(axes, (centre, x), f"$x_{t}$", INPUT, radius)
        _unit(axes, (centre, s), f"$s_{t}$", STATE, radius)
        _unit(axes, (centre, y), f"$y_{t}$", OUTPUT, radius)
    for start, end, label in ((-0.16, 0.95, 0.08), (0.95, 2.35, 0.2), (2.35, 3.46, 0.27)):
        _arrow(axes, (start, s), (end, s), TRANSITION, beside=(label, 0.12), gaps=(radius, radius))
    _divide(axes, (0.25, 1.65, 3.05), 2.2)
    return made


def act() -> Figure:
    """The same two steps, each with N intermediate updates, halting units and the sums weighted by p."""
    made, axes = style.canvas(style.DOUBLE, 3.25)
    one, two = 0.05, 3.4
    for left, t in ((one, "t"), (two, "{t+1}")):
        _rows(axes, left, t)
        _mean_field(axes, left, t)
        axes.text(left + 0.53, S + 0.12, TRANSITION, ha="center", va="center")
        axes.text(left + (FIRST + SECOND) / 2, S + 0.12, TRANSITION, ha="center", va="center")
    _arrow(axes, (-0.15, S), (one + FIRST, S))
    _arrow(axes, (one + FIELD, S), (two + FIRST, S))
    _arrow(axes, (two + FIELD, S), (6.95, S))
    _divide(axes, (0.18, 3.48, 6.69), 3.17)
    return made


def _rows(axes: Axes, left: float, t: str) -> None:
    """The boxes of intermediate states, outputs, halting units and halting probabilities, and the input."""
    for letter, y, fill in (("s", S, STATE), ("y", Y, OUTPUT), ("h", H, HALT), ("p", P, HALT)):
        _box(axes, left + (0.28 if letter == "s" else 0.65), left + EDGE, y)
        for place, n in ((FIRST, "1"), (SECOND, "2"), (LAST, "N")):
            _unit(axes, (left + place, y), f"${letter}_{t}^{n}$", fill)
        axes.text(left + DOTS, y, "…", ha="center", va="center")
    for start, end in ((FIRST, SECOND), (SECOND, DOTS + 0.08), (DOTS - 0.08, LAST)):
        _arrow(axes, (left + start, S), (left + end, S))
    middle = left + 1.5
    _arrow(axes, (middle, S), (middle, Y), "$W_y$", beside=(0.16, 0), gaps=(BOX, BOX))
    _arrow(axes, (middle, S), (middle, H), "$W_h$", beside=(0.16, 0), gaps=(BOX, BOX))
    _arrow(axes, (middle, H), (middle, P), "$p^N = R$", beside=(0.3, 0), gaps=(BOX, BOX))
    _arrow(axes, (left + 0.41, P), (left + 0.41, S), "$W_x$", beside=(0.14, -0.37), gaps=(RADIUS, BOX))
    _unit(axes, (left + 0.41, P), f"$x_{t}$", INPUT)


def _mean_field(axes: Axes, left: float, t: str) -> None:
    """s_t and y_t, the sums of what is in the boxes, and the dashed way of the weights p to them."""
    around = left + SUM + 0.18
    below = Y - SMALL - 0.2
    for path in (
        [(left + EDGE, P), (left + SUM, P), (left + SUM, S - SMALL)],
        [(left + EDGE, P), (around, P), (around, below), (left + SUM, below), (left + SUM, Y - SMALL)],
    ):
        axes.add_patch(FancyArrowPatch(path=Path(path), linestyle=(0, (3, 2)), color=style.GREY, **_ARROW))
    for letter, y, fill in (("s", S, STATE), ("y", Y, OUTPUT)):
        _arrow(axes, (left + EDGE, y), (left + SUM, y), gaps=(0, SMALL))
        _arrow(axes, (left + SUM, y), (left + FIELD, y), gaps=(SMALL, RADIUS))
        _unit(axes, (left + SUM, y), "Σ", "white", SMALL)
        _unit(axes, (left + FIELD, y), f"${letter}_{t}$", fill)


def _box(axes: Axes, left: float, right: float, y: float) -> None:
    look = {"boxstyle": "round,pad=0,rounding_size=0.06", "facecolor": "#f7f7f7", "edgecolor": style.GREY}
    axes.add_patch(FancyBboxPatch((left, y - BOX), right - left, 2 * BOX, linewidth=0.8, **look))


def _unit(axes: Axes, place: Place, text: str, fill: str, radius: float = RADIUS) -> None:
    axes.add_patch(Circle(place, radius, facecolor=fill, edgecolor=style.BLACK, linewidth=0.7, zorder=3))
    axes.text(*place, text, ha="center", va="center", zorder=4)


_ARROW = {"arrowstyle": "-|>", "mutation_scale": 6, "linewidth": 0.8, "zorder": 2}


def _arrow(
    axes: Axes, start: Place, end: Place, text: str = "", *, beside: Place = (0, 0), gaps: Place = (RADIUS, RADIUS)
) -> None:
    """An arrow between two centres that stops short of them by ``gaps``, and a label beside its middle."""
    shrink = {"shrinkA": 72 * gaps[0], "shrinkB": 72 * gaps[1] + 0.5}
    axes.add_patch(FancyArrowPatch(start, end, color=style.BLACK, **_ARROW, **shrink))
    axes.text((start[0] + end[0]) / 2 + beside[0], (start[1] + end[1]) / 2 + beside[1], text, ha="center", va="center")


def _divide(axes: Axes, places: tuple[float, ...], top: float) -> None:
    for x in places:
        axes.plot([x, x], [0.08, top], linestyle=":", color=style.GREY, linewidth=0.9)
