"""Why ponder jumps: what parity networks whose N rises beyond 32 bits do there.

Reads the tables in ``results/`` of this checkout, writes why_ponder_jumps.png where it is run.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from pondertime.claims.evidence import difficulty, load, rows
from pondertime.claims.parity import HALF, jump
from pondertime.results import Row
from pondertime.results.select import value

RESULTS = Path(__file__).parent.parent / "results"
GRIDS = {"": "constant τ", "first-weights": "first weights of 0.2", "tau-warmup": "rising τ"}
SHOWN = ("", 0.0007, 14)  # the grid, tau and seed of the network on the left
BANDS = {"less than 1": (-np.inf, 1), "1 to 2": (1, 2), "2 to 5": (2, 5), "5 or more": (5, np.inf)}
RIGHT, GUESSED = 0.1, 0.4  # a mean error below the one, and above the other


class Network(NamedTuple):
    """A network and what it does at each number of bits."""

    row: Row
    bits: np.ndarray
    errors: np.ndarray
    steps: np.ndarray
    jump: float  # how much larger N is beyond 32 bits
    gives_up: int | None  # after so many numbers of bits

    @property
    def solves(self) -> bool:
        return value(self.row) <= RIGHT

    @property
    def halves(self) -> tuple[float, float]:
        """The error up to 32 bits, and beyond."""
        return self.errors[self.bits <= HALF].mean(), self.errors[self.bits > HALF].mean()


def networks(grid: str) -> list[Network]:
    """Those with a tau up to 0.03, for which the paper's solve the task."""
    e = load(RESULTS / grid, "parity")
    found = []
    for row in rows(group for group in e.act if (group.tau or 0) <= 0.03):
        errors, steps, more = difficulty(e, row, "error"), difficulty(e, row, "steps"), jump(e, row)
        if errors is not None and steps is not None and more is not None:
            found.append(Network(row, *errors, steps[1], more, gives_up(errors[1])))
    return found


def gives_up(errors: np.ndarray) -> int | None:
    """After how many a network that was right guesses, if it does."""
    # Where two levels of error fit best, with four points or more on either side.
    cuts = range(4, len(errors) - 3)
    cut = min(cuts, key=lambda k: k * errors[:k].var() + (len(errors) - k) * errors[k:].var())
    return cut if errors[:cut].mean() < RIGHT and errors[cut:].mean() > GUESSED else None


def table(every: list[Network]) -> None:
    """Networks by how much N jumps: how many do not solve the task, and how many of all guess from some bits on."""
    print("N beyond 32 bits,            above 10 % error  guess from                median error")
    print("less N up to there  networks  (N below 1.02)  some bits on   all  1-32 bits  33-64 bits")
    for name, (low, high) in BANDS.items():
        here = [n for n in every if low <= n.jump < high]
        bad = [n for n in here if not n.solves]
        counts = f"{len(bad)} ({sum(n.row.steps < 1.02 for n in bad)})"
        guess = sum(n.gives_up is not None for n in here)
        whole, few, many = np.median([(value(n.row), *n.halves) for n in here], axis=0)
        print(f"{name:>18}  {len(here):8}  {counts:>14}  {guess:12}{whole:6.1%}  {few:9.1%}  {many:10.1%}")


def unsolved(found: dict[str, list[Network]]) -> None:
    """Of the networks that ponder and do not solve the task: which are right up to some number of bits?"""
    print("\nwith N of 1.9 or more and an error above 10 % (medians of N):")
    for grid, label in GRIDS.items():
        bad = [n for n in found[grid] if n.row.steps >= 1.9 and not n.solves]
        cut = [(n.bits[k - 1], n.steps[:k].mean(), n.steps[k:].mean()) for n in bad if (k := n.gives_up) is not None]
        bits, *halves = np.array(cut).T
        before, after = (np.median(steps) for steps in halves)
        print(f"  {label}: {len(cut)} of {len(bad)} are right up to some bits alone, {min(bits):g} to {max(bits):g};")
        print(f"    their N: {before:.1f} up to there, {after:.1f} beyond")


def draw(found: dict[str, list[Network]]) -> None:
    figure = Figure(figsize=(10, 3.4), layout="constrained", dpi=120)
    left, all_of_them = figure.subplots(1, 2)
    grid, tau, seed = SHOWN
    one = next(n for n in found[grid] if (n.row.tau, n.row.seed) == (tau, seed))
    left.plot(one.bits, one.steps, color="black")
    left.set(
        xlabel="difficulty (bits)", ylabel="ponder N", ylim=(0, None), title=f"one network (τ = {tau:g}, seed {seed})"
    )
    right = left.twinx()
    right.plot(one.bits, one.errors, color="tab:red")
    right.set_ylabel("error", color="tab:red")
    right.set_ylim(0, 1)
    for (name, label), marker in zip(GRIDS.items(), "os^", strict=True):
        jumps, errors = [n.jump for n in found[name]], [n.halves[1] for n in found[name]]
        all_of_them.plot(jumps, errors, marker, label=label, markersize=4, alpha=0.6, markeredgewidth=0)
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
    table([n for grid in found.values() for n in grid])
    unsolved(found)
    draw(found)


if __name__ == "__main__":
    main()
