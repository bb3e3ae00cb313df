"""What one worker of a training does: its data, its updates, and the sums from which metrics are made."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pondertime.act import ACT
from pondertime.config import RunError, TrainConfig
from pondertime.tasks import Batch, Task

MEASURE_EVERY = 10  # iterations, or every interval if that is shorter
SUMS = ("sequences", "loss", "task_loss", "error", "target_error", "targets", "inputs", "rho")


class Diverged(RunError):
    """The loss is not finite; the last good checkpoint is kept."""

    @classmethod
    def at(cls, i: int) -> "Diverged":
        return cls(
            f"the loss is not finite at iteration {i}; the last good checkpoint is kept. Try, in another folder, "
            "a lower --learning-rate, --clip 1, a higher --tau or a lower --max-steps"
        )


class Batches:
    """A worker's training data: batch i is a function of (seed, worker, i) alone.

    Batches are sampled in chunks, as one large batch costs little more than a small one.
    """

    def __init__(self, task: Task, batch_size: int, seed: int, worker: int, device: str) -> None:
        self.task, self.batch_size, self.key, self.device = task, batch_size, (seed, worker), device
        self.per_chunk = max(1, min(64, 65_536 // (batch_size * task.steps)))
        self.chunk: tuple[int, Batch] | None = None

    def __getitem__(self, i: int) -> Batch:
        number, place = divmod(i, self.per_chunk)
        if self.chunk is None or self.chunk[0] != number:
            generator = torch.Generator(self.device)
            generator.manual_seed(int(np.random.SeedSequence([*self.key, number]).generate_state(1, np.uint64)[0]))
            self.chunk = number, self.task.sample(self.batch_size * self.per_chunk, generator)
        return self.chunk[1].rows(slice(place * self.batch_size, (place + 1) * self.batch_size))


class Learner:
    """A network, its optimiser and its data: makes updates and sums up what it sees."""

    def __init__(self, config: TrainConfig, task: Task, network: ACT, device: str, worker: int = 0) -> None:
        self.config, self.task, self.network = config, task, network
        self.batches = Batches(task, config.batch_size, config.seed, worker, device)
        self.optimiser = torch.optim.Adam(network.parameters(), config.learning_rate, (0.9, config.beta2), fused=True)
        self.sums = torch.zeros(len(SUMS) + config.max_steps + 1, dtype=torch.float64, device=device)

    def update(self, i: int) -> None:
        """Training update i: forward, backward, Adam."""
        config, batch = self.config, self.batches[i]
        try:
            output, _, ponder = self.network(batch.input, lengths=batch.lengths)
        except RuntimeError as error:
            # How every backend says that the cell gave no numbers.
            if "got NaN" not in str(error):
                raise
            raise Diverged.at(i) from None
        task_loss = self.task.loss(output, batch)
        warm = min(1.0, (i + 1) / config.tau_warmup) if config.tau_warmup else 1.0
        cost = 0.0 if config.tau is None else config.tau * warm * ponder.cost
        loss = task_loss + cost
        mean = loss.mean()
        if mean.device.type == "cpu" and not math.isfinite(mean.item()):
            raise Diverged.at(i)
        self.optimiser.zero_grad()
        mean.backward()
        if config.clip is not None:
            nn.utils.clip_grad_norm_(self.network.parameters(), config.clip)
        self.optimiser.step()
        if i % min(MEASURE_EVERY, config.log_every) == 0:
            self.measure(batch, output.detach(), loss.detach(), task_loss.detach(), ponder)

    @torch.no_grad()
    def measure(self, batch: Batch, output: Tensor, loss: Tensor, task_loss: Tensor, ponder: Any) -> None:
        """Add one batch to the sums of the interval."""
        counts = torch.bincount(ponder.steps.flatten(), minlength=self.config.max_steps + 1)
        counts[0] = 0
        columns = [
            loss.sum(),
            task_loss.sum(),
            self.task.error(output, batch).sum(),
            self.task.target_error(output, batch).sum(),
            batch.mask.sum(),
            counts.sum(),
            ponder.cost.sum(),
        ]
        self.sums[0] += len(loss)
        self.sums[1 : len(SUMS)] += torch.stack([c.to(self.sums.dtype) for c in columns])
        self.sums[len(SUMS) :] += counts[: self.config.max_steps + 1]


def attach_adam(learner: Learner, saved: dict[str, Tensor] | None = None, *, share: bool = False) -> dict[str, Tensor]:
    """Give Adam its moments from the start (or from a checkpoint), and return them by name."""
    tensors = {}
    for name, p in learner.network.named_parameters():
        fresh = {
            "step": torch.zeros((), device=p.device),
            "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
        }
        for key, value in fresh.items():
            if saved is not None:
                value.copy_(saved[f"{name}.{key}"])
            tensors[f"{name}.{key}"] = value.share_memory_() if share else value
        learner.optimiser.state[p] = fresh
    return tensors


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
