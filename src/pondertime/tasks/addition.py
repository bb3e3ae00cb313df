"""Addition: running sums of numbers with several digits."""

import torch
import torch.nn.functional as F

from pondertime.tasks.task import NO_TARGET, Batch, Task, at_least, drawn_or, integers

# The eleventh class of a target: the number has ended. Among the inputs: no digit here.
END = 10


class Addition(Task):
    """Add up numbers, digit by digit.

    A sequence has 1 to 5 numbers of D digits, D from 1 to 5, most significant first, leading zeros
    allowed. The target, from the second step on, is the sum so far without leading zeros: six
    classes, the digits from the left, then the end marker ``*``.

        123           ->
        123, 45       ->  168***
        123, 45, 007  ->  168***, 175***
        0, 00         ->  0*****

    Input: ten elements for each digit, one of them 1, or none after the last digit. ``length``,
    ``digits``: the most numbers and the most digits (5 and 5 in the paper). Difficulty: the digits
    of every number, at length 3.
    """

    name = "addition"
    cell = "lstm"
    hidden_size = 512
    batch_size = 32
    max_steps = 20

    def __init__(self, length: int = 5, digits: int = 5) -> None:
        at_least(1, length=length, digits=digits)
        if digits > 18 or length * (10**digits - 1) >= 2**63:
            raise ValueError(f"digits: expected sums below 2^63, got {length} numbers of {digits} digits")
        self.digits = digits
        self.input_size = 10 * digits
        self.targets = len(str(length * (10**digits - 1)))
        self.output_size = 11 * self.targets
        self.steps = length
        self.difficulties = range(1, digits + 1)

    def sample(self, batch_size: int, generator: torch.Generator, difficulty: int | None = None) -> Batch:
        self._check(difficulty)
        device, T, B = generator.device, self.steps, batch_size
        lengths = drawn_or(None if difficulty is None else min(3, T), 1, T, [B], generator)
        t = torch.arange(T, device=device).unsqueeze(1)
        counts = drawn_or(difficulty, 1, self.digits, [T, B], generator).masked_fill(t >= lengths, 0)
        digits = integers(0, 9, [T, B, self.digits], generator)

        power = 10 ** torch.arange(self.targets, device=device)
        place = counts.unsqueeze(-1) - 1 - torch.arange(self.digits, device=device)
        there = place >= 0
        sums = (digits * there * power[place.clamp(min=0)]).sum(-1).cumsum(0).unsqueeze(-1)

        # The place value of the classes from the left; below 0 behind the last digit of the sum.
        place = (sums >= power).sum(-1, keepdim=True).clamp(min=1) - 1 - torch.arange(self.targets, device=device)
        target = (sums // power[place.clamp(min=0)] % 10).masked_fill(place < 0, END)
        mask = (t >= 1) & (t < lengths)
        return Batch(
            input=F.embedding(digits.masked_fill(~there, END), torch.eye(11, 10, device=device)).flatten(2),
            target=target.masked_fill(~mask.unsqueeze(-1), NO_TARGET),
            mask=mask,
            lengths=lengths,
            difficulty=None if difficulty is None else counts[0],
        )

    def input_labels(self, batch: Batch, i: int) -> list[str]:
        return [
            "".join(str(j % 10) for j, x in enumerate(row) if x)
            for row in batch.input[: int(batch.lengths[i]), i].tolist()
        ]

    def answer_label(self, classes: list[int]) -> str:
        """The digits without the end markers behind them; an answer without any digit is ``*``."""
        return "".join("*" if c == END else str(c) for c in classes).rstrip("*") or "*"

    def render(self, batch: Batch, i: int) -> str:
        """``123 + 45 = 168``, and for more numbers ``123 + 45 = 168, + 7 = 175``."""
        (text, *numbers), (_, *sums) = self.labels(batch, i)
        return text + ",".join(f" + {number} = {total}" for number, total in zip(numbers, sums, strict=True))
