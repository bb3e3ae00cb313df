"""The grid of a task, tau x seed: plans it, skips what is done, says what is trained at once.

``jobs`` trains and measures, ``engines`` says where.
"""

import contextlib
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from pondertime import results
from pondertime.config import (
    PRESETS,
    TASK_OPTIONS,
    ConfigError,
    Preset,
    RunError,
    TrainConfig,
    check,
)
from pondertime.ensemble.gpu import why_not_gpu_group
from pondertime.results.commands import settings
from pondertime.runs import RunFolder, command, make_task

# Networks with more units than this fill the cores by themselves and are trained one by one.
UNITS_TOGETHER = 256
STACKED_TOGETHER = 64  # networks on a GPU, or as many as fill half of it if they all ponder to the end
MEMORY = 2**36  # bytes of a GPU that nobody can ask

# What networks of one table have in common, besides the preset.
SETTINGS = {*(field.name for field in fields(Preset)), *chain(*TASK_OPTIONS.values())} - {
    "tau",
    "iterations",
    "log_every",
}


@dataclass(frozen=True)
class Places:
    """Where a sweep reads and writes, and what it runs on."""

    runs: Path
    results: Path
    device: str = "cpu"
    backend: str = "auto"
    precision: str = "auto"
    deadline: float = math.inf  # by time.monotonic; what has not ended then stops, with a checkpoint

    @property
    def minutes_left(self) -> float | None:
        """None: as many as it takes."""
        return None if self.deadline == math.inf else (self.deadline - time.monotonic()) / 60

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


def plan(base: TrainConfig, taus: tuple[float, ...], seeds: int, *, baseline: bool) -> list[TrainConfig]:
    """One config a network: every tau with every seed, and as many without ACT."""
    kinds: list[dict[str, Any]] = [{"tau": tau, "force_steps": None} for tau in taus]
    if baseline:
        kinds.append({"tau": None, "force_steps": 1})
    configs = [replace(base, seed=seed, **kind) for seed in range(1, seeds + 1) for kind in kinds]
    for config in configs:
        check(config)
    return configs


def key(config: TrainConfig) -> tuple[str, str, float | None, int]:
    return config.preset, config.halting, config.tau, config.seed


def unfinished(configs: list[TrainConfig], places: Places) -> list[TrainConfig]:
    """The networks that the result tables do not have yet, or with fewer updates.

    The tables tell networks apart by preset, tau and seed only; that what is done has the other settings too
    is seen from the run folders.
    """
    begun = groups(places)
    for config in configs:
        folder, whole = home(config, places, begun)
        folder.check(whole, fewer=True)
    try:
        rows = results.read_rows(places.results, configs[0].task)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    preset, task = configs[0].preset, configs[0].task
    alike = [row for row in rows if row.preset == preset]
    check_settings(alike, command(), PRESETS[preset][task], places.results)
    done = updates_in(rows)
    return [c for c in configs if done.get(key(c), 0) < c.iterations * c.workers]


def updates_in(rows: Iterable[results.Row]) -> dict[results.Key, int]:
    """How many updates the networks of a result table have made."""
    return {row.key: row.updates for row in rows}


def check_settings(rows: list[results.Row], ours: str, preset: Preset, where: Path) -> None:
    """Raise if a table has networks of this preset that were made with other settings, as far as commands say."""

    def trained(command: str) -> dict[str, Any]:
        return {name: value for name, value in settings(command, preset).items() if name in SETTINGS}

    here, known = trained(ours), [row for row in rows if row.command.startswith("pondertime ")]
    for row in known if ours.startswith("pondertime ") else []:
        there = trained(row.command)
        names = sorted(name for name in there | here if there.get(name) != here.get(name))
        if names:
            differences = ", ".join(f"{n} {short(there.get(n))} there, {short(here.get(n))} here" for n in names)
            raise ConfigError(
                f"{where / row.task}.csv: has networks of other settings ({differences}); "
                "name another folder: --results DIR"
            )


def short(value: Any) -> str:
    """A setting in a message."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def groups(places: Places) -> list[tuple[RunFolder, TrainConfig]]:
    """The runs of several networks that were begun."""
    found = []
    for path in sorted(places.runs.glob("*/config.json")):
        with contextlib.suppress(RunError):
            config = RunFolder(path.parent).config()
            found += [(RunFolder(path.parent), config)] if config.size > 1 else []
    return found


def home(
    config: TrainConfig, places: Places, begun: list[tuple[RunFolder, TrainConfig]]
) -> tuple[RunFolder, TrainConfig]:
    """The folder in which a network was begun, alone or with others, and the config of all in it; else its own."""
    alone = RunFolder(places.runs / config.name)
    if alone.path.exists():
        return alone, config
    for folder, whole in begun:
        if whole.learning_rates:
            continue  # the tables have no place for them
        kinds = whole.taus or (whole.tau,)
        same = (config.task, config.preset) == (whole.task, whole.preset) and config.tau in kinds
        if same and config.seed in whole.seeds and (whole.taus or config.force_steps == whole.force_steps):
            shared = {k: getattr(whole, k) for k in ("seed", "members", "taus", "tau", "force_steps")}
            return folder, replace(config, **shared)
    return alone, config


def folder_of(job: TrainConfig, places: Places) -> RunFolder:
    """The folder of a job: the one in which it was begun, whatever its name, else its own."""
    own = RunFolder(places.runs / job.name)
    if own.path.exists():
        return own
    for folder, whole in groups(places):
        if whole.iterations <= job.iterations and replace(whole, iterations=job.iterations) == job:
            return folder
    return own


def together(configs: list[TrainConfig], places: Places, processes: int = 1) -> list[TrainConfig]:
    """What is trained at once: the seeds of a tau, or on a GPU the whole grid, where that is quicker.

    Stacked networks wait for each other at every update, so several processes share their taus out. What was begun
    goes on as it was.
    """
    jobs: list[TrainConfig] = []
    fresh: list[TrainConfig] = []
    begun = groups(places)
    for config in configs:
        folder, whole = home(config, places, begun)
        if not folder.path.exists():
            fresh.append(config)
        elif whole not in jobs:
            jobs.append(whole)
    if not places.on_gpu or not can_join(fresh, places):
        return jobs + seeds_together(fresh, places)
    if not fresh or why_not_gpu_group(fresh, make_task(fresh[0]), places.precision) is None:
        grid = whole_grid(fresh)
        return jobs + ([grid] if grid is not None else seeds_together(fresh, places))
    # Stacked networks halt by the same rules.
    halting = [c for c in fresh if c.tau is not None]
    taus, some = list(dict.fromkeys(c.tau for c in halting)), 1
    if halting:
        some = max(1, stacked_together(halting[0], places) * len(taus) // len(halting))
        some = min(some, math.ceil(len(taus) / processes))
    for first in range(0, len(taus), some):
        here = [c for c in fresh if c.tau in taus[first : first + some]]
        grid = whole_grid(here)
        jobs += [grid] if grid is not None and len(grid.taus) > 1 else seeds_together(here, places)
    return jobs + seeds_together([c for c in fresh if c.tau is None], places)


def whole_grid(configs: list[TrainConfig]) -> TrainConfig | None:
    """One config for all, if they are every tau with every seed."""
    taus, seeds = tuple(dict.fromkeys(c.tau for c in configs)), sorted({c.seed for c in configs})
    if len(configs) < 2:
        return None
    grid = replace(configs[0], tau=None, force_steps=None, seed=seeds[0], members=len(seeds), taus=taus)
    return grid if {grid.member(e) for e in range(grid.size)} == set(configs) and grid.size == len(configs) else None


def seeds_together(configs: list[TrainConfig], places: Places) -> list[TrainConfig]:
    """Seeds that follow each other, of networks that are else alike, become one job."""
    jobs: list[TrainConfig] = []
    last: dict[TrainConfig, int] = {}  # by the config without its seed, the job that the next seed may join
    for config in configs:
        alike = replace(config, seed=0)
        i = last.get(alike)
        full = places.on_gpu and i is not None and jobs[i].members >= stacked_together(config, places)
        if i is not None and not full and jobs[i].seeds.stop == config.seed and can_join([config], places):
            jobs[i] = replace(jobs[i], members=jobs[i].members + 1)
        else:
            last[alike] = len(jobs)
            jobs.append(config)
    return jobs


def can_join(configs: list[TrainConfig], places: Places) -> bool:
    """Whether networks like these are trained at once."""
    fused = places.backend in ("auto", "fused", "fused-calls")
    return fused and all(c.workers == 1 and (places.on_gpu or c.hidden_size <= UNITS_TOGETHER) for c in configs)


def stacked_together(config: TrainConfig, places: Places) -> int:
    """How many networks like this are trained at once on a GPU."""
    there = MEMORY
    if torch.cuda.is_available():
        there = torch.cuda.get_device_properties(places.device).total_memory
    # Of an LSTM, for each of its units: the tape, 24 bytes an update and 10 of copies; W_x x_t and its derivative.
    bytes_a_step = 34 * (config.force_steps or config.max_steps) + 48
    each = config.hidden_size * config.batch_size * make_task(config).steps * bytes_a_step
    return max(1, min(STACKED_TOGETHER, there // 2 // each))


def total_time(seconds: float) -> str:
    """A duration as a person says it."""
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.0f} days"
