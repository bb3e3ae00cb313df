"""How a network sorts: what its time at an output depends on, and what it mistakes."""

import torch
from matplotlib.figure import Figure
from torch import Tensor

import pondertime as pt
from pondertime import checkpoints
from pondertime.tasks import Batch

SEQUENCES = 1000
MOVED, AROUND = 7, 4  # the rank, from 0, of the number that is moved; how many outputs around it are looked at


def run(rnn: pt.ACT, batch: Batch, L: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Answers, [L, SEQUENCES], and rho, [2 L, SEQUENCES], with other numbers in the place of a batch's own."""
    x = batch.input[: 2 * L].clone()
    x[:L, :, 0] = numbers
    with torch.no_grad():
        output, _, ponder = rnn(x)
    return output[L:].argmax(2), ponder.rho


def line(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Slope and correlation."""
    both = torch.stack([x.flatten(), y.flatten()])
    return float(torch.cov(both)[0, 1] / x.var()), float(torch.corrcoef(both)[0, 1])


def move(numbers: Tensor) -> Tensor:
    """The same sequences, but one number goes up by 0.7 of its way to the next: the order stays."""
    values, places = numbers.sort(0)
    up = 0.7 * (values[MOVED + 1] - values[MOVED])
    return numbers.scatter_add(0, places[MOVED : MOVED + 1], up.unsqueeze(0))


def first_mistakes(numbers: Tensor, answers: Tensor, right: Tensor) -> Tensor:
    """How far the number said is from the right one, at the first wrong output of each wrong sequence."""
    wrong = (answers != right).any(0)
    numbers, answers, right = numbers[:, wrong], answers[:, wrong], right[:, wrong]
    at = (answers != right).float().argmax(0, keepdim=True)
    said, meant = (numbers.gather(0, a.gather(0, at).clamp(max=len(numbers) - 1)) for a in (answers, right))
    return (said - meant).abs().flatten()


def draw(share: Tensor, time: Tensor, change: Tensor, gap: Tensor, distance: Tensor) -> None:
    figure = Figure(figsize=(10, 3), layout="constrained", dpi=200)
    time_of, moved, mistaken = figure.subplots(1, 3)
    time_of.plot(share[:, :100].flatten(), time[:, :100].flatten(), ".", color="0.75", markersize=2)
    parts = share.flatten().argsort().chunk(20)
    time_of.plot(*([a.flatten()[part].mean() for part in parts] for a in (share, time)), color="black")
    time_of.set(xlabel="share of a normal distribution\nbetween this number and the one before", xlim=(0, 0.3))
    time_of.set(ylabel="ponder ρ at an output", ylim=(0, 16))
    moved.bar(range(-AROUND, AROUND + 1), change, color="0.4")
    moved.axhline(0, color="black", linewidth=0.8)
    moved.set(xlabel="output, counted from that of a number\nthat was moved up", ylabel="change of ρ")
    mistaken.ecdf(gap.flatten(), color="0.6")
    mistaken.ecdf(distance, color="black")
    mistaken.text(0.15, 0.3, "a number\nand the next", color="0.5")
    mistaken.text(0.004, 0.6, "the numbers\nof a mistake", ha="right")
    mistaken.set(xlabel="distance", xscale="log", xlim=(1e-5, 5), ylabel="share of pairs below it")
    for axes in (time_of, moved, mistaken):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig("how_it_sorts.png")
    print("\nhow_it_sorts.png")


def main() -> None:
    _, task, rnn = checkpoints.find("sort-act").load_network()
    print("         rho")
    print("numbers  read  last  outputs  wrong  updates for all of a normal distribution  correlation")
    for L in (2, 3, 5, 7, 10, 15):
        batch = task.sample(SEQUENCES, torch.Generator().manual_seed(L), difficulty=L)
        numbers, right = batch.input[:L, :, 0], batch.target[L : 2 * L, :, 0]
        answers, rho = run(rnn, batch, L, numbers)
        ascending, wrong = numbers.sort(0).values, (answers != right).any(0)
        # Of a normal distribution between each number and the one before, and the time at its output.
        share, time = torch.special.ndtr(ascending).diff(dim=0), rho[L + 1 :]
        slope, correlation = line(share, time)
        where = f"{rho[: L - 1].mean():4.1f}  {rho[L - 1].mean():4.1f}  {rho[L:].mean():7.1f}"
        print(f"{L:7}  {where}  {wrong.float().mean():5.1%}  {slope:41.1f}  {correlation:11.2f}")

    # From here on of 15 numbers.
    gap = ascending.diff(dim=0)
    print("\ncorrelation of rho at an output")
    print(f"  with the share {correlation:.2f}, with the gap {line(gap, time)[1]:.2f}", end="")
    print(f", with the place of the number in the input {line(right[1:].float(), time)[1]:.2f}")

    change = (run(rnn, batch, L, move(numbers))[1] - rho).mean(1)[L:][MOVED - AROUND : MOVED + AROUND + 1]
    places = f"{MOVED - AROUND + 1} to {MOVED + AROUND + 1}"
    print(f"\nchange of rho at outputs {places} when the {MOVED + 1}th smallest number is moved up")
    print(" ", *(f"{a:+.2f}" for a in change.tolist()))

    distance = first_mistakes(numbers, answers, right)
    within = ", ".join(f"within {d:g} in {(distance < d).float().mean():.0%}" for d in (0.03, 0.01))
    print(f"\nfrom the right number to the one said at the first mistake\n  {within}, median {distance.median():.4f}")
    draw(share, time, change, gap, distance)


if __name__ == "__main__":
    main()
