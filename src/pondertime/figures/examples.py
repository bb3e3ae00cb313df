"""One training example of each synthetic task, drawn as coloured grids: targets above inputs, time to the right."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pondertime.figures import style

# What is written into a cell, and its fill.
Cell = tuple[str, str]

WHITE, BLACK, PALE = "#ffffff", "#000000", "#ececec"
INPUT, SECOND, TARGET = "#8ec8ec", "#f3c489", "#8fd3b6"
NOTHING: Cell = ("", BLACK)


def parity() -> Figure:
    """Eight of the 64 inputs, and the target: 1 as the number of ones is odd."""
    bits = (1, -1, 1, 1, -1, 0, 0, 0)
    made, axes = style.canvas(1.5, 2.45)
    looks = {1: ("1", INPUT), -1: ("−1", SECOND), 0: ("0", WHITE)}
    _grid(axes, (0.8, 0.1), [[looks[bit] for bit in bits]], (0.4, 0.22))
    _grid(axes, (0.8, 2.08), [[(str(bits.count(1) % 2), TARGET)]], (0.4, 0.22))
    _side(axes, 0.7, {2.19: "target", 0.98: "input"})
    return made


# The first three gates of the paper's table, by P and Q.
GATES = {
    "NOR": {(1, 1): 0, (1, 0): 0, (0, 1): 0, (0, 0): 1},
    "Xq": {(1, 1): 0, (1, 0): 0, (0, 1): 1, (0, 0): 0},
    "ABJ": {(1, 1): 0, (1, 0): 1, (0, 1): 0, (0, 0): 0},
}


def logic() -> Figure:
    """Three vectors of two gates each; b0 is the target before it, shown as 0, from the second vector on."""
    vectors = ((1, ("NOR", "Xq")), (0, ("Xq", "ABJ")), (1, ("ABJ", "NOR")))
    made, axes = style.canvas(style.SINGLE, 2.9)
    cell, carried, low = (0.36, 0.2), 0, 0.33
    for t, (b1, gates) in enumerate(vectors):
        x = 0.87 + 0.82 * t
        bits = [0, b1, *(int(name == gate) for gate in gates for name in GATES)]
        _grid(axes, (x, low), [[(str(bit), INPUT if bit else WHITE) for bit in bits]], cell)
        p, q = b1, carried
        for i, gate in enumerate(gates):
            result = GATES[gate][p, q]
            axes.text(x + 0.18, 2.75 - 0.16 * i, f"{gate}({p},{q})={result}", style="italic", fontsize=7, **_CENTRE)
            p, q = result, p
        carried = p
        _grid(axes, (x, 2.25), [[(str(carried), TARGET)]], cell)
    _side(axes, 0.8, {low + (7.5 - i) * 0.2: name for i, name in enumerate(("$b_0$", "$b_1$", *GATES, *GATES))})
    for y, name in ((low + 0.6, "$T_1$"), (low, "$T_2$")):
        axes.plot([0.46, 0.4, 0.4, 0.46], [y + 0.03, y + 0.03, y + 0.57, y + 0.57], color=style.GREY, linewidth=0.8)
        axes.text(0.24, y + 0.3, name, **_CENTRE)
    _side(axes, 0.8, {2.35: "target", 2.05: "input"})
    _time(axes, 0.87, 2.87)
    return made


def addition() -> Figure:
    """Three numbers; each cell stands for a one-hot vector, of 10 for inputs and of 11 for targets."""
    numbers = ("48", "9703", "512")
    made, axes = style.canvas(2.0, 3.05)
    cell, low = (0.36, 0.2), 0.33
    total, targets = 0, []
    for number in numbers:
        total += int(number)
        targets.append([(letter, PALE if letter == "*" else TARGET) for letter in f"{total:*<6}"])
    targets[0] = [NOTHING] * 6
    inputs = [[(letter, PALE if letter == "-" else INPUT) for letter in f"{number:-<5}"] for number in numbers]
    _grid(axes, (0.75, low), inputs, cell)
    _grid(axes, (0.75, low + 1.3), targets, cell)
    _side(axes, 0.65, {low + 1.9: "target", low + 0.5: "input"})
    _time(axes, 0.75, 1.83)
    return made


def sort() -> Figure:
    """Five numbers, then their places in ascending order; black where there is no input or no target."""
    numbers = (0.3, -1.1, 1.6, -0.2, 0.8)
    count = len(numbers)
    made, axes = style.canvas(style.SINGLE, 3.0)
    width, low = 0.265, 0.33
    order = sorted(range(count), key=lambda i: numbers[i])
    inputs = [
        [(f"{number:.1f}".replace("-", "−"), INPUT if number > 0 else SECOND), _flag(i == count - 1)]
        for i, number in enumerate(numbers)
    ]
    targets = [[("", TARGET if row == place else WHITE) for row in range(15)] for place in order]
    _grid(axes, (0.58, low), inputs + [[NOTHING] * 2] * count, (width, 0.2))
    _grid(axes, (0.58, low + 0.55), [[NOTHING] * 15] * count + targets, (width, 0.125))
    _side(axes, 0.52, {low + 0.3: "number", low + 0.1: "flag"})
    _side(axes, 0.52, {low + 0.55 + (14.5 - i) * 0.125: str(i) for i in range(15)})
    axes.text(0.13, low + 1.49, "target (place)", rotation=90, **_CENTRE)
    _time(axes, 0.58, 0.58 + 2 * count * width)
    return made


_CENTRE = {"ha": "center", "va": "center"}


def _flag(last: bool) -> Cell:
    return ("1", INPUT) if last else ("0", WHITE)


def _grid(
    axes: Axes, corner: tuple[float, float], columns: Sequence[Sequence[Cell]], cell: tuple[float, float]
) -> None:
    """Columns of cells, each from top to bottom, above the lower left corner."""
    for i, column in enumerate(columns):
        for j, (text, fill) in enumerate(column):
            x, y = corner[0] + i * cell[0], corner[1] + (len(column) - 1 - j) * cell[1]
            edge = style.GREY if fill == BLACK else BLACK
            axes.add_patch(Rectangle((x, y), *cell, facecolor=fill, edgecolor=edge, linewidth=0.5))
            axes.text(x + cell[0] / 2, y + cell[1] / 2 - 0.008, text, fontsize=7, **_CENTRE)


def _side(axes: Axes, x: float, labels: dict[float, str]) -> None:
    """Labels by height, to the left of x."""
    for y, text in labels.items():
        axes.text(x, y, text, ha="right", va="center", fontsize=7)


def _time(axes: Axes, left: float, right: float) -> None:
    axes.annotate(
        "", (right, 0.22), (left, 0.22), arrowprops={"arrowstyle": "->", "linewidth": 0.7, "color": style.GREY}
    )
    axes.text((left + right) / 2, 0.11, "time", fontsize=7, **_CENTRE)
