"""What a task is: it draws batches, scores a network's output and shows both to a person.

Axes: T the task's largest number of steps, B the batch, I the inputs, K the classifications that
make up one target. A target that is not there is -100.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NO_TARGET = -100


class Batch(NamedTuple):
    """Sequences side by side, with zeros after the end of each."""

    input: Tensor  # [T, B, I] float32, or [T, B] int64 where a step is one symbol
    target: Tensor  # [T, B, K] int64
    mask: Tensor  # [T, B] bool, true where there is a target
    lengths: Tensor  # [B] int64
    difficulty: Tensor | None  # [B] int64, where one number says it

    def rows(self, rows: slice) -> "Batch":
        """Some of the sequences, as views: a large batch is drawn once and cut into small ones."""
        return Batch(
            self.input[:, rows],
            self.target[:, rows],
            self.mask[:, rows],
            self.lengths[rows],
            None if self.difficulty is None else self.difficulty[rows],
        )

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        return Batch(
            self.input.to(device),
            self.target.to(device),
            self.mask.to(device),
            self.lengths.to(device),
            None if self.difficulty is None else self.difficulty.to(device),
        )


class Task(ABC):
    """A supervised sequence problem with discrete targets.

    The class says what the paper used: the cell and its size, the size of a minibatch, the largest
    number of updates a step (M). An instance says the sizes, which its options may change.
    """

    name: ClassVar[str]
    cell: ClassVar[Literal["rnn", "lstm"]]
    hidden_size: ClassVar[int]
    batch_size: ClassVar[int]
    max_steps: ClassVar[int] = 100

    input_size: int
    output_size: int
    steps: int
    """T, the largest number of input steps."""
    targets: int = 1
    """K; each has ``output_size / K`` classes, or is one logistic unit where that is 1."""
    difficulties: Sequence[int] = ()
    """What ``difficulty`` may be, and the points of a difficulty curve."""

    @abstractmethod
    def sample(self, batch_size: int, generator: torch.Generator, difficulty: int | None = None) -> Batch:
        """Draw sequences on the generator's device, all of one ``difficulty`` where that is given."""

    def packed(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor] | None:
        """What ``sample`` draws, as the bits of ``ensemble.kernel_parts`` ``[1, B, ...]`` and targets ``[1, B]``.

        For a task of one step that has a shorter way to them; else None.
        """
        return None

    @abstractmethod
    def render(self, batch: Batch, i: int) -> str:
        """Sequence ``i`` with its targets, as a person reads it."""

    @abstractmethod
    def input_labels(self, batch: Batch, i: int) -> list[str]:
        """A short text for each input step of sequence ``i``."""

    def answer_label(self, classes: list[int]) -> str:
        """A short text for one answer, given its K classes."""
        return str(classes[0])

    def labels(self, batch: Batch, i: int) -> tuple[list[str], list[str]]:
        """A short text for each input step of sequence ``i`` and for each target, empty where there is none."""
        return self.input_labels(batch, i), self._answer_labels(batch.target, batch, i)

    def predictions(self, output: Tensor, batch: Batch, i: int) -> list[str]:
        """The network's answers to sequence ``i`` in the form of the target's labels."""
        return self._answer_labels(self.answers(output), batch, i)

    def answers(self, output: Tensor) -> Tensor:
        """The likeliest classes, ``[T, B, K]``, of an output ``[T, B, O]``."""
        if self.output_size == self.targets:
            return (output > 0).long()
        return output.unflatten(-1, (self.targets, -1)).argmax(-1)

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """The cross-entropy in nats, summed over a sequence's targets, ``[B]``."""
        if self.output_size == self.targets:
            target = batch.target.clamp(min=0).to(output.dtype)
            losses = F.binary_cross_entropy_with_logits(output, target, reduction="none")
            return losses.masked_fill(~batch.mask.unsqueeze(-1), 0).sum((0, 2))
        classes = self.output_size // self.targets
        losses = F.cross_entropy(
            output.reshape(-1, classes), batch.target.reshape(-1), ignore_index=NO_TARGET, reduction="none"
        )
        return losses.view(batch.target.shape).sum((0, 2))

    def error(self, output: Tensor, batch: Batch) -> Tensor:
        """1 for a sequence with any mistake, else 0, ``[B]``; one without targets is right."""
        return self._wrong(output, batch).any(0).float()

    def target_error(self, output: Tensor, batch: Batch) -> Tensor:
        """The share of a sequence's targets that are wrong, ``[B]``, a target being all K classes of a step."""
        return self._wrong(output, batch).sum(0) / batch.mask.sum(0).clamp(min=1)

    def _wrong(self, output: Tensor, batch: Batch) -> Tensor:
        return (self.answers(output) != batch.target).any(-1) & batch.mask

    def _answer_labels(self, classes: Tensor, batch: Batch, i: int) -> list[str]:
        length = int(batch.lengths[i])
        rows = zip(classes[:length, i].tolist(), batch.mask[:length, i].tolist(), strict=True)
        return [self.answer_label(row) if there else "" for row, there in rows]

    def _check(self, difficulty: int | None) -> None:
        if difficulty is None or difficulty in self.difficulties:
            return
        if not self.difficulties:
            raise ValueError(f"difficulty: {self.name} has none, got {difficulty}")
        raise ValueError(f"difficulty: expected {self.difficulties[0]} to {self.difficulties[-1]}, got {difficulty}")


def at_least(least: int, **options: int) -> None:
    """Raise unless every option is at least ``least``."""
    for name, value in options.items():
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")


def integers(low: int, high: int, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Integers from low to high, both included, with equal chance."""
    return torch.randint(low, high + 1, tuple(shape), generator=generator, device=generator.device)


def drawn_or(difficulty: int | None, low: int, high: int, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Integers from low to high, or ``difficulty`` everywhere where that is given."""
    if difficulty is None:
        return integers(low, high, shape, generator)
    return torch.full(tuple(shape), difficulty, device=generator.device)
