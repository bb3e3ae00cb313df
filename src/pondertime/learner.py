"""What one worker of a training does: its data, its updates, and the sums from which metrics are made."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from pondertime.act import ACT
from pondertime.cells import initial_state
from pondertime.config import RunError, TrainConfig
from pondertime.ensemble import Ensemble
from pondertime.fused.common import Grads, Inputs, Rules
from pondertime.fused.function import make_run, prepare
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
    """A worker's training data: batch i of a network is a function of its seed, the worker and i alone.

    Batches are sampled in chunks, as one large batch costs little more than a small one. Those of several networks
    lie beside each other in one, row e * B + j being row j of network e.
    """

    def __init__(self, task: Task, batch_size: int, seeds: Sequence[int], worker: int, device: str) -> None:
        self.task, self.batch_size, self.seeds, self.worker, self.device = task, batch_size, seeds, worker, device
        self.per_chunk = max(1, min(64, 65_536 // (batch_size * task.steps)))
        self.chunk: tuple[int, Batch] | None = None

    def __getitem__(self, i: int) -> Batch:
        number, place = divmod(i, self.per_chunk)
        if self.chunk is None or self.chunk[0] != number:
            self.chunk = number, beside([self.sample(seed, number) for seed in self.seeds], self.per_chunk)
        rows = self.batch_size * len(self.seeds)
        return self.chunk[1].rows(slice(place * rows, (place + 1) * rows))

    def sample(self, seed: int, number: int) -> Batch:
        key = np.random.SeedSequence([seed, self.worker, number]).generate_state(1, np.uint64)[0]
        generator = torch.Generator(self.device)
        generator.manual_seed(int(key))
        return self.task.sample(self.batch_size * self.per_chunk, generator)


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


class Weights:
    """The weights of E networks as one tensor ``[E, size]``, of which their parameters are views, and Adam's moments.

    So an update is a handful of calls, however many parameters there are.
    """

    def __init__(self, network: nn.Module, members: int, *, share: bool = False) -> None:
        named = list(network.named_parameters())
        self.names, self.shapes = [k for k, _ in named], [p.shape for _, p in named]
        self.all = torch.cat([p.detach().reshape(members, -1) for _, p in named], 1)
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.all), torch.zeros_like(self.all)
        self.step = torch.zeros((), device=self.all.device)
        if share:
            for a in (self.all, self.exp_avg, self.exp_avg_sq, self.step):
                a.share_memory_()

    def views(self, a: Tensor) -> dict[str, Tensor]:
        """A tensor like ``all`` by the parameters' names."""
        sizes = [shape.numel() // len(a) for shape in self.shapes]
        parts = zip(self.names, self.shapes, a.split(sizes, 1), strict=True)
        return {name: part.view(shape) for name, shape, part in parts}

    def attach(self, network: nn.Module) -> None:
        """Make the parameters of a network views of ours."""
        views = self.views(self.all)
        for name, p in network.named_parameters():
            p.data = views[name]

    def tensors(self) -> dict[str, Tensor]:
        """Adam's state, by name."""
        moments = {key: self.views(getattr(self, key)) for key in ("exp_avg", "exp_avg_sq")}
        named = {f"{name}.{key}": a for key, views in moments.items() for name, a in views.items()}
        return {**named, "step": self.step}

    def load(self, saved: dict[str, Tensor]) -> None:
        """Take over Adam's state from a checkpoint."""
        for name, a in self.tensors().items():
            a.copy_(saved[name])


class Seen(NamedTuple):
    """What a batch shows, the networks' rows beside each other."""

    output: Tensor  # [T, E B, O]
    task_loss: Tensor  # [E B]
    steps: Tensor  # [T, E B]
    remainder: Tensor  # [T, E B]


class Learner:
    """A network, or E of them stacked, the optimiser and the data: makes updates and sums up what it sees."""

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        network: ACT | Ensemble,
        device: str,
        worker: int = 0,
        weights: Weights | None = None,
    ) -> None:
        self.config, self.task, self.network, self.members = config, task, network, config.members
        self.batches = Batches(task, config.batch_size, config.seeds, worker, device)
        self.weights = weights or Weights(network, self.members)
        self.weights.attach(network)
        backend = network.resolve(device)
        self.fused = backend if backend.startswith("fused") and torch.device(device).type == "cpu" else None
        self.sums = torch.zeros(self.members, len(SUMS) + config.max_steps + 1, dtype=torch.float64, device=device)
        self.failed: dict[int, int] = {}  # members of an ensemble whose loss was not finite, and when

    def update(self, i: int) -> None:
        """Training update i: forward, backward, Adam."""
        config, batch = self.config, self.batches[i]
        warm = min(1.0, (i + 1) / config.tau_warmup) if config.tau_warmup else 1.0
        price = 0.0 if config.tau is None else config.tau * warm
        try:
            seen, gradients = (self.closed_form if self.fused else self.by_autograd)(batch, price)
        except RuntimeError as error:
            # How every backend says that the cell gave no numbers.
            if "got NaN" not in str(error):
                raise
            raise Diverged.at(i) from None
        gradient = torch.cat([g.reshape(self.members, -1) for g in gradients], 1)
        self.check(i, seen.task_loss, gradient)
        self.step(gradient)
        if i % min(MEASURE_EVERY, config.log_every) == 0:
            self.measure(batch, seen, price)

    def by_autograd(self, batch: Batch, price: float) -> tuple["Seen", Sequence[Tensor]]:
        """What a batch shows, and the gradient of the loss, as anyone would write it."""
        assert isinstance(self.network, ACT)
        output, _, ponder = self.network(batch.input, lengths=batch.lengths)
        task_loss = self.task.loss(output, batch)
        loss = torch.add(task_loss, ponder.cost, alpha=price).sum() / self.config.batch_size
        gradients = torch.autograd.grad(loss, list(self.network.parameters()))
        return Seen(output.detach(), task_loss.detach(), ponder.steps, ponder.remainder.detach()), gradients

    def closed_form(self, batch: Batch, price: float) -> tuple["Seen", Sequence[Tensor]]:
        """The same by the fused path itself: autograd differentiates the task's loss by the output and no more."""
        inputs, rules = self.prepare(batch)
        with torch.no_grad():
            run = make_run(inputs, rules, plain=self.fused == "fused-calls", keep=True)
        # Of E networks [E, T, B, ..]; as one batch [T, E B, ..].
        one = (lambda a: a.transpose(0, 1).flatten(1, 2)) if rules.stacked else (lambda a: a)
        y = run.out.y.requires_grad_()
        task_loss = self.task.loss(one(y), batch)
        (d_y,) = torch.autograd.grad(task_loss.sum() / self.config.batch_size, y)
        with torch.no_grad():
            zeros, c = torch.zeros_like(inputs.h), None if inputs.c is None else torch.zeros_like(inputs.h)
            d_remainder = torch.full_like(run.out.remainder, price / self.config.batch_size)
            d = run.backward(Grads(d_y, zeros, c, d_remainder), x=False)
        gradients = (d.weight_ih, d.weight_hh, d.bias_ih, d.bias_hh, d.halt, d.halt_bias, d.weight_y, d.bias_y)
        seen = Seen(one(y.detach()), task_loss.detach(), one(run.out.steps), one(run.out.remainder))
        return seen, [g for g in gradients if g is not None]

    def prepare(self, batch: Batch) -> tuple[Inputs, Rules]:
        """What the fused path needs to run a batch."""
        lengths = batch.lengths if self.task.steps > 1 else None
        if isinstance(self.network, Ensemble):
            E = self.members
            return self.network.prepare(
                batch.input.unflatten(1, (E, -1)), None if lengths is None else lengths.view(E, -1)
            )
        if lengths is not None and int(lengths.min()) == self.task.steps:
            lengths = None
        state = initial_state(self.network.cell, self.network.spec, batch.input.shape[1])
        return prepare(self.network, batch.input, state, lengths)

    def check(self, i: int, loss: Tensor, gradient: Tensor) -> None:
        """Clip each network's gradient, and stop one whose loss or gradient is not finite."""
        clip, norm = self.config.clip, torch.linalg.vector_norm(gradient, dim=1)
        if gradient.device.type == "cpu":
            # A sum that is not finite is rare and dear to look into, one that is settles all.
            if not math.isfinite(float(loss.sum() + norm.sum())):
                self.stop(i, ~(loss.view(self.members, -1).isfinite().all(1) & norm.isfinite()), gradient)
            elif self.members == 1 and clip is not None and float(norm) < clip:
                return
        if clip is not None:
            gradient *= (clip / (norm + 1e-6)).clamp(max=1).nan_to_num(0).unsqueeze(1)

    def stop(self, i: int, bad: Tensor, gradient: Tensor) -> None:
        """A network alone ends the run; one of several stays as it is, and the others go on."""
        if self.members == 1:
            raise Diverged.at(i)
        for member in bad.nonzero().flatten().tolist():
            self.failed.setdefault(member, i)
        if len(self.failed) == self.members:
            raise Diverged.at(i)
        gradient[bad] = 0

    def step(self, gradient: Tensor) -> None:
        """Adam."""
        w, config = self.weights, self.config
        with torch.no_grad():
            adam(
                [w.all], [gradient], [w.exp_avg], [w.exp_avg_sq], [], [w.step], fused=True, amsgrad=False, beta1=0.9,
                beta2=config.beta2, lr=config.learning_rate, weight_decay=0.0, eps=1e-8, maximize=False,
            )  # fmt: skip

    @torch.no_grad()
    def measure(self, batch: Batch, seen: Seen, price: float) -> None:
        """Add one batch to the sums of the interval."""
        E, M, sums, steps = self.members, self.config.max_steps, self.sums, seen.steps
        by_member = steps.unflatten(1, (E, -1)).transpose(0, 1).flatten(1)
        places = by_member + (M + 1) * torch.arange(E, device=steps.device).unsqueeze(1)
        counts = torch.bincount(places.flatten(), minlength=E * (M + 1)).view(E, M + 1)
        counts[:, 0] = 0
        cost = (steps + seen.remainder).sum(0)
        columns = (
            seen.task_loss + price * cost,
            seen.task_loss,
            self.task.error(seen.output, batch),
            self.task.target_error(seen.output, batch),
            batch.mask.sum(0),
            (steps > 0).sum(0),
            cost,
        )
        sums[:, 0] += self.config.batch_size
        sums[:, 1 : len(SUMS)] += torch.stack([c.to(sums.dtype).view(E, -1).sum(1) for c in columns], 1)
        sums[:, len(SUMS) :] += counts


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
