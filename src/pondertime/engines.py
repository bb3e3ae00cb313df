"""Where the jobs of a sweep are done: in this process, or in several."""

import contextlib
import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from pondertime import progress
from pondertime.config import ConfigError, OutOfTime, RunError, TrainConfig
from pondertime.jobs import Outcome, attempt
from pondertime.sweep import Places, together


def inline(configs: list[TrainConfig], places: Places, processes: int) -> Iterator[Outcome]:
    """Train the networks here, in this process or in several; a network that fails does not stop the rest."""
    jobs, asked = together(configs, places, processes), set(configs)
    outcomes = side_by_side(jobs, places, processes) if processes > 1 else one_by_one(jobs, places)
    # A job may hold networks that were done before.
    yield from ((config, outcome) for config, outcome in outcomes if config in asked)


def one_by_one(jobs: list[TrainConfig], places: Places) -> Iterator[Outcome]:
    for job in jobs:
        yield from attempt(job, places)


def side_by_side(jobs: list[TrainConfig], places: Places, processes: int) -> Iterator[Outcome]:
    """Train each job in a process of its own, so many at a time."""
    todo, running, late = list(reversed(jobs)), {}, None
    # Else it would end this process alone, and the others go on unseen.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        prepare()
        while todo or running:
            while todo and len(running) < processes:
                job = todo.pop()
                pipe, process = start(job, places, max(1, (os.cpu_count() or 1) // processes))
                running[pipe] = job, process
            for pipe in wait(list(running)):
                job, process = running.pop(pipe)
                try:
                    yield from receive(job, pipe, process)
                except OutOfTime as stopped:
                    # The others have the same deadline, but may be measuring what they trained before it.
                    late = late or stopped
                    todo.clear()
    finally:
        # They write their checkpoints and leave; one that is sending its outcome would wait for a reader.
        for pipe, (_, process) in running.items():
            process.terminate()
            pipe.close()
        for _, process in running.values():
            process.join()
        signal.signal(signal.SIGTERM, before)
    if late is not None:
        raise late


def prepare() -> None:
    """Start what all processes come from."""
    # Adam loads torch._dynamo, which takes longer than all the rest: once, not for every network.
    mp.get_context("forkserver").set_forkserver_preload(["pondertime.engines", "torch._dynamo"])
    # Ctrl-C reaches it, too, and it would say what it was loading.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def start(job: TrainConfig, places: Places, threads: int) -> tuple[Connection, BaseProcess]:
    """Begin a job; returns where its outcome will come from."""
    context: Any = mp.get_context("forkserver")
    pipe, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(job, places, threads, theirs))
    process.start()
    theirs.close()
    return pipe, process


def work(job: TrainConfig, places: Places, threads: int, pipe: Connection) -> None:
    """Do a job in a process of its own and send what came of it."""
    # Ctrl-C reaches every process: a training heeds it, and between trainings the first process does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=leave_with_the_first, daemon=True).start()
    torch.set_num_threads(threads)
    progress.plain_lines()
    try:
        pipe.send(attempt(job, places))
    except (ConfigError, RunError, OSError) as error:
        with contextlib.suppress(BrokenPipeError):
            pipe.send(error)


def leave_with_the_first() -> None:
    """Stop this process, with a checkpoint, when the first one is killed: else it would go on unseen."""
    first = mp.parent_process()
    if first is not None:
        first.join()
        os.kill(os.getpid(), signal.SIGTERM)


def receive(job: TrainConfig, pipe: Any, process: BaseProcess) -> list[Outcome]:
    """What came of a job; what stops the whole sweep is raised."""
    outcome: list[Outcome] | BaseException
    try:
        outcome = pipe.recv()
    except EOFError:
        process.join()
        error = RunError(f"its process ended early (exit code {process.exitcode}); the same command goes on")
        outcome = [(job.member(e), error) for e in range(job.size)]
    pipe.close()
    process.join()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
