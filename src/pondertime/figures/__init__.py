"""The figures of the paper, by name, from stored results only.

>>> figures.save("parity_bar", Path("results"), Path("out"))
[PosixPath('out/parity_bar.png'), PosixPath('out/parity_bar.svg')]
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from PIL import Image

from pondertime.figures import bars, diagrams, difficulty, examples, plots, sequences, texts
from pondertime.figures.style import DPI, RC
from pondertime.results.select import MissingResults

__all__ = ["NAMES", "MissingResults", "draw", "save"]

# The figures that need no results, and those that are drawn from the results of a task.
_DRAWN: dict[str, Callable[[], Figure]] = {
    "rnn_diagram": diagrams.rnn,
    "act_diagram": diagrams.act,
    "parity_example": examples.parity,
    "logic_example": examples.logic,
    "addition_example": examples.addition,
    "sort_example": examples.sort,
}
_MEASURED: dict[str, Callable[[Path, str | None], Figure]] = {
    **{f"{task}_bar": partial(bars.draw, task) for task in ("parity", "logic", "addition", "sort")},
    **{f"{task}_plot": partial(plots.draw, task) for task in ("parity", "logic", "addition", "sort")},
    **{f"{task}_difficulty": partial(difficulty.draw, task) for task in ("parity", "logic", "addition", "sort")},
    "addition_sequence": partial(sequences.draw, "addition"),
    "sort_sequence": partial(sequences.draw, "sort"),
    "enwik_bar": partial(bars.draw, "wikipedia"),
    "enwik_plot": partial(plots.draw, "wikipedia"),
    "enwik_sequence": partial(texts.draw, "prose"),
    "enwik_sequence_2": partial(texts.draw, "tags"),
}

# In the order of the paper.
NAMES: tuple[str, ...] = (
    "rnn_diagram",
    "act_diagram",
    *(f"parity_{kind}" for kind in ("example", "bar", "plot", "difficulty")),
    *(f"logic_{kind}" for kind in ("example", "bar", "plot", "difficulty")),
    *(f"addition_{kind}" for kind in ("example", "bar", "plot", "difficulty", "sequence")),
    *(f"sort_{kind}" for kind in ("example", "bar", "plot", "difficulty", "sequence")),
    *(f"enwik_{kind}" for kind in ("bar", "plot", "sequence", "sequence_2")),
)


def draw(name: str, results_dir: Path | str, *, preset: str | None = None) -> Figure:
    """Draw one figure from what ``results_dir`` holds.

    ``preset``: whose networks to show, by default those of the preset with the most rows. Networks with a fixed
    number of updates are no part of the paper's figures. Raises MissingResults, which names the command that
    makes what is missing.
    """
    if name not in NAMES:
        raise ValueError(f"figure: expected one of {', '.join(NAMES)}, got {name!r}")
    with matplotlib.rc_context(RC):
        return _DRAWN[name]() if name in _DRAWN else _MEASURED[name](Path(results_dir), preset)


def _with_palette(path: Path) -> None:
    """Write a picture again with 256 colours, a third of the bytes."""
    with Image.open(path) as drawn:
        small = drawn.convert("RGB").quantize(256, kmeans=1, dither=Image.Dither.NONE)
        small.save(path, "png", optimize=True, dpi=drawn.info["dpi"])


def save(name: str, results_dir: Path | str, out_dir: Path | str, *, preset: str | None = None) -> list[Path]:
    """Draw one figure into ``out_dir`` as PNG and SVG; the same results give the same bytes."""
    figure = draw(name, results_dir, preset=preset)
    with matplotlib.rc_context(RC):
        figure.draw_without_rendering()
    # Laid out once, so that both formats agree.
    figure.set_layout_engine("none")
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
        path, beside = folder / f"{name}.{kind}", folder / f".{name}.{kind}.new"
        try:
            with matplotlib.rc_context(RC):
                figure.savefig(beside, format=kind, dpi=DPI, metadata=metadata)
            if kind == "png":
                _with_palette(beside)
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
        paths.append(path)
    return paths
