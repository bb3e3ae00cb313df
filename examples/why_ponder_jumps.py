"""Why ponder jumps: what parity networks whose N rises beyond 32 bits do there.

Reads the tables in ``results/`` of this checkout, writes why_ponder_jumps.png where it is run.
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from pondertime.results import Point, Row, read_difficulty, read_rows

RESULTS = Path(__file__).parent.parent / "results"
GRIDS = {"": "constant τ", "first-weights": "first weights of 0.2", "tau-warmup": "rising τ"}
SHOWN = ("", 0.0007, 14)  # the grid, tau and seed of the network on the left
BANDS = {"less than 1": (-np.inf, 1), "1 to 2": (1, 2), "2 to 5": (2, 5), "5 or more": (5, np.inf)}
RIGHT, GUESSED = 0.1, 0.4  # a mean error below the one, and above the other

Networks = list[tuple[Row, list[Point]]]


def networks(grid: str) -> Networks:
    """Those with a tau up to 0.03, for which the paper's solve the task."""
    points = read_difficulty(RESULTS / grid, "parity")
    rows = [row for row in read_rows(RESULTS / grid, "parity") if row.preset == "fast" and row.tau and row.tau <= 0.03]
    return [(row, points[row.key]) for row in rows if row.key in points]


def halves(points: list[Point], quantity: str) -> tuple[float, float]:
    """The mean of a quantity up to 32 bits, and beyond."""
    few, many = ([getattr(p, quantity) for p in points if (p.difficulty > 32) is beyond] for beyond in (False, True))
    return float(np.mean(few)), float(np.mean(many))


def jump(points: list[Point]) -> float:
    """How much larger N is beyond 32 bits."""
    few, many = halves(points, "steps")
    return many - few


def gives_up(points: list[Point]) -> int | None:
    """The number of bits beyond which a network guesses, where it is right up to there."""
    errors = np.array([p.error for p in points])
    # Where two levels of error fit best, with four points or more on either side.
    cuts = range(4, len(errors) - 3)
    cut = min(cuts, key=lambda k: k * errors[:k].var() + (len(errors) - k) * errors[k:].var())
    return cut if errors[:cut].mean() < RIGHT and errors[cut:].mean() > GUESSED else None


def table(found: dict[str, Networks]) -> None:
    """Networks by how much N jumps: how many do not solve the task, and how many of all guess from some bits on."""
    every = [network for grid in found.values() for network in grid]
    print("N beyond 32 bits,                         guess from                median error")
    print("less N up to there  networks  unsolved  some bits on   all  1-32 bits  33-64 bits")
    for name, (low, high) in BANDS.items():
        here = [(row, points) for row, points in every if low <= jump(points) < high]
        errors = np.median([(row.error or 0, *halves(points, "error")) for row, points in here], axis=0)
        unsolved, guess = (
            sum((row.error or 0) > RIGHT for row, _ in here),
            sum(gives_up(p) is not None for _, p in here),
        )
        numbers = f"{errors[0]:6.1%}  {errors[1]:9.1%}  {errors[2]:10.1%}"
        print(f"{name:>18}  {len(here):8}  {unsolved:8}  {guess:12}{numbers}")


def unsolved(found: dict[str, Networks]) -> None:
    """Of the networks that ponder and do not solve the task: which are right up to some number of bits?"""
    print("\nwith N of 1.9 or more and an error above 10 %:")
    for grid, label in GRIDS.items():
        bad = [points for row, points in found[grid] if row.steps >= 1.9 and (row.error or 0) > RIGHT]
        cut = [(points, at) for points in bad if (at := gives_up(points)) is not None]
        steps = [(np.array([p.steps for p in points]), at) for points, at in cut]
        before, after = np.median([(n[:at].mean(), n[at:].mean()) for n, at in steps], axis=0)
        bits = sorted(points[at - 1].difficulty for points, at in cut)
        print(f"  {label}: {len(cut)} of {len(bad)} are right only up to some number of bits, {bits[0]} to {bits[-1]};")
        print(f"    their N, medians: {before:.1f} up to there, {after:.1f} beyond")


def draw(found: dict[str, Networks]) -> None:
    figure = Figure(figsize=(10, 3.4), layout="constrained", dpi=120)
    left, all_of_them = figure.subplots(1, 2)
    grid, tau, seed = SHOWN
    points = next(points for row, points in found[grid] if (row.tau, row.seed) == (tau, seed))
    bits = [p.difficulty for p in points]
    left.plot(bits, [p.steps for p in points], color="black")
    left.set(
        xlabel="difficulty (bits)", ylabel="ponder N", ylim=(0, None), title=f"one network (τ = {tau:g}, seed {seed})"
    )
    right = left.twinx()
    right.plot(bits, [p.error for p in points], color="tab:red")
    right.set_ylabel("error", color="tab:red")
    right.set_ylim(0, 1)
    for (name, label), marker in zip(GRIDS.items(), "os^", strict=True):
        pairs = [(jump(points), halves(points, "error")[1]) for _, points in found[name]]
        all_of_them.plot(*zip(*pairs, strict=True), marker, label=label, markersize=4, alpha=0.6, markeredgewidth=0)
    all_of_them.text(0.2, 0.53, "N = 1", color="0.4")
    all_of_them.set_xscale("symlog", linthresh=1)
    all_of_them.set_xticks([-1, 0, 1, 10, 100], ["-1", "0", "1", "10", "100"])
    all_of_them.set(xlabel="N beyond 32 bits, less N up to there", ylabel="error beyond 32 bits", ylim=(0, 0.57))
    all_of_them.set_title(f"all {sum(map(len, found.values()))} networks with τ up to 0.03")
    all_of_them.legend(frameon=False, loc=(0.01, 0.45))
    for axes in (left, right, all_of_them):
        axes.spines["top"].set_visible(False)
    figure.savefig("why_ponder_jumps.png")
    print("\nwhy_ponder_jumps.png")


def main() -> None:
    found = {grid: networks(grid) for grid in GRIDS}
    table(found)
    unsolved(found)
    draw(found)


if __name__ == "__main__":
    main()
