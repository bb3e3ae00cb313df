"""Hogwild: processes that share weights and Adam's moments and update them without locks.

As in the paper, an iteration is one update of one worker, so W workers make W times as many updates.
"""

import multiprocessing
import signal
import time
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from pondertime.batches import measure_every
from pondertime.config import RunError, TrainConfig
from pondertime.learner import Diverged, Learner, Weights
from pondertime.networks import build
from pondertime.runs import make_task
from pondertime.train import Session

POLL_SECONDS = 0.05
READS = 1000  # until a worker's sums are whole


def work(
    rank: int,
    config: TrainConfig,
    backend: str,
    weights: Weights,
    counters: Tensor,
    sums: Tensor,
    written: Tensor,
    halt: Tensor,
    fault: Any,
) -> None:
    """One worker: its own data and gradients, everybody's weights and moments."""
    # Both are for the main process, which then says when to stop.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    torch.set_num_threads(1)
    main = multiprocessing.parent_process()
    task = make_task(config)
    network = build(config, task, backend=backend)
    learner = Learner(config, task, network, "cpu", rank, weights)
    try:
        for i in range(int(counters[rank]), config.iterations):
            if halt.item() or (i % 20 == 0 and main is not None and not main.is_alive()):
                return
            learner.update(i)
            if i % measure_every(config) == 0:
                # Odd while they are written: nobody shall read half of a batch.
                written[rank] += 1
                sums[rank] = learner.sums
                written[rank] += 1
            counters[rank] = i + 1
    except Exception as error:
        diverged = isinstance(error, Diverged)
        fault.put((rank, diverged, str(error) if diverged else f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None


class Crew:
    """The workers of a run, and what they share with it."""

    def __init__(self, session: Session) -> None:
        assert isinstance(session.learner, Learner)
        self.session, config = session, session.config
        self.learner = session.learner
        self.counters = torch.tensor(self.learner.iterations).share_memory_()
        self.sums = torch.zeros(config.workers, *self.learner.sums.shape, dtype=torch.float64).share_memory_()
        self.written = torch.zeros(config.workers, dtype=torch.int64).share_memory_()
        self.rows = self.sums.clone()  # as they were last read
        self.halt = torch.zeros((), dtype=torch.int64).share_memory_()
        context: Any = mp.get_context("forkserver")
        # Adam loads torch._dynamo, which takes longer than all the rest: once, not in every worker.
        context.set_forkserver_preload(["pondertime.hogwild", "torch._dynamo"])
        self.fault = context.SimpleQueue()
        shared = (self.learner.weights, self.counters, self.sums, self.written, self.halt, self.fault)
        self.workers: list[BaseProcess] = [
            context.Process(target=work, args=(rank, config, self.learner.backend, *shared), daemon=True)
            for rank in range(config.workers)
        ]

    def start(self) -> None:
        for process in self.workers:
            process.start()

    def stop(self) -> None:
        """Let every worker end its update and leave."""
        self.halt.fill_(1)
        for process in self.workers:
            if process.pid is None:
                continue
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self.collect()

    def collect(self) -> None:
        """Take over what the workers have counted; their sums only grow."""
        self.learner.iterations = self.counters.tolist()
        before = self.rows.sum(0)
        for rank in range(len(self.workers)):
            self.read(rank)
        self.learner.sums += self.rows.sum(0) - before

    def read(self, rank: int) -> None:
        """A worker's sums; the last ones if it is writing them all the while, or died over it."""
        for _ in range(READS):
            before, row = int(self.written[rank]), self.sums[rank].clone()
            if before % 2 == 0 and before == int(self.written[rank]):
                self.rows[rank] = row
                return

    def death(self) -> RunError | None:
        """Why a worker ended early, if one did."""
        codes = {rank: p.exitcode for rank, p in enumerate(self.workers) if p.exitcode}
        if not codes:
            return None
        rank, code = next(iter(codes.items()))
        why = f"signal {-code}" if code < 0 else f"exit code {code}"
        if not self.fault.empty():
            rank, diverged, why = self.fault.get()
            if diverged:
                return Diverged(why)
        return RunError(
            f"worker {rank} of {len(self.workers)} died ({why}) at iteration "
            f"{self.learner.iterations[rank]}; checkpoint in {self.session.folder.checkpoint}; the same command goes on"
        )


def loop(session: Session) -> str:
    """Run the workers, log and checkpoint beside them; returns why it stopped."""
    crew = Crew(session)
    try:
        crew.start()
        stopped = watch(crew)
    finally:
        crew.stop()
    if isinstance(stopped, Diverged):
        raise stopped
    if isinstance(stopped, RunError):
        session.save()
        raise stopped
    return stopped


def watch(crew: Crew) -> str | RunError:
    """Log and checkpoint until the workers are done; returns why it stopped, or what they died of."""
    session = crew.session
    logged = session.updates
    while True:
        death = crew.death()
        crew.collect()
        if death is not None:
            # Ctrl-C reaches every process, and a worker that is still being made dies of it.
            return death if isinstance(death, Diverged) or not session.limits.asked() else "asked"
        stop = None
        if session.updates - logged >= session.config.log_every * session.config.workers:
            logged = session.updates
            stop = session.interval(crew.learner.open_intervals())
        if crew.learner.least >= session.config.iterations:
            return "iterations"
        stop = stop or session.between()
        if stop:
            return stop
        time.sleep(POLL_SECONDS)
