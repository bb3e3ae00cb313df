"""What a training draws, batch by batch, and what it makes of them: the sums behind a line of metrics."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pondertime.config import TrainConfig
from pondertime.tasks import Batch, Task

MEASURE_EVERY = 10  # iterations, or every interval if that is shorter
SUMS = ("sequences", "loss", "task_loss", "error", "target_error", "targets", "inputs", "rho")


def measure_every(config: TrainConfig) -> int:
    """Iterations from one batch that is measured to the next."""
    return min(MEASURE_EVERY, config.log_every)


class Interval(NamedTuple):
    """What a network saw between two lines of metrics."""

    network: int
    iterations: int
    updates: int
    sums: list[float]


class Batches:
    """A worker's training data: batch i of a network is a function of its seed, the worker, i and the type of device.

    Whatever networks it is trained with, and however often it is taken up again. Batches are sampled in chunks, as one
    large batch costs little more than a small one; they are longer on a GPU, and longer still where a program trains a
    network (``ensemble.ring``): so the same seed sees other numbers there. Those of several networks
    lie beside each other in one, row e * B + j being row j of network e.
    """

    def __init__(self, task: Task, batch_size: int, seeds: Sequence[int], worker: int, device: str) -> None:
        self.task, self.batch_size, self.seeds, self.worker, self.device = task, batch_size, seeds, worker, device
        # On a GPU a call costs more than what it draws.
        most, steps = (64, 2**16) if torch.device(device).type == "cpu" else (256, 2**20)
        self.per_chunk = max(1, min(most, steps // (batch_size * task.steps)))
        self.chunk: tuple[int, Batch] | None = None
        self.full = False  # whether all sequences of the chunk have the task's length

    def __getitem__(self, i: int) -> Batch:
        number, place = divmod(i, self.per_chunk)
        if self.chunk is None or self.chunk[0] != number:
            self.chunk = number, beside([self.sample(seed, number) for seed in self.seeds], self.per_chunk)
            self.full = int(self.chunk[1].lengths.min()) == self.task.steps
        rows = self.batch_size * len(self.seeds)
        return self.chunk[1].rows(slice(place * rows, (place + 1) * rows))

    def sample(self, seed: int, number: int) -> Batch:
        return self.task.sample(self.batch_size * self.per_chunk, self.generator(seed, number))

    def generator(self, seed: int, number: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.key(seed, number))

    def key(self, seed: int, number: int) -> int:
        """The seed of a chunk."""
        return int(np.random.SeedSequence([seed, self.worker, number]).generate_state(1, np.uint64)[0])


def beside(chunks: list[Batch], batches: int) -> Batch:
    """Chunks of several networks as one: the first batch of each, then the second of each, and so on."""
    if len(chunks) == 1:
        return chunks[0]

    def join(parts: list[Tensor], axis: int) -> Tensor:
        shape = parts[0].shape
        split = [a.unflatten(axis, (batches, -1)) for a in parts]
        return torch.stack(split, axis + 1).reshape(*shape[:axis], -1, *shape[axis + 1 :])

    columns: Any = zip(*chunks, (1, 1, 1, 0, 0), strict=True)
    made: Any = (None if parts[0] is None else join(parts, axis) for *parts, axis in columns)
    return Batch(*made)


def summary(sums: list[float]) -> dict[str, Any]:
    """The metrics of an interval from its sums."""
    s = dict(zip(SUMS, sums, strict=False))
    histogram = {n: int(c) for n, c in enumerate(sums[len(SUMS) :]) if c}
    inputs, sequences = max(s["inputs"], 1), max(s["sequences"], 1)
    return {
        "loss": s["loss"] / sequences,
        "task_loss": s["task_loss"] / sequences,
        "error": s["error"] / sequences,
        "target_error": s["target_error"] / sequences,
        "bpc": s["task_loss"] / max(s["targets"], 1) / math.log(2),
        "steps": sum(n * c for n, c in histogram.items()) / inputs,
        "rho": s["rho"] / inputs,
        "histogram": histogram,
    }
