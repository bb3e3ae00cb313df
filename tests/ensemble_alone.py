"""Networks that train together on a device, each against itself trained alone by the reference in float64.

The first update shows the gradient itself: Adam's first moment is a tenth of it, the second holds its square, and a
weight goes one learning rate against its sign. What comes after it is held to means over the network, since signs
change where a gradient is smaller than its error.
"""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from compare import TOLERANCE, Precision, assert_same
from pondertime.batches import SUMS
from pondertime.config import TrainConfig
from pondertime.ensemble.gpu import GpuGroup
from pondertime.learner import Learner
from pondertime.networks import build
from pondertime.tasks import Batch, Task

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

# The rows of the table for gradients, summed losses and trained weights, by how products are made.
ROWS: dict[str, tuple[Precision, Precision, Precision]] = {
    "float32": (torch.float32, torch.float32, "float32 weights"),
    "tf32": ("tf32", "sums", "tf32 weights"),
    "bfloat16": ("bfloat16 gradients", "sums", "bfloat16 weights"),
}


class InDouble:
    """Batches as they are drawn on a device, on the CPU and in float64."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __getitem__(self, i: int) -> Batch:
        batch = self.batches[i].to("cpu")
        return batch._replace(input=batch.input.double())


class Trained(NamedTuple):
    """Weights, Adam's mean of gradients and the root of that of their squares, by name."""

    weights: dict[str, Tensor]
    mean: dict[str, Tensor]
    root: dict[str, Tensor]

    @staticmethod
    def of(tensors: dict[str, dict[str, Tensor]], e: int | None = None) -> "Trained":
        """From the ``tensors()`` of what trains a network; of several, number e."""

        def own(group: str, suffix: str = "") -> dict[str, Tensor]:
            found = {name: tensors[group][name + suffix] for name in tensors["model"]}
            return {name: (a if e is None else a[e]).detach().cpu().double().clone() for name, a in found.items()}

        root = {name: a.sqrt() for name, a in own("optimiser", ".exp_avg_sq").items()}
        return Trained(own("model"), own("optimiser", ".exp_avg"), root)


class Alone:
    """A network trained alone: after its first update, after all of them, and the sums of its intervals."""

    def __init__(self, config: TrainConfig, task: Task, batches: Any, updates: int) -> None:
        self.config, self.updates = config, updates
        learner = Learner(config, task, build(config, task, backend="reference").double(), "cpu")
        learner.batches = InDouble(batches)  # type: ignore[assignment]
        self.intervals: list[tuple[int, list[float]]] = []
        for i in range(updates):
            learner.update(i)
            if i == 0:
                self.first, self.first_sums = Trained.of(learner.tensors()), learner.sums[0].tolist()
            if (i + 1) % config.log_every == 0:
                self.intervals.append((i + 1, learner.sums[0].tolist()))
                learner.sums.zero_()
        self.last = Trained.of(learner.tensors())

    def compare_first(self, made: Trained, sums: list[float], precision: str) -> None:
        """Assert that the first update is the same: the gradient, its square, a step along its sign.

        A gradient may be a small difference of large numbers, as that of the halting unit is: its error is a share of
        the cell's. It also jumps where an N flipped, and is not compared then.
        """
        row, expected, rate = ROWS[precision][0], self.first, self.config.rate_at(0)
        some = ["cell", "output"] if flips(sums, self.first_sums) else ["cell", "output", "halt"]
        for name in expected.weights:
            if name.split(".")[0] not in some:
                continue
            for a, b in ((made.mean, expected.mean), (made.root, expected.root)):
                scale = max(largest(b, name), largest(b, "cell") / 4)
                assert_same(a[name] / scale, b[name] / scale, row, name)
            g, scale = expected.mean[name], max(largest(expected.mean, name), largest(expected.mean, "cell") / 4)
            away = g.abs() > 2 * TOLERANCE[row] * scale
            off = (made.weights[name] - expected.weights[name])[away] / rate
            assert_same(off, torch.zeros_like(off), "step", name)

    def compare_last(self, made: Trained, precision: str) -> None:
        """Assert that all updates are the same: both moments in norm, the weights in the mean."""
        row, _, weights = ROWS[precision]
        for a, b in ((made.mean, self.last.mean), (made.root, self.last.root)):
            assert_same((flat(a) - flat(b)).norm() / flat(b).norm(), torch.zeros(()).double(), row)
        off = (flat(made.weights) - flat(self.last.weights)).abs().mean() / self.config.learning_rate
        assert_same(off, torch.zeros_like(off), weights)

    def compare_intervals(self, taken: list[tuple[int, list[float]]], precision: str) -> None:
        """Assert that sums of losses are the same, and but for one in a hundred (or one) N."""
        assert [i for i, _ in taken] == [i for i, _ in self.intervals]
        flipped = total = 0.0
        for (_, a), (_, b) in zip(taken, self.intervals, strict=True):
            made, known = (torch.tensor(row[:3], dtype=torch.float64).unbind() for row in (a, b))
            assert_same(made, known, ROWS[precision][1])
            flipped, total = flipped + flips(a, b), total + sum(b[len(SUMS) :])
        assert flipped <= (0 if precision == "float32" else max(1, total / 100))


def largest(tensors: dict[str, Tensor], start: str) -> float:
    """The largest number in those whose names begin so."""
    return max(float(a.abs().max()) for name, a in tensors.items() if name.startswith(start))


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([a.flatten() for a in tensors.values()])


def flips(sums: list[float], expected: list[float]) -> float:
    """How many N differ, by the histograms after the sums of an interval."""
    return sum(abs(a - b) for a, b in zip(sums[len(SUMS) :], expected[len(SUMS) :], strict=True)) / 2


def compare_members(group: GpuGroup, updates: int, members: list[int] | None = None) -> None:
    """Assert that networks of a group, all or some, train as they do alone."""
    group.run(1)
    first, sums = group.tensors(), group.sums().tolist()
    group.run(updates)
    last, taken = group.tensors(), group.take_intervals()
    assert group.iterations == [updates] * len(group.configs)
    for e in range(len(group.configs)) if members is None else members:
        alone = Alone(group.configs[e], group.task, group.ring.data[e], updates)
        alone.compare_first(Trained.of(first, e), sums[e], group.precision)
        alone.compare_last(Trained.of(last, e), group.precision)
        alone.compare_intervals([(i, row) for member, i, row in taken if member == e], group.precision)
