"""A member of a group that trains on a device, against the same network trained alone by the reference in float64."""

from typing import Any

import torch

from pondertime.ensemble.gpu import GpuGroup
from pondertime.learner import Learner
from pondertime.networks import build
from pondertime.tasks import Batch


class InDouble:
    """The batches of a member as its ring drew them, on the CPU and in float64."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __getitem__(self, i: int) -> Batch:
        batch = self.batches[i].to("cpu")
        return batch._replace(input=batch.input.double())


def train_alone(group: GpuGroup, e: int, updates: int) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """The weights, moments and (iteration, sums) of intervals of member e, trained by the reference."""
    config = group.configs[e]
    learner = Learner(config, group.task, build(config, group.task, backend="reference").double(), "cpu")
    learner.batches = InDouble(group.ring.data[e])  # type: ignore[assignment]
    intervals = []
    for i in range(updates):
        learner.update(i)
        if (i + 1) % config.log_every == 0:
            intervals.append((i + 1, learner.sums[0].tolist()))
            learner.sums.zero_()
    return learner.network.state_dict(), learner.weights.tensors(), intervals


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference as a share of the norm of what is expected."""
    return float((actual.cpu().double() - expected).norm() / expected.norm().clamp(min=1e-12))


def compare_members(group: GpuGroup, updates: int) -> dict[str, float]:
    """The largest differences of first moments (a mean of gradients) and of weights; N that flipped in metrics."""
    for scratch in group.kernel.scratch:
        scratch.fill_(float("nan"))
    group.run(updates)
    tensors, taken = group.tensors(), group.take_intervals()
    worst = {"moments": 0.0, "weights": 0.0, "flips": 0.0, "sums": 0.0}
    for e in range(len(group.configs)):
        weights, moments, intervals = train_alone(group, e, updates)
        for name, value in weights.items():
            worst["weights"] = max(worst["weights"], float((tensors["model"][name][e].cpu() - value).abs().max()))
            key = f"{name}.exp_avg"
            worst["moments"] = max(worst["moments"], difference(tensors["optimiser"][key][e], moments[key]))
        mine = [(i, sums) for member, i, sums in taken if member == e]
        assert [i for i, _ in mine] == [i for i, _ in intervals]
        for (_, a), (_, b) in zip(mine, intervals, strict=True):
            worst["flips"] += sum(abs(x - y) for x, y in zip(a[8:], b[8:], strict=True)) / 2
            worst["sums"] = max(
                worst["sums"], *(abs(x - y) / max(1.0, abs(y)) for x, y in zip(a[:3], b[:3], strict=True))
            )
    return worst
