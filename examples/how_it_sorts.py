"""How a network sorts: what its time at an output, and its mistakes, depend on."""

import torch
from matplotlib.figure import Figure
from torch import Tensor

from pondertime import checkpoints

NUMBERS, SEQUENCES = 15, 2000


def by_quantile(x: Tensor, y: Tensor, bins: int) -> Tensor:
    """Mean x, mean y and the standard error of y in bins of equally many points, [bins, 3]."""
    order = x.flatten().argsort()
    parts = [(x.flatten()[part], y.flatten()[part]) for part in order.chunk(bins)]
    return torch.tensor([[a.mean(), b.mean(), b.std() / len(b) ** 0.5] for a, b in parts])


def rank_correlation(x: Tensor, y: Tensor) -> float:
    ranks = torch.stack([values.flatten().argsort().argsort().double() for values in (x, y)])
    return float(torch.corrcoef(ranks)[0, 1])


def main() -> None:
    _, task, rnn = checkpoints.find("sort-act").load_network()
    batch = task.sample(SEQUENCES, torch.Generator().manual_seed(0), difficulty=NUMBERS)
    with torch.no_grad():
        output, _, ponder = rnn(batch.input)
    numbers, answers, time = batch.input[:NUMBERS, :, 0], output[NUMBERS:].argmax(2), ponder.rho[NUMBERS:]
    ascending, wrong = numbers.sort(0).values, (answers != numbers.argsort(0)).any(0)
    gaps = ascending.diff(dim=0)  # from each number to the next, [14, SEQUENCES]
    shares = torch.special.ndtr(ascending).diff(dim=0)  # of all numbers that a normal distribution has between them

    searched = by_quantile(shares, time[1:], 20)
    missed = by_quantile(gaps.amin(0), wrong.float(), 10)
    for title, table in (("share between  rho", searched), ("smallest gap  error", missed)):
        print(title, *(f"{x:.4f}  {y:.3f} ± {e:.3f}" for x, y, e in table.tolist()), sep="\n", end="\n\n")
    print(f"rank correlation of rho with the gap {rank_correlation(gaps, time[1:]):.2f}", end=", ")
    print(f"with the share of the numbers between {rank_correlation(shares, time[1:]):.2f}")

    figure = Figure(figsize=(7.5, 2.9), layout="constrained", dpi=200)
    left, right = figure.subplots(1, 2)
    left.plot(shares[:, :100].flatten(), time[1:, :100].flatten(), ".", color="0.8", markersize=2, zorder=0)
    left.errorbar(*searched.T, color="black", capsize=2)
    left.set(xlabel="share of a normal distribution\nbetween this number and the one before")
    left.set(ylabel="ponder ρ at an output", xlim=(0, 0.3), ylim=(0, 16))
    right.errorbar(*missed.T, color="black", capsize=2)
    right.set(xlabel="smallest gap between\ntwo numbers of the sequence", xscale="log")
    right.set(ylabel="sequence error rate", ylim=(0, None))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig("how_it_sorts.png")
    print("how_it_sorts.png")


if __name__ == "__main__":
    main()
