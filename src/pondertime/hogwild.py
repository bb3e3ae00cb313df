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

from pondertime.config import TrainConfig
from pondertime.runs import RunError, build, make_task
from pondertime.train import Diverged, Learner, Session

POLL_SECONDS = 0.05


def work(
    rank: int,
    config: TrainConfig,
    backend: str,
    weights: dict[str, Tensor],
    moments: dict[str, Tensor],
    counters: Tensor,
    sums: Tensor,
    stop: Tensor,
    fault: Any,
) -> None:
    """One worker: its own data and gradients, everybody's weights and moments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    main = multiprocessing.parent_process()
    task = make_task(config)
    network = build(config, task, backend=backend)
    learner = Learner(config, task, network, "cpu", rank)
    for name, p in network.named_parameters():
        p.data = weights[name]
        learner.optimiser.state[p] = {k: moments[f"{name}.{k}"] for k in ("step", "exp_avg", "exp_avg_sq")}
    learner.sums = sums[rank]
    try:
        for i in range(int(counters[rank]), config.iterations):
            if stop.item() or (i % 20 == 0 and main is not None and not main.is_alive()):
                return
            learner.update(i)
            counters[rank] = i + 1
    except Exception as error:
        fault.put((rank, type(error) is Diverged, f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None


def loop(session: Session) -> str:
    """Run the workers, log and checkpoint beside them; returns why it stopped."""
    config = session.config
    counters = torch.tensor(session.iterations).share_memory_()
    sums = torch.zeros(config.workers, len(session.learner.sums), dtype=torch.float64).share_memory_()
    stop = torch.zeros((), dtype=torch.int64).share_memory_()
    context: Any = mp.get_context("forkserver")
    context.set_forkserver_preload(["pondertime.hogwild"])
    fault = context.SimpleQueue()
    weights = {k: p.data for k, p in session.network.named_parameters()}
    shared = (config, session.network.backend, weights, session.moments, counters, sums, stop, fault)
    workers = [context.Process(target=work, args=(rank, *shared), daemon=True) for rank in range(config.workers)]
    for process in workers:
        process.start()
    try:
        return watch(session, workers, counters, sums, fault)
    finally:
        stop.fill_(1)
        for process in workers:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        session.iterations = counters.tolist()


def watch(session: Session, workers: list[BaseProcess], counters: Tensor, sums: Tensor, fault: Any) -> str:
    """Log and checkpoint until the workers are done."""
    config, learner = session.config, session.learner
    logged = session.updates
    # The workers' sums only grow; what has been logged is taken off here.
    base = learner.sums.clone()
    while True:
        dead = [(i, p.exitcode) for i, p in enumerate(workers) if p.exitcode]
        session.iterations = counters.tolist()
        learner.sums.copy_(base + sums.sum(0))
        if dead:
            report_death(session, dead, fault)
        finished = min(session.iterations) >= config.iterations
        iteration, stop = session.updates // config.workers, None
        if session.updates - logged >= config.log_every * config.workers or (finished and session.updates > logged):
            logged = session.updates
            base -= learner.sums
            stop = session.interval(iteration)
        stop = stop or ("iterations" if finished else session.between(iteration))
        if stop:
            return stop
        time.sleep(POLL_SECONDS)


def report_death(session: Session, dead: list[tuple[int, int]], fault: Any) -> None:
    """Raise for a worker that died, with the weights saved if they are any good."""
    rank, code = dead[0]
    if not fault.empty():
        rank, diverged, message = fault.get()
        if diverged:
            raise Diverged(message)
        why = message
    else:
        why = f"signal {-code}" if code < 0 else f"exit code {code}"
    session.save()
    raise RunError(
        f"worker {rank} of {session.config.workers} died ({why}) at iteration {session.iterations[rank]}; "
        f"checkpoint in {session.folder.checkpoint}; the same command goes on"
    )
