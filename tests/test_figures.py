"""Figures show what the stored results hold, and can be read."""

import math
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer
from matplotlib.patches import Ellipse
from matplotlib.text import Text

from fake_results import GRID, TAUS, make_curve, make_points, make_results, make_row, make_traces
from pondertime import figures, results
from pondertime.figures import examples, sequences
from pondertime.results import Curve


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    for task in ("parity", "logic", "addition", "sort", "wikipedia"):
        make_results(folder, task)
    return folder


@pytest.fixture(scope="module")
def grid(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("grid")
    make_results(folder, "parity", taus=GRID, seeds=3)
    return folder


LABELS = {
    "bar": ["time penalty τ", "sequence error rate", ">0.001<", ">0.01<", ">0.1<", "ACT"],
    "plot": [
        "iterations",
        "ponder (mean steps per input)",
        "sequence error rate",
        "τ = 0.001",
        "τ = 0.1",
        "without ACT",
    ],
    "difficulty": ["ponder", "sequence error rate", "difficulty (", "τ = 0.01", "without ACT"],
    "rnn_diagram": ["x", "W"],
    "act_diagram": ["Σ", "N"],
    "parity_example": ["input", "target", "−1"],
    "logic_example": ["NOR(1,0)=0", "Xq(0,1)=1", "ABJ", "target"],
    "addition_example": [">*<", ">-<", "time"],
    "sort_example": ["number", "flag", "−1.1", ">14<"],
    "addition_sequence": ["ponder ρ", "digits", "30558", "35476", "wrong output", "τ = 0.001"],
    "sort_sequence": ["ponder ρ", "τ = 0.001", "input", "output"],
    "enwik_bar": ["bits per character", "time penalty τ", ">0.001<"],
    "enwik_plot": ["bits per character", "iterations", "τ = 0.01"],
    "enwik_sequence": ["ponder ρ", "loss (bits)", "entropy (bits)", "␣", "τ = 0.01"],
    "enwik_sequence_2": ["ponder ρ", "loss (bits)", "entropy (bits)", "&lt;", "↵"],
}


def test_there_are_the_24_figures_of_the_paper():
    assert len(figures.NAMES) == len(set(figures.NAMES)) == 24


@pytest.mark.parametrize("name", figures.NAMES)
def test_a_figure_is_drawn_and_says_what_it_shows(stored, tmp_path, name):
    png, svg = figures.save(name, stored, tmp_path)
    assert (png, svg) == (tmp_path / f"{name}.png", tmp_path / f"{name}.svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == [png.name, svg.name]
    ink = matplotlib.image.imread(png)[..., :3].min(-1) < 0.9
    assert 0.005 < ink.mean() < 0.7
    text = svg.read_text()
    for label in LABELS.get(name) or LABELS[name.rsplit("_", 1)[1]]:
        assert label in text, label
    assert "<dc:date>" not in text


@pytest.mark.parametrize("name", [*figures.NAMES, "grid_bar", "grid_plot", "grid_difficulty"])
def test_no_text_is_small_or_cut_off_or_in_the_way_of_another(stored, grid, monkeypatch, name):
    figure = figures.draw(name.replace("grid", "parity"), grid if name.startswith("grid") else stored)
    drawn, boxes, original = [], [], Text.draw
    monkeypatch.setattr(Text, "draw", lambda self, renderer: (drawn.append(self), original(self, renderer)))
    figure.draw_without_rendering()
    monkeypatch.undo()
    width, height = figure.bbox.max
    for text in drawn:
        label = text.get_text()
        if not text.get_visible() or not label.strip():
            continue
        assert text.get_fontsize() >= 7, label
        box = Text.get_window_extent(text)
        assert box.x0 >= -1, label
        assert box.y0 >= -1, label
        assert box.x1 <= width + 1, label
        assert box.y1 <= height + 1, label
        for other, second in boxes:
            across = min(box.x1, second.x1) - max(box.x0, second.x0)
            along = min(box.y1, second.y1) - max(box.y0, second.y0)
            assert min(across, along) <= 1, (label, other)
        boxes.append((label, box))
    assert boxes


@pytest.mark.parametrize("task", ["parity", "wikipedia"])
def test_bars_are_means_with_standard_errors(tmp_path, task):
    rows = make_results(tmp_path, task, seeds=5)
    results.add_row(tmp_path, task, make_row(task, None, 0, halting="fixed-4", error=0.9, bpc=9.0))
    (axes,) = figures.draw(f"{'enwik' if task == 'wikipedia' else task}_bar", tmp_path).axes
    (bars,) = (item for item in axes.containers if isinstance(item, BarContainer))
    assert bars.errorbar is not None
    segments = bars.errorbar.lines[2][0].get_segments()
    assert len(bars) == len(segments) == 4
    for tau, bar, segment in zip((*TAUS, None), bars, segments, strict=True):
        values = [(row.bpc if task == "wikipedia" else row.error) or 0.0 for row in rows if row.tau == tau]
        mean = sum(values) / 5
        error = math.sqrt(sum((value - mean) ** 2 for value in values) / 4 / 5)
        assert bar.get_height() == pytest.approx(mean)
        assert segment[:, 1] == pytest.approx([mean - error, mean + error])


def test_ellipses_are_standard_errors_and_curves_count_iterations(tmp_path):
    rows = [row for row in make_results(tmp_path, "parity", taus=[0.01], seeds=5) if row.tau]
    left, right = figures.draw("parity_plot", tmp_path).axes
    ellipse = next(patch for patch in right.patches if isinstance(patch, Ellipse))
    steps, errors = [row.steps for row in rows], [row.error or 0.0 for row in rows]
    assert ellipse.center == pytest.approx((np.mean(steps), np.mean(errors)))
    assert ellipse.width == pytest.approx(2 * np.std(steps, ddof=1) / math.sqrt(5))
    assert ellipse.height == pytest.approx(2 * np.std(errors, ddof=1) / math.sqrt(5))
    mean = left.lines[0]
    assert np.asarray(mean.get_xdata())[-1] == 160_000 / 16
    assert mean.get_ydata() == pytest.approx(np.mean([make_curve(row).error for row in rows], axis=0))


def test_bits_per_character_are_smoothed(tmp_path):
    rows = [row for row in make_results(tmp_path, "wikipedia", taus=[0.01], seeds=2) if row.tau]
    mean = figures.draw("enwik_plot", tmp_path).axes[0].lines[0]
    x = np.mean([make_curve(row).updates / row.workers for row in rows], axis=0)
    y = np.mean([make_curve(row).bpc for row in rows], axis=0)
    # A twentieth of 60 points is three.
    assert mean.get_xdata() == pytest.approx((x[:-2] + x[1:-1] + x[2:]) / 3)
    assert mean.get_ydata() == pytest.approx((y[:-2] + y[1:-1] + y[2:]) / 3)


def test_a_tau_has_one_colour_everywhere(stored, grid):
    def found(name: str, folder: Path) -> set:
        figure = figures.draw(name, folder)
        return {to_hex(line.get_color()) for axes in figure.axes for line in axes.lines}

    assert found("parity_plot", stored) == found("sort_difficulty", stored)
    assert found("parity_plot", stored) <= found("parity_plot", grid)


def test_many_taus_have_a_colour_bar_and_few_a_legend(stored, grid):
    few, many = (figures.draw("parity_plot", folder) for folder in (stored, grid))
    assert len(few.axes) == 2
    assert len(few.legends[0].get_texts()) == 4
    assert len(many.axes) == 3
    assert many.axes[2].get_ylabel() == "time penalty τ"
    assert len(many.legends[0].get_texts()) == 1


@pytest.mark.parametrize("name", [name for name in figures.NAMES if not name.endswith(("example", "diagram"))])
def test_missing_results_name_the_command(tmp_path, name):
    task = name.split("_")[0].replace("enwik", "wikipedia")
    with pytest.raises(figures.MissingResults, match=f"make them with `pondertime sweep {task} --results "):
        figures.save(name, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    results.add_row(tmp_path, task, make_row(task, 0.01, 0))
    if not name.endswith("bar"):
        with pytest.raises(figures.MissingResults, match=f"make them with `pondertime sweep {task} --results "):
            figures.draw(name, tmp_path)


def test_the_preset_is_the_callers_or_the_commonest(tmp_path):
    make_results(tmp_path, "parity", seeds=2)
    make_results(tmp_path, "parity", taus=[0.02], seeds=3, preset="paper")

    def ticks(preset: str | None) -> list[str]:
        (axes,) = figures.draw("parity_bar", tmp_path, preset=preset).axes
        return [label.get_text() for label in axes.get_xticklabels()]

    assert ticks(None) == ticks("fast") == ["0.001", "0.01", "0.1", "without\nACT"]
    assert ticks("paper") == ["0.02", "without\nACT"]
    with pytest.raises(figures.MissingResults, match=r"fast, paper only: .*`pondertime sweep parity --preset slow`"):
        figures.draw("parity_bar", tmp_path, preset="slow")


@pytest.mark.parametrize(
    "name", ["parity_bar", "parity_plot", "parity_difficulty", "addition_sequence", "sort_sequence", "enwik_plot"]
)
def test_the_least_results_are_enough(tmp_path, name):
    """One network that never errs and never ponders, with one point on its curve."""
    task = name.split("_")[0].replace("enwik", "wikipedia")
    row = make_row(task, 0.0, 0, error=0.0, target_error=0.0, bpc=0.0, steps=1.0)
    curve = Curve(*np.zeros((5, 1)))
    results.add_row(tmp_path, task, row, curve, make_points(row)[:1], make_traces(row))
    figures.save(name, tmp_path, tmp_path / "out")


def test_the_same_results_give_the_same_bytes(stored, tmp_path):
    for name in ("parity_plot", "rnn_diagram"):
        first, second = (figures.save(name, stored, tmp_path / folder) for folder in ("a", "b"))
        assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_a_bad_table_is_no_traceback_later(tmp_path):
    make_results(tmp_path, "parity", seeds=1)
    path = tmp_path / "parity.csv"
    path.write_text(path.read_text().replace(",12.5,", ",,", 1))
    with pytest.raises(ValueError, match=r"parity\.csv, line 2: seconds: expected a finite number, got ''"):
        figures.draw("parity_bar", tmp_path)


def test_an_unknown_figure_lists_the_known(tmp_path):
    with pytest.raises(ValueError, match=r"expected one of rnn_diagram, .*enwik_sequence_2, got 'parity'"):
        figures.draw("parity", tmp_path)


def test_logic_example_holds_the_papers_truth_table():
    pairs = ((1, 1), (1, 0), (0, 1), (0, 0))
    tables = {"NOR": (0, 0, 0, 1), "Xq": (0, 0, 1, 0), "ABJ": (0, 1, 0, 0)}
    assert {name: tuple(examples.GATES[name][pair] for pair in pairs) for name in examples.GATES} == tables


def test_grey_line_counts_the_digits_of_both_numbers():
    assert sequences.digits(["4821", "97", "5182", "03"]) == [4, 6, 8, 7]


def test_figures_need_no_torch_and_no_pyplot():
    code = (
        "import sys, pondertime.figures as f; f.draw('act_diagram', 'x');"
        "print({'torch', 'matplotlib.pyplot'} & {*sys.modules})"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
