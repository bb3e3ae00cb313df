"""What one worker of a training does: its data, its updates, and the sums from which metrics are made."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from pondertime.act import ACT
from pondertime.batches import SUMS, Batches, Interval, measure_every
from pondertime.config import ConfigError, Diverged, TrainConfig
from pondertime.ensemble import Ensemble
from pondertime.ensemble.stepper import Stepper, by_weights
from pondertime.fused.common import Grads, Inputs, Outputs, Rules, each
from pondertime.fused.function import make_run, prepare
from pondertime.halting import NotANumber
from pondertime.tasks import Batch, Task

# With more units than this a network is heavy.
HEAVY = 512


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
        precision: str = "auto",
    ) -> None:
        self.config, self.task, self.network, self.members = config, task, network, config.size
        configs = [config.member(e) for e in range(config.size)]
        self.batches = Batches(task, config.batch_size, [c.seed for c in configs], worker, device)
        # One for all, or [E].
        self.tau: Any = configs[0].tau or 0.0
        if config.taus and config.size > 1:
            self.tau = torch.tensor([c.tau for c in configs], device=device)
        # Of each network its learning rate over that of the config, [E, 1].
        self.faster: Tensor | None = None
        if config.learning_rates:
            rates = torch.tensor([c.learning_rate for c in configs], device=device)
            self.faster = (rates / config.learning_rate).unsqueeze(1)
        self.weights = weights or Weights(network, self.members)
        self.weights.attach(network)
        self.backend = network.resolve(device)
        self.fused = self.backend if self.backend.startswith("fused") else None
        can = self.fused is not None and torch.device(device).type == "cuda"
        if precision == "bfloat16" and not can:
            raise ConfigError("--precision: products in bfloat16 are made by the fused path on a GPU")
        # Several networks on a GPU, or a large one: the product of an update is bound by the bytes of the weights.
        heavy = isinstance(network, Ensemble) or config.hidden_size > HEAVY
        self.half = can and (heavy if precision == "auto" else precision == "bfloat16")
        if self.half:
            self.backend += ", bfloat16 products"
        # What makes the updates, where they can be recorded: for batches of full length and for others.
        self.steppers: dict[bool, Stepper | None] = {}
        self.sums = torch.zeros(self.members, len(SUMS) + config.max_steps + 1, dtype=torch.float64, device=device)
        self.failed: dict[int, int] = {}  # members of an ensemble whose loss was not finite, and when
        self.iterations = [0] * config.workers

    @property
    def updates(self) -> int:
        """Updates of a network made so far, by all workers."""
        return sum(self.iterations)

    @property
    def work(self) -> int:
        """Updates of all networks."""
        return self.updates * self.members

    @property
    def least(self) -> int:
        """Iterations that every worker has made."""
        return min(self.iterations)

    def networks(self) -> list[ACT]:
        """Every network by itself; of several, with a copy of its weights."""
        if isinstance(self.network, ACT):
            return [self.network]
        return [self.network.member(e) for e in range(self.members)]

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds, by group and name."""
        return {"model": self.network.state_dict(), "optimiser": self.weights.tensors()}

    def counters(self) -> dict[str, Any]:
        """What else it holds."""
        return {"iterations": self.iterations, "sums": self.sums.tolist(), "failed": self.failed}

    def load(self, tensors: dict[str, dict[str, Tensor]], counters: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        if "step" not in tensors["optimiser"]:
            raise ValueError("its networks were trained one a program, on a GPU: go on with them there")
        self.network.load_state_dict(tensors["model"])
        self.weights.load(tensors["optimiser"])
        self.sums.copy_(torch.tensor(counters["sums"], dtype=torch.float64))
        self.failed = {int(e): int(i) for e, i in counters["failed"].items()}
        self.iterations = [int(i) for i in counters["iterations"]]

    def check_finite(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        """Note the networks whose numbers are not finite."""
        all_values = [v for group in tensors.values() for v in group.values() if v.dim()]
        for e in range(self.members):
            if not all(bool((v if self.members == 1 else v[e]).isfinite().all()) for v in all_values):
                self.fail(e, self.updates // self.config.workers)

    def fail(self, e: int, i: int) -> None:
        """A network alone ends the run; one of several is left behind, and the others go on."""
        self.failed.setdefault(e, i)
        if len(self.failed) == self.members:
            raise Diverged.at(i)

    def advance(self, until: int) -> None:
        """Make the next update."""
        self.update(self.iterations[0])
        self.iterations[0] += 1

    def closed_intervals(self) -> list[Interval]:
        """The intervals that are over, if the last update ended one."""
        return self.open_intervals() if self.iterations[0] % self.config.log_every == 0 else []

    def settle(self) -> list[Interval]:
        """Updates are made when they are asked for: nothing runs meanwhile."""
        return []

    def open_intervals(self) -> list[Interval]:
        """What was summed up since the last interval, which ends here."""
        sums = self.sums.tolist()
        self.sums.zero_()
        iteration = self.updates // self.config.workers
        return [Interval(e, iteration, self.updates, row) for e, row in enumerate(sums) if row[0] > 0]

    def update(self, i: int) -> None:
        """Training update i: forward, backward, Adam."""
        config, batch = self.config, self.batches[i]
        warm = min(1.0, (i + 1) / config.tau_warmup) if config.tau_warmup else 1.0
        price, rate = self.tau * warm, config.rate_at(i)
        stepper = self.stepper(batch)
        try:
            if stepper is not None:
                seen = stepper.step(self, i, batch, price, rate)
            else:
                seen, gradients = (self.closed_form if self.fused else self.by_autograd)(batch, price)
                gradient = torch.cat([g.reshape(self.members, -1) for g in gradients], 1)
                self.apply(i, seen.task_loss, gradient, rate)
        except NotANumber as error:
            e = error.network
            self.fail(e, i)
            for a in (self.weights.all, self.weights.exp_avg, self.weights.exp_avg_sq):
                a[e] = 0
            self.update(i)
            return
        if i % measure_every(config) == 0:
            self.measure(batch, seen, price)

    def stepper(self, batch: Batch) -> Stepper | None:
        """What makes steps of such batches by recordings; None: nothing does."""
        if self.fused is None or not self.weights.all.is_cuda:
            return None
        full = self.batches.full
        if full not in self.steppers:
            self.steppers[full] = Stepper.make(self, batch)
        return self.steppers[full]

    def by_autograd(self, batch: Batch, price: Any) -> tuple["Seen", Sequence[Tensor]]:
        """What a batch shows, and the gradient of the loss, as anyone would write it."""
        assert isinstance(self.network, ACT)
        output, _, ponder = self.network(batch.input, lengths=batch.lengths)
        task_loss = self.task.loss(output, batch)
        loss = torch.add(task_loss, ponder.cost, alpha=price).sum() / self.config.batch_size
        gradients = torch.autograd.grad(loss, list(self.network.parameters()))
        return Seen(output.detach(), task_loss.detach(), ponder.steps, ponder.remainder.detach()), gradients

    def closed_form(self, batch: Batch, price: Any) -> tuple["Seen", Sequence[Tensor]]:
        """The same by the fused path itself: autograd differentiates the task's loss by the output and no more."""
        inputs, rules = self.prepare(batch)
        with torch.no_grad():
            run = make_run(inputs, rules, plain=self.fused == "fused-calls", keep=True)
            seen, d = self.judge(run.out, batch, price, stacked=rules.stacked)
            return seen, by_weights(run.backward(d, x=False))

    def judge(self, out: Outputs, batch: Batch, price: Any, *, stacked: bool) -> tuple["Seen", Grads]:
        """What a batch shows, and the derivatives of the loss by the fused path's results."""
        # Of E networks [E, T, B, ..]; as one batch [T, E B, ..].
        one = (lambda a: a.transpose(0, 1).flatten(1, 2)) if stacked else (lambda a: a)
        y, R, own = out.y.detach().requires_grad_(), out.remainder, price / self.config.batch_size
        with torch.enable_grad():
            task_loss = self.task.loss(one(y), batch)
            (d_y,) = torch.autograd.grad(task_loss.sum() / self.config.batch_size, y)
        if isinstance(own, Tensor):
            d_remainder = own.view(-1, *[1] * (R.dim() - 1)).expand_as(R)
        else:
            d_remainder = torch.full_like(R, own)
        return Seen(one(y.detach()), task_loss.detach(), one(out.steps), one(R)), Grads(d_y, remainder=d_remainder)

    def prepare(self, batch: Batch) -> tuple[Inputs, Rules]:
        """What the fused path needs to run a batch of the current chunk."""
        lengths = None if self.batches.full else batch.lengths
        if isinstance(self.network, Ensemble):
            E = self.members
            inputs, rules = self.network.prepare(
                batch.input.unflatten(1, (E, -1)), None if lengths is None else lengths.view(E, -1)
            )
            return inputs, rules._replace(half=self.half)
        inputs, rules = prepare(self.network, batch.input, None, None)
        if lengths is not None:
            rules = rules._replace(lengths=lengths.unsqueeze(0))  # the input has zeros at padding
        if not self.half:
            return inputs, rules
        # As a stack of one: its sums and its read-out stay float32.
        with torch.no_grad():
            return each(lambda a: a.unsqueeze(0), inputs), rules._replace(stacked=True, half=True)

    def apply(self, i: int, loss: Tensor, gradient: Tensor, rate: Any) -> None:
        """What an update does to the weights; the gradient is clipped in place."""
        self.check(i, loss, gradient)
        self.step(gradient, rate)

    def check(self, i: int, loss: Tensor, gradient: Tensor) -> None:
        """Clip each network's gradient, and give one up whose loss or gradient is not finite."""
        clip, norm = self.config.clip, torch.linalg.vector_norm(gradient, dim=1)
        if gradient.device.type == "cpu":
            # A sum that is not finite is rare and dear to look into, one that is settles all.
            if not math.isfinite(float(loss.sum() + norm.sum())):
                fine = loss.view(self.members, -1).isfinite().all(1) & norm.isfinite()
                for e in (~fine).nonzero().flatten().tolist():
                    self.fail(e, i)
            elif self.members == 1 and clip is not None and float(norm) < clip:
                return
        if clip is not None:
            gradient *= (clip / (norm + 1e-6)).clamp(max=1).unsqueeze(1)
        for e in self.failed:
            # Their weights stay as they are.
            gradient[e], self.weights.exp_avg[e] = 0, 0

    def step(self, gradient: Tensor, rate: Any) -> None:
        """Adam."""
        w, config = self.weights, self.config
        # Its step is proportional to the rate.
        moved = w.all if self.faster is None else torch.zeros_like(w.all)
        with torch.no_grad():
            adam(
                [moved], [gradient], [w.exp_avg], [w.exp_avg_sq], [], [w.step], fused=True, amsgrad=False, beta1=0.9,
                beta2=config.beta2, lr=rate, weight_decay=0.0, eps=1e-8, maximize=False,
            )  # fmt: skip
            if self.faster is not None:
                w.all.addcmul_(moved, self.faster)

    @torch.no_grad()
    def measure(self, batch: Batch, seen: Seen, price: Any) -> None:
        """Add one batch to the sums of the interval."""
        E, M, sums, steps = self.members, self.config.max_steps, self.sums, seen.steps
        by_member = steps.unflatten(1, (E, -1)).transpose(0, 1).flatten(1)
        places = by_member + (M + 1) * torch.arange(E, device=steps.device).unsqueeze(1)
        counts = torch.bincount(places.flatten(), minlength=E * (M + 1)).view(E, M + 1)
        counts[:, 0] = 0
        cost = (steps + seen.remainder).sum(0)
        if isinstance(price, Tensor):
            price = price.repeat_interleave(self.config.batch_size)
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
