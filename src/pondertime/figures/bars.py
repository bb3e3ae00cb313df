"""The final error for every time penalty and without ACT."""

import math
from pathlib import Path

from matplotlib.figure import Figure

from pondertime.figures import style
from pondertime.results.select import groups, summary, value

# More bars than this take the width of two columns.
NARROW = 10
# Up to so many have their number on them.
FEW = 5


def draw(task: str, results_dir: Path, preset: str | None) -> Figure:
    """Bars of the mean over seeds, with the standard error of the mean."""
    shown = groups(results_dir, task, preset)
    wide = len(shown) > NARROW
    made, (axes,) = style.panels(style.DOUBLE if wide else style.SINGLE, 2.2, 1)
    # A little air before the bar without ACT.
    places = [i + 0.5 * (group.tau is None) for i, group in enumerate(shown)]
    summaries = [summary(value(row) for row in group.rows) for group in shown]
    bars = axes.bar(
        places,
        [item.mean for item in summaries],
        yerr=[item.error or math.nan for item in summaries],  # of a single network none is drawn
        width=0.78,
        color=[style.GREY if group.tau is None else style.colour(group.tau) for group in shown],
        error_kw={"elinewidth": 0.9, "capsize": 1.6 if wide else 2.5, "capthick": 0.9},
    )
    if len(shown) <= FEW:
        axes.bar_label(bars, [f"{item.mean:.3f}" for item in summaries], padding=2, fontsize=7)
        axes.margins(y=0.1)
    axes.set_xticks(places, [style.name(group.tau).replace(" ", "\n") for group in shown])
    axes.tick_params("x", length=0, rotation=90 if len(shown) > FEW else 0)
    axes.set_xlim(places[0] - 0.6, places[-1] + 0.6)
    axes.set_xlabel("time penalty τ")
    axes.set_ylabel(style.metric(task))
    axes.set_ylim(bottom=0)
    return made
