"""Sort: numbers one after the other, then their order."""

import torch

from pondertime.tasks.task import NO_TARGET, Batch, Task, at_least, drawn_or


class Sort(Task):
    """Say in which order the numbers of a sequence come.

    2 to 15 standard normal numbers, one a step, then as many steps without input, whose targets are
    the places (from 0) of the numbers in ascending order. Of two equal numbers the earlier comes first.

        0.31 -1.20 0.05  ->  1 2 0
        2.00 -0.50       ->  1 0

    Input: the number, and a flag that is 1 at the last one. ``length``: the most numbers (15 in the
    paper). Difficulty: the number of numbers.

    ``separation``: the least distance, up to rounding, of neighbours in the sorted order (0 in the
    paper, which suggests it). The number of rank r of L is moved by ``separation * (r - (L - 1) / 2)``: every order
    stays as likely as it was, no draw is rejected, and the numbers spread a little wider than normal.
    """

    name = "sort"
    cell = "lstm"
    hidden_size = 512
    batch_size = 16

    def __init__(self, length: int = 15, separation: float = 0.0) -> None:
        at_least(2, length=length)
        if not 0 <= separation < float("inf"):
            raise ValueError(f"separation: expected a number from 0 on, got {separation}")
        self.length = length
        self.separation = separation
        self.input_size = 2
        self.output_size = length
        self.steps = 2 * length
        self.difficulties = range(2, length + 1)

    def sample(self, batch_size: int, generator: torch.Generator, difficulty: int | None = None) -> Batch:
        self._check(difficulty)
        device, B = generator.device, batch_size
        counts = drawn_or(difficulty, 2, self.length, [B], generator)
        numbers = torch.randn(self.length, B, generator=generator, device=device)

        there = torch.arange(self.length, device=device).unsqueeze(1) < counts
        order = torch.argsort(numbers.masked_fill(~there, torch.inf), dim=0, stable=True)
        if self.separation:
            numbers = numbers + self.separation * (order.argsort(0) - (counts - 1) / 2)

        t = torch.arange(self.steps, device=device).unsqueeze(1)
        mask = (t >= counts) & (t < 2 * counts)
        input = torch.zeros(self.steps, B, 2, device=device)
        input[: self.length, :, 0] = numbers.masked_fill(~there, 0)
        input[:, :, 1] = t == counts - 1
        target = order.gather(0, (t - counts).clamp(0, self.length - 1))
        return Batch(
            input=input,
            target=target.masked_fill(~mask, NO_TARGET).unsqueeze(-1),
            mask=mask,
            lengths=2 * counts,
            difficulty=counts,
        )

    def input_labels(self, batch: Batch, i: int) -> list[str]:
        count = int(batch.lengths[i]) // 2
        return [f"{x:.2f}" for x in batch.input[:count, i, 0].tolist()] + [""] * count

    def render(self, batch: Batch, i: int) -> str:
        """``0.31 -1.20 0.05 -> 1 2 0``."""
        return " -> ".join(" ".join(filter(None, labels)) for labels in self.labels(batch, i))
