"""Measure speed."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from pondertime.config import ConfigError, check_task
from pondertime.flags import Device, optional, pick_device
from pondertime.show import say, show_times, waiting


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Time our backends beside torch.nn making as many updates, and beside the bare matrix products."""

    only: Annotated[str | None, optional("(default: all five)", "TASK")] = None
    """One of the paper's workloads."""
    seconds: Annotated[float, tyro.conf.arg(metavar="X")] = 5.0
    """About how long each table is measured."""
    device: Device = "cpu"
    out: Path = Path("benchmarks/data.csv")
    """The table of all measurements, to which these are added."""

    def run(self) -> None:
        if self.only is not None:
            check_task(self.only)
        if not self.seconds > 0:
            raise ConfigError(f"--seconds: expected a positive number, got {self.seconds}")
        device = pick_device(self.device, "auto")
        from pondertime import bench
        from pondertime.bench import cuda

        on_cpu, names = device == "cpu", [self.only] if self.only else list(bench.WORKLOADS)
        beside, run = ("torch.nn", bench.run) if on_cpu else ("cuDNN", cuda.run)
        say(f"{bench.machine(device)}; milliseconds, and ratios to {beside}, medians of interleaved repeats")
        # Profiles come last: what is timed after one is slower.
        jobs = [(f"timing {name}", partial(run, name, self.seconds, say)) for name in names]
        jobs += [] if on_cpu else [(f"profiling {name}", partial(cuda.inside, name)) for name in names]
        for text, job in jobs:
            with waiting(text):
                rows = job()
            bench.append(rows, self.out, device)
            show_times(rows)
        say(f"added to {self.out}")
