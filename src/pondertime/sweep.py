"""The grid of a task, tau x seed: plans it, skips what is done, turns finished runs into result rows."""

import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pondertime import results
from pondertime.act import ACT
from pondertime.config import TrainConfig
from pondertime.evaluate import difficulty_curve, generator, traces
from pondertime.runs import RunError, RunFolder, build, command, commit, make_task
from pondertime.tasks import Task
from pondertime.train import Learner, attach_adam, train

TRACED = 6  # sequences kept of every network


@dataclass(frozen=True)
class Places:
    """Where a sweep reads and writes, and what it runs on."""

    runs: Path
    results: Path
    device: str = "cpu"
    backend: str = "auto"


def plan(base: TrainConfig, taus: tuple[float, ...], seeds: int, *, baseline: bool) -> list[TrainConfig]:
    """One config a network: every tau with every seed, and as many without ACT."""
    kinds: list[dict[str, Any]] = [{"tau": tau, "force_steps": None} for tau in taus]
    if baseline:
        kinds.append({"tau": None, "force_steps": 1})
    return [replace(base, seed=seed, **kind) for seed in range(1, seeds + 1) for kind in kinds]


def key(config: TrainConfig) -> tuple[str, str, float | None, int]:
    return config.preset, config.halting, config.tau, config.seed


def unfinished(configs: list[TrainConfig], folder: Path) -> list[TrainConfig]:
    """The networks that the result tables do not have yet, or with fewer updates."""
    if not configs:
        return []
    done = {row.key: row.updates for row in results.read_rows(folder, configs[0].task)}
    return [c for c in configs if done.get(key(c), 0) < c.iterations * c.workers]


def estimate(config: TrainConfig, device: str, backend: str) -> float:
    """Seconds that one network will take, from a second of its first updates."""
    task = make_task(config)
    learner = Learner(config, task, build(config, task, backend=backend).to(device), device)
    attach_adam(learner)
    learner.update(0)
    start, i = time.monotonic(), 1
    while time.monotonic() - start < 1:
        learner.update(i)
        i += 1
    return (time.monotonic() - start) / (i - 1) * config.iterations * config.workers


def run_one(config: TrainConfig, places: Places) -> results.Row:
    """Train one network of the grid and add it to the result tables."""
    folder = RunFolder(places.runs / config.name)
    result = train(config, folder, device=places.device, backend=places.backend)
    _, task, network = folder.load_network(backend=places.backend)
    return record(config, folder, task, network.to(places.device), result, places)


def record(
    config: TrainConfig, folder: RunFolder, task: Task, network: ACT, result: dict[str, Any], places: Places
) -> results.Row:
    """Add a finished network to the result tables: its row, curve, difficulty curve and traces."""
    row = results.Row(
        task=config.task,
        preset=config.preset,
        halting=config.halting,
        tau=config.tau,
        seed=config.seed,
        updates=result["updates"],
        workers=config.workers,
        error=result["error"],
        target_error=result["target_error"],
        steps=result["steps"],
        rho=result["rho"],
        bpc=result.get("bpc"),
        seconds=result["seconds"],
        device=places.device,
        commit=commit(),
        command=command(),
    )
    metrics = folder.metrics()
    curve = {k: [line[k] for line in metrics] for k in ("updates", "error", "target_error", "bpc", "steps")}
    places.results.mkdir(parents=True, exist_ok=True)
    results.add_row(
        places.results,
        config.task,
        row,
        curve,
        difficulty_curve(network, task, device=places.device),
        sample_traces(network, task, places.device),
    )
    return row


def sample_traces(network: ACT, task: Task, device: str) -> list[dict[str, Any]]:
    """Traces of the same few sequences for every network."""
    if task.name != "wikipedia":
        return traces(network, task, task.sample(TRACED, generator(device)))
    return traces(network, task, task.sample(TRACED, generator(device), split="held-out"))  # type: ignore[call-arg]


def run_quietly(config: TrainConfig, places: Places, threads: int) -> results.Row:
    torch.set_num_threads(threads)
    return run_one(config, places)


def inline(
    configs: list[TrainConfig], places: Places, processes: int
) -> Iterator[tuple[TrainConfig, results.Row | RunError]]:
    """Train the networks here, in this process or in several; a network that fails does not stop the rest."""
    if processes == 1:
        for config in configs:
            try:
                yield config, run_one(config, places)
            except RunError as error:
                yield config, error
        return
    import torch.multiprocessing as mp

    threads = max(1, (os.cpu_count() or 1) // processes)
    with ProcessPoolExecutor(processes, mp_context=mp.get_context("forkserver")) as pool:
        futures = {pool.submit(run_quietly, config, places, threads): config for config in configs}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except RunError as error:
                yield futures[future], error


def total_time(seconds: float) -> str:
    """A duration as a person says it."""
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.0f} days"
