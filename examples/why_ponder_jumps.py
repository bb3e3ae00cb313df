"""Why ponder jumps: what parity networks whose N rises beyond 32 bits do there. From a checkout: its ``results/``."""

from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from pondertime.results import Point, Row, read_difficulty, read_rows

RESULTS = Path(__file__).parent.parent / "results"
GRIDS = {"": "constant τ", "first-weights": "first weights of 0.2", "tau-warmup": "rising τ"}
SHOWN = ("", 0.0007, 14)  # the grid, tau and seed of the network on the left
LARGE = (-np.inf, 1, 2, 5, np.inf)


def networks(grid: str) -> list[tuple[Row, list[Point]]]:
    """Those with a tau up to 0.03, for which the paper's solve the task."""
    points = read_difficulty(RESULTS / grid, "parity")
    rows = [row for row in read_rows(RESULTS / grid, "parity") if row.preset == "fast" and row.tau and row.tau <= 0.03]
    return [(row, points[row.key]) for row in rows if row.key in points]


def halves(points: list[Point], quantity: str) -> tuple[float, float]:
    """The mean of a quantity up to 32 bits, and beyond."""
    few, many = ([getattr(p, quantity) for p in points if (p.difficulty > 32) is beyond] for beyond in (False, True))
    return float(np.mean(few)), float(np.mean(many))


def table(found: dict[str, list[tuple[Row, list[Point]]]]) -> None:
    every = [network for grid in found.values() for network in grid]
    jumps = np.array([np.diff(halves(points, "steps"))[0] for _, points in every])
    errors = np.array([[row.error, *halves(points, "error")] for row, points in every])
    print("N higher beyond 32 bits by  networks  above 10 % error  median error  up to 32 bits  beyond 32 bits")
    for low, high in pairwise(LARGE):
        here = errors[(low <= jumps) & (jumps < high)]
        name = (
            f"{low:g} or more"
            if high == np.inf
            else f"less than {high:g}"
            if low == -np.inf
            else f"{low:g} to {high:g}"
        )
        middle = np.median(here, axis=0)
        numbers = (
            f"{len(here):8}  {(here[:, 0] > 0.1).sum():16}  {middle[0]:12.1%}  {middle[1]:13.1%}  {middle[2]:14.1%}"
        )
        print(f"{name:>26}  {numbers}")


def give_up(grid: list[tuple[Row, list[Point]]]) -> None:
    """Of the networks that ponder and do not solve the task: which know the answer up to some number of bits alone?"""
    bad = [points for row, points in grid if row.steps >= 1.9 and (row.error or 0) > 0.1]
    at, before, after = [], [], []
    for points in bad:
        errors, steps = np.array([(p.error, p.steps) for p in points]).T
        # Where two levels of error fit best.
        k = min(range(4, len(errors) - 3), key=lambda k: k * errors[:k].var() + (len(errors) - k) * errors[k:].var())
        if errors[:k].mean() < 0.1 and errors[k:].mean() > 0.4:
            at.append(points[k - 1].difficulty)
            before.append(steps[:k].mean())
            after.append(steps[k:].mean())
    print(
        f"\n{len(at)} of the {len(bad)} with a constant τ, N of 1.9 or more and an error above 10 % "
        f"know the answer up to {min(at)} to {max(at)} bits alone"
    )
    print(f"their N, medians: {np.median(before):.1f} up to there, {np.median(after):.1f} beyond")


def draw(found: dict[str, list[tuple[Row, list[Point]]]]) -> None:
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
        steps, errors = (np.array([halves(p, q) for _, p in found[name]]) for q in ("steps", "error"))
        all_of_them.plot(steps @ [-1, 1], errors[:, 1], marker, label=label, markersize=4, alpha=0.6, markeredgewidth=0)
    all_of_them.set_xscale("symlog", linthresh=1)
    all_of_them.set_xticks([-1, 0, 1, 10, 100], ["-1", "0", "1", "10", "100"])
    all_of_them.annotate("N = 1", (0.03, 0.5), (0.2, 0.53), color="0.4")
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
    give_up(found[""])
    draw(found)


if __name__ == "__main__":
    main()
