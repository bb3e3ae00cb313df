"""The grid of a task, tau x seed: plans it, skips what is done, turns finished runs into result rows."""

import math
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from pondertime import progress, results
from pondertime.act import ACT
from pondertime.config import ConfigError, Interrupted, RunError, TrainConfig, check
from pondertime.evaluate import difficulty_curve, sample_traces
from pondertime.learner import Learner, attach_adam
from pondertime.runs import RunFolder, build, command, commit, make_task
from pondertime.tasks import Task
from pondertime.train import train


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
    for config in configs:
        RunFolder(places.runs / config.name).check(config, fewer=True)
    try:
        rows = results.read_rows(places.results, configs[0].task)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    done = {row.key: row.updates for row in rows}
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
    points = difficulty_curve(network, task, device=places.device)
    traced = sample_traces(network, task, device=places.device)
    try:
        results.add_row(places.results, config.task, row, curve, points, traced)
    except ValueError as error:
        raise RunError(f"trained, but the result tables cannot take it: {error}") from None
    return row


def attempt(config: TrainConfig, places: Places) -> results.Row | RunError:
    """A network's row, or what is wrong with this network; what stops the whole sweep is raised."""
    try:
        return run_one(config, places)
    except Interrupted:
        raise
    except RunError as error:
        return error


def inline(
    configs: list[TrainConfig], places: Places, processes: int
) -> Iterator[tuple[TrainConfig, results.Row | RunError]]:
    """Train the networks here, in this process or in several; a network that fails does not stop the rest."""
    if processes > 1:
        yield from side_by_side(configs, places, processes)
        return
    for config in configs:
        yield config, attempt(config, places)


def side_by_side(
    configs: list[TrainConfig], places: Places, processes: int
) -> Iterator[tuple[TrainConfig, results.Row | RunError]]:
    """Train each network in a process of its own, so many at a time."""
    todo, running = list(reversed(configs)), {}
    try:
        while todo or running:
            while todo and len(running) < processes:
                config = todo.pop()
                pipe, process = start(config, places, max(1, (os.cpu_count() or 1) // processes))
                running[pipe] = config, process
            for pipe in wait(list(running)):
                config, process = running.pop(pipe)
                yield config, receive(pipe, process)
    finally:
        # They write their checkpoints and leave.
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join()


def start(config: TrainConfig, places: Places, threads: int) -> tuple[Connection, BaseProcess]:
    """Begin one network; returns where its outcome will come from."""
    context: Any = mp.get_context("forkserver")
    # Adam loads torch._dynamo, which takes longer than all the rest: once, not for every network.
    context.set_forkserver_preload(["pondertime.sweep", "torch._dynamo"])
    pipe, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(config, places, threads, theirs))
    process.start()
    theirs.close()
    return pipe, process


def work(config: TrainConfig, places: Places, threads: int, pipe: Connection) -> None:
    """Train one network in a process of its own and send what came of it."""
    # Ctrl-C reaches every process: a training heeds it, and between trainings the first process does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    progress.plain_lines()
    try:
        pipe.send(attempt(config, places))
    except (ConfigError, RunError, OSError) as error:
        pipe.send(error)


def receive(pipe: Any, process: BaseProcess) -> results.Row | RunError:
    """What came of a network; what stops the whole sweep is raised."""
    try:
        outcome = pipe.recv()
    except EOFError:
        process.join()
        outcome = RunError(f"its process ended early (exit code {process.exitcode}); the same command goes on")
    pipe.close()
    process.join()
    if isinstance(outcome, (ConfigError, Interrupted, OSError)):
        raise outcome
    return outcome


def total_time(seconds: float) -> str:
    """A duration as a person says it."""
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.0f} days"
