"""The grid of a task, tau x seed: plans it, skips what is done, turns finished runs into result rows."""

import math
import multiprocessing as mp
import os
import re
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
from pondertime.learner import Learner
from pondertime.runs import RunFolder, build_all, command, commit, make_task
from pondertime.tasks import Task
from pondertime.train import train

# Networks with more units than this fill the cores by themselves and are trained one by one.
UNITS_TOGETHER = 256

Outcome = tuple[TrainConfig, results.Row | RunError]


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
        folder, whole = home(config, places)
        folder.check(whole, fewer=True)
    try:
        rows = results.read_rows(places.results, configs[0].task)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    done = {row.key: row.updates for row in rows}
    return [c for c in configs if done.get(key(c), 0) < c.iterations * c.workers]


def home(config: TrainConfig, places: Places) -> tuple[RunFolder, TrainConfig]:
    """The folder in which a network was begun, alone or with others, and the config of all in it; else its own."""
    alone = RunFolder(places.runs / config.name)
    if not alone.path.exists():
        stem = config.name.removesuffix(f"seed{config.seed}")
        for path in places.runs.glob(f"{stem}seeds*"):
            match = re.fullmatch(r"seeds(\d+)-(\d+)", path.name.removeprefix(stem))
            if match and int(match[1]) <= config.seed <= int(match[2]):
                first, last = map(int, match.groups())
                return RunFolder(path), replace(config, seed=first, members=last - first + 1)
    return alone, config


def together(configs: list[TrainConfig], places: Places) -> list[TrainConfig]:
    """What is trained at once: the seeds of a tau, where that is quicker; what was begun goes on as it was."""
    jobs: list[TrainConfig] = []
    open_jobs: dict[TrainConfig, int] = {}  # by the config without its seed, the job that the next seed may join
    for config in configs:
        folder, whole = home(config, places)
        if folder.path.exists():
            jobs += [] if whole in jobs else [whole]
            continue
        key = replace(config, seed=0)
        i = open_jobs.get(key)
        if i is not None and jobs[i].seeds.stop == config.seed and can_join(config, places):
            jobs[i] = replace(jobs[i], members=jobs[i].members + 1)
        else:
            open_jobs[key] = len(jobs)
            jobs.append(config)
    return jobs


def can_join(config: TrainConfig, places: Places) -> bool:
    """Whether networks like this are trained at once."""
    fused = places.backend in ("auto", "fused", "fused-calls")
    return config.workers == 1 and config.hidden_size <= UNITS_TOGETHER and places.device == "cpu" and fused


def estimate(job: TrainConfig, device: str, backend: str) -> float:
    """Seconds that a job will take, from a second of its first updates."""
    task = make_task(job)
    learner = Learner(job, task, build_all(job, task, backend=backend).to(device), device)
    learner.update(0)
    start, i = time.monotonic(), 1
    while time.monotonic() - start < 1:
        learner.update(i)
        i += 1
    return (time.monotonic() - start) / (i - 1) * job.iterations * job.workers


def run_job(job: TrainConfig, places: Places) -> list[Outcome]:
    """Train the networks of a job and add them to the result tables."""
    folder = RunFolder(places.runs / job.name)
    result = train(job, folder, device=places.device, backend=places.backend)
    members = result.get("members", [{"failed": None}])
    outcomes: list[Outcome] = []
    for e, numbers in enumerate(members):
        config = job.member(e)
        if numbers["failed"] is not None:
            outcomes.append((config, RunError(f"the loss was not finite at iteration {numbers['failed']}")))
            continue
        _, task, network = folder.load_network(backend=places.backend, seed=config.seed)
        own = {**result, **numbers, "seconds": round(result["seconds"] / len(members), 2)}
        outcomes.append((config, record(config, folder, task, network.to(places.device), own, places)))
    return outcomes


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
    metrics = folder.metrics(config.seed)
    curve = {k: [line[k] for line in metrics] for k in ("updates", "error", "target_error", "bpc", "steps")}
    points = difficulty_curve(network, task, device=places.device)
    traced = sample_traces(network, task, device=places.device)
    try:
        results.add_row(places.results, config.task, row, curve, points, traced)
    except ValueError as error:
        raise RunError(f"trained, but the result tables cannot take it: {error}") from None
    return row


def attempt(job: TrainConfig, places: Places) -> list[Outcome]:
    """The rows of a job's networks, or what is wrong with them; what stops the whole sweep is raised."""
    try:
        return run_job(job, places)
    except Interrupted:
        raise
    except RunError as error:
        return [(job.member(e), error) for e in range(job.members)]


def inline(configs: list[TrainConfig], places: Places, processes: int) -> Iterator[Outcome]:
    """Train the networks here, in this process or in several; a network that fails does not stop the rest."""
    jobs = together(configs, places)
    if processes > 1:
        yield from side_by_side(jobs, places, processes)
        return
    for job in jobs:
        yield from attempt(job, places)


def side_by_side(jobs: list[TrainConfig], places: Places, processes: int) -> Iterator[Outcome]:
    """Train each job in a process of its own, so many at a time."""
    todo, running = list(reversed(jobs)), {}
    try:
        while todo or running:
            while todo and len(running) < processes:
                job = todo.pop()
                pipe, process = start(job, places, max(1, (os.cpu_count() or 1) // processes))
                running[pipe] = job, process
            for pipe in wait(list(running)):
                job, process = running.pop(pipe)
                yield from receive(job, pipe, process)
    finally:
        # They write their checkpoints and leave.
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join()


def start(job: TrainConfig, places: Places, threads: int) -> tuple[Connection, BaseProcess]:
    """Begin a job; returns where its outcome will come from."""
    context: Any = mp.get_context("forkserver")
    # Adam loads torch._dynamo, which takes longer than all the rest: once, not for every network.
    context.set_forkserver_preload(["pondertime.sweep", "torch._dynamo"])
    pipe, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(job, places, threads, theirs))
    process.start()
    theirs.close()
    return pipe, process


def work(job: TrainConfig, places: Places, threads: int, pipe: Connection) -> None:
    """Do a job in a process of its own and send what came of it."""
    # Ctrl-C reaches every process: a training heeds it, and between trainings the first process does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    progress.plain_lines()
    try:
        pipe.send(attempt(job, places))
    except (ConfigError, RunError, OSError) as error:
        pipe.send(error)


def receive(job: TrainConfig, pipe: Any, process: BaseProcess) -> list[Outcome]:
    """What came of a job; what stops the whole sweep is raised."""
    outcome: list[Outcome] | BaseException
    try:
        outcome = pipe.recv()
    except EOFError:
        process.join()
        error = RunError(f"its process ended early (exit code {process.exitcode}); the same command goes on")
        outcome = [(job.member(e), error) for e in range(job.members)]
    pipe.close()
    process.join()
    if isinstance(outcome, BaseException):
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
