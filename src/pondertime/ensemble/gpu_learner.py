"""Many networks on a GPU, each at its own pace, with the face of a learner."""

from typing import Any

import torch
from torch import Tensor

from pondertime.act import ACT
from pondertime.batches import Interval
from pondertime.config import Diverged, TrainConfig
from pondertime.ensemble.gpu import GpuGroup
from pondertime.networks import build
from pondertime.tasks import Task


class GpuLearner:
    """Trains all networks of a config, one program a network."""

    def __init__(self, config: TrainConfig, task: Task, device: str, precision: str = "bfloat16") -> None:
        self.config, self.task = config, task
        self.configs = [config.member(e) for e in range(config.size)]
        self.group = GpuGroup(self.configs, task, device, precision=precision)
        self.backend = f"one program a network, {self.group.precision} products"

    @property
    def failed(self) -> dict[int, int]:
        """Networks whose loss was not finite, and when."""
        return {e: self.group.iterations[e] for e in self.group.diverged()}

    @property
    def iterations(self) -> list[int]:
        return self.group.iterations

    @property
    def updates(self) -> int:
        """Updates that every network has made which did not fail."""
        failed = self.failed
        return min((i for e, i in enumerate(self.iterations) if e not in failed), default=0)

    least = updates

    @property
    def work(self) -> int:
        """Updates of all networks."""
        return sum(self.iterations)

    def networks(self) -> list[ACT]:
        """Every network by itself, with a copy of its weights."""
        weights = self.group.tensors()["model"]
        networks = [build(config, self.task) for config in self.configs]
        for e, network in enumerate(networks):
            network.load_state_dict({name: a[e] for name, a in weights.items()})
        return networks

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds, by group and name."""
        return self.group.tensors()

    def counters(self) -> dict[str, Any]:
        """What else it holds."""
        return {"iterations": self.iterations, "sums": self.group.sums().tolist(), "failed": self.failed}

    def load(self, tensors: dict[str, dict[str, Tensor]], counters: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        if len(counters["iterations"]) != len(self.configs):
            raise ValueError("its networks were trained stacked, not one a program: go on with them as before")
        sums = torch.tensor(counters["sums"], dtype=torch.float64, device=self.group.device)
        self.group.load(tensors, [int(i) for i in counters["iterations"]], sums)
        self.group.stop([int(e) for e in counters["failed"]])

    def check_finite(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        """A network whose loss is not finite stops by itself, before its weights change."""

    def fail(self, e: int, i: int) -> None:
        """Networks fail by themselves."""

    def advance(self, until: int) -> None:
        """One launch of progress, begun; what is known is the last one's."""
        self.group.advance(until)
        self.give_up()

    def give_up(self) -> None:
        """Raise where no network is left."""
        if len(self.failed) == len(self.configs):
            raise Diverged.at(max(self.iterations))

    def closed_intervals(self) -> list[Interval]:
        """The intervals that are over."""
        return [Interval(e, i, i, sums) for e, i, sums in self.group.take_intervals()]

    def settle(self) -> list[Interval]:
        """Wait for the launch that runs; returns the intervals that it closed."""
        self.group.wait()
        self.give_up()
        return self.closed_intervals()

    def open_intervals(self) -> list[Interval]:
        """What was summed up since the last intervals."""
        sums = self.group.sums().tolist()
        return [Interval(e, self.iterations[e], self.iterations[e], row) for e, row in enumerate(sums) if row[0] > 0]
