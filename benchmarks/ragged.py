"""Draws the time of a call with ragged halting against the updates that its tiles make, from benchmarks/data.csv."""

import csv
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).parent
OUT = HERE.parent / "docs" / "images" / "ragged_halting.png"


def read(path: Path) -> dict[str, dict[str, dict[str, float]]]:
    """By mode, halting and contestant, the values of the last commit that has them."""
    with open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["workload"] == "parity" and "rows" in row["mode"]]
    rows = [row for row in rows if row["unit"] in ("ms", "updates") and row["commit"] == rows[-1]["commit"]]
    table: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        table.setdefault(row["mode"], {}).setdefault(row["halting"], {})[row["contestant"]] = float(row["value"])
    return table


def main() -> None:
    table = read(HERE / "data.csv")
    found = [mode for mode in table if mode[0].isdigit()]
    if not found:
        raise SystemExit("data.csv has no curve of ragged halting yet: pondertime bench --only parity --device cuda")
    counts = table.pop(found[0])
    equal = [name for name in counts if name.startswith("every")]
    ragged = [name for name in counts if name not in equal]
    tile, busiest = "largest N of a tile, mean", "busiest multiprocessor"
    lines = (
        ("equal N", equal, tile, "o-", "#8a8a8a"),
        ("ragged, by the mean tile", ragged, tile, "o", "#2a788e"),
        ("ragged, by the busiest multiprocessor", ragged, busiest, "x", "#d55e00"),
    )
    figure = Figure((7.2, 2.8), layout="constrained")
    for axes, (mode, times) in zip(figure.subplots(1, len(table), squeeze=False)[0], table.items(), strict=True):
        for label, names, way, form, colour in lines:
            # Of all tiles one update each is one update.
            points = sorted((counts[n][way] / counts["every N = 1"][way], times[n]["fused"]) for n in names)
            axes.plot(*zip(*points, strict=True), form, color=colour, ms=5, label=label)
        axes.set(xlabel="updates of a tile of 16 rows", ylabel="milliseconds", title=mode, xlim=0)
        axes.set_ylim(0, 1.05 * max(found["fused"] for found in times.values()))
        axes.legend(fontsize=7, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(OUT, dpi=200)
    print(OUT)


if __name__ == "__main__":
    main()
