"""Train the grid of a task."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pondertime.config import Interrupted, OutOfTime, RunError, TrainConfig, make_config, paper_grid
from pondertime.flags import (
    Backend,
    Device,
    NetworkFlags,
    OptionalReal,
    Precision,
    TaskArgument,
    Whole,
    check_count,
    check_minutes,
    check_precision,
    optional,
    parse_numbers,
    pick_device,
)
from pondertime.show import say


@dataclass(frozen=True, kw_only=True)
class Sweep(NetworkFlags):
    """Train the grid tau x seed and as many networks without ACT; finished ones are skipped."""

    task: TaskArgument
    """parity, logic, addition, sort or wikipedia."""
    taus: Annotated[str | None, optional("(default: the paper's grid)", "X,X,..")] = None
    """Time penalties such as 0.1,0.01."""
    seeds: Whole = 20
    """How many seeds, from 1 on."""
    no_baseline: bool = False
    """Leave out the networks without ACT."""
    engine: Literal["inline"] = "inline"
    """Where they are trained: in processes of this machine."""
    processes: Whole = 1
    """How many; the seeds of a tau may share one, on a GPU several taus."""
    max_minutes: OptionalReal = None
    """Stop after this time, with checkpoints; networks that are done by then are measured."""
    dry_run: bool = False
    """Only say what would run, and about how long."""
    runs: Path = Path("runs")
    """Folder of the run folders."""
    results: Path = Path("results")
    """Folder of the result tables."""
    device: Device = "auto"
    backend: Backend = "auto"
    precision: Precision = "auto"

    def run(self) -> None:
        taus = paper_grid(self.task) if self.taus is None else parse_numbers("taus", self.taus)
        base = make_config(self.task, self.preset, tau=taus[0], **self.overrides())
        check_count("seeds", self.seeds)
        check_count("processes", self.processes)
        check_minutes(self.max_minutes)
        device = pick_device(self.device, self.backend, base.workers)
        check_precision(self.precision, device)
        from pondertime import sweep

        deadline = math.inf if self.max_minutes is None else time.monotonic() + 60 * self.max_minutes
        places = sweep.Places(self.runs, self.results, device, self.backend, self.precision, deadline)
        every = sweep.plan(base, taus, self.seeds, baseline=not self.no_baseline)
        todo = sweep.unfinished(every, places)
        done = f"{len(every) - len(todo)} done" + (f" (in {self.results})" if len(todo) < len(every) else "")
        say(f"{self.task}: {len(every)} networks, {done}, {len(todo)} to train on {device}")
        if self.dry_run:
            self.forecast(todo, places)
            return
        failed: list[str] = []
        late: OutOfTime | None = None
        try:
            self.train(todo, places, failed)
        except KeyboardInterrupt:
            raise Interrupted("stopped; the same command goes on") from None
        except OutOfTime as stopped:
            ended = len(todo) - len(sweep.unfinished(todo, places))
            late = OutOfTime(f"{stopped}; {ended} of {len(todo)} networks are done, and in {self.results}")
        if failed:
            before = f"{late}; " if late is not None else ""
            raise RunError(f"{before}{len(failed)} of {len(todo)} networks failed, the first {failed[0]}")
        if late is not None:
            raise late
        say(f"results in {self.results}; draw them with: pondertime figures --results {self.results}")

    def train(self, todo: list[TrainConfig], places: Any, failed: list[str]) -> None:
        """Train what is left; the names of those that fail are added to ``failed``."""
        from pondertime.engines import inline

        for i, (config, outcome) in enumerate(inline(todo, places, self.processes), 1):
            if isinstance(outcome, RunError):
                failed.append(config.name)
                say(f"[{i}/{len(todo)}] {config.name}: {outcome}")
            else:
                numbers = (
                    f"error {outcome.error:.2%}" if outcome.bpc is None else f"{outcome.bpc:.3f} bits per character"
                )
                say(f"[{i}/{len(todo)}] {config.name}: {numbers}, ponder {outcome.steps:.2f}")

    def forecast(self, todo: list[TrainConfig], places: Any) -> None:
        """Say what would be trained, and about how long."""
        from pondertime import sweep
        from pondertime.jobs import estimate

        for config in todo[:5]:
            say(f"  {config.name}  {config.iterations} iterations")
        if len(todo) > 5:
            say(f"  and {len(todo) - 5} more")
        if todo:
            jobs = sweep.together(todo, places, self.processes)
            seconds = estimate(jobs[0], places) / jobs[0].size * sum(j.size for j in jobs)
            say(f"about {sweep.total_time(seconds / self.processes)} at the speed of the first updates")
