"""Training: one loop for all tasks, into a run folder that survives being killed.

An iteration is one update of one worker, as in the paper; ``updates`` counts those of all workers.
"""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from pondertime.batches import Interval, summary
from pondertime.config import ConfigError, Interrupted, OutOfTime, RunError, TrainConfig
from pondertime.ensemble.gpu import why_not_gpu_group
from pondertime.ensemble.gpu_learner import GpuLearner
from pondertime.evaluate import by_stacks, evaluate_all
from pondertime.learner import Learner, Weights
from pondertime.progress import Reporter
from pondertime.runs import RunFolder, build_all, environment, make_task, served_by, write_json
from pondertime.tasks import Task


@dataclass(frozen=True)
class Limits:
    """When a training stops before its last iteration, and how often it is saved."""

    asked: Callable[[], bool]
    deadline: float = math.inf
    until_error: float | None = None
    checkpoint_seconds: float = 30.0


class Session:
    """A training under way: the folder, the counters, the log."""

    def __init__(
        self, config: TrainConfig, folder: RunFolder, device: str, backend: str, precision: str, limits: Limits
    ) -> None:
        self.config, self.folder, self.device, self.limits = config, folder, device, limits
        self.task = make_task(config)
        self.learner = make_learner(config, self.task, device, backend, precision)
        self.seconds, self.warned, self.stuck = 0.0, False, 0
        self.last: dict[int, dict[str, Any]] = {}  # the last line of every network
        self.settled: list[Interval] = []  # logged by a checkpoint, not heeded yet
        metrics_bytes = self.restore()
        self.risen, self.other = self.rises_again(), self.other_backend()
        folder.write_config(config)
        write_json(folder.path / "env.json", environment(device, self.learner.backend))
        self.log_file = open_log(folder.path / "metrics.jsonl", metrics_bytes)
        self.started = self.saved = self.shown = time.monotonic()
        self.first, self.text = self.learner.work, ""
        self.reporter = Reporter(config.name, config.iterations, done=self.iteration)

    def restore(self) -> int:
        """Take up the checkpoint, if there is one; returns how long the log was then."""
        saved = self.folder.load()
        if saved is None:
            return 0
        tensors, counters = saved
        try:
            self.learner.load(tensors, counters)
            self.seconds = float(counters["seconds"])
            return int(counters["metrics_bytes"])
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            what = "its weights do not fit" if "size mismatch" in reason else "does not fit"
            raise RunError(f"{self.folder.checkpoint}: {what} the run's config ({reason})") from None

    def rises_again(self) -> bool:
        """Whether the learning rate had begun to fall, for fewer iterations than are asked for now."""
        last = self.iteration - 1
        return last >= 0 and self.folder.config().rate_at(last) < self.config.rate_at(last)

    def other_backend(self) -> str | None:
        """What made the updates so far, if not what makes the next ones."""
        if self.iteration == 0:
            return None
        with suppress(RunError):
            made = self.folder.environment().get("backend")
            return made if made != self.learner.backend else None

    def close(self) -> None:
        self.log_file.close()

    @property
    def updates(self) -> int:
        """Updates of a network made so far, by all workers."""
        return self.learner.updates

    @property
    def iteration(self) -> int:
        """Iterations made: those of the one worker and network, or of the mean one."""
        return self.learner.work // (self.config.size * self.config.workers)

    @property
    def elapsed(self) -> float:
        return self.seconds + time.monotonic() - self.started

    def save(self) -> None:
        """Write a checkpoint; one with numbers that are not finite would be of no use."""
        settled = self.learner.settle()
        self.log(settled)
        self.settled += settled
        # Copies: the workers of Hogwild go on while this looks and writes.
        tensors = {
            name: {k: v.detach().clone() for k, v in group.items()} for name, group in self.learner.tensors().items()
        }
        self.learner.check_finite(tensors)
        self.log_file.flush()
        os.fsync(self.log_file.fileno())
        counters = {
            "updates": self.updates,
            **self.learner.counters(),
            "seconds": self.elapsed,
            "metrics_bytes": self.log_file.tell(),
        }
        self.folder.save(tensors, counters)
        self.saved = time.monotonic()

    def finish(self) -> None:
        """Save, then log what is left of an interval: a line that a run with more iterations cuts off again."""
        self.save()
        self.log(self.learner.open_intervals())
        self.reporter.update(self.iteration, self.text)

    def log(self, intervals: list[Interval]) -> None:
        """Write a line of metrics for each interval."""
        for e, iterations, updates, sums in intervals:
            metrics = summary(sums)
            counts: dict[int, int] = metrics["histogram"]
            line: dict[str, Any] = {"iterations": iterations, "updates": updates, **metrics}
            line["at_max"] = counts.get(self.config.max_steps, 0) / max(sum(counts.values()), 1)
            line["seconds"] = round(self.elapsed, 2)
            if self.config.size > 1:
                line = {"member": e, **own_settings(self.config, e), **line}
            self.last[e] = line
            self.log_file.write(json.dumps(line) + "\n")
        if intervals:
            self.log_file.flush()

    def interval(self, intervals: list[Interval]) -> str | None:
        """Log intervals that are over and heed what they say; returns why to stop, if so."""
        self.log(intervals)
        intervals, self.settled = [*self.settled, *intervals], []
        if not intervals:
            return None
        for e, iterations, _, _ in intervals:
            if not math.isfinite(self.last[e]["loss"]):
                self.learner.fail(e, iterations)
        failed = self.learner.failed
        going = [line for e, line in self.last.items() if e not in failed]
        if not going:
            return None
        means = {k: sum(line[k] for line in going) / len(going) for k in ("loss", "error", "steps", "at_max")}
        rate = (self.learner.work - self.first) / (time.monotonic() - self.started)
        self.text = f"loss {means['loss']:.3f}  error {means['error']:.1%}  ponder {means['steps']:.2f}  {rate:.0f}/s"
        warning = self.warning(means)
        if warning:
            self.reporter.say(warning)
        until = self.limits.until_error
        return "until_error" if until is not None and means["error"] < until else None

    def between(self) -> str | None:
        """Show progress, write a checkpoint when it is time; returns why to stop, if so."""
        now = time.monotonic()
        if now - self.shown > 0.1:
            self.shown = now
            self.reporter.update(self.iteration, self.text)
        if now - self.saved > self.limits.checkpoint_seconds:
            self.save()
        if self.limits.asked():
            return "asked"
        return "max_minutes" if now > self.limits.deadline else None

    def warning(self, line: dict[str, Any]) -> str | None:
        """A warning, once, when N has stayed at 1 or at M for ten intervals."""
        # A limit as low as FAST's for parity is there to be reached.
        low, high = line["steps"] < 1.005, line["at_max"] > 0.5 and self.config.max_steps >= 10
        self.stuck = self.stuck + 1 if (low or high) and self.config.tau is not None else 0
        if self.stuck < 10 or self.warned:
            return None
        self.warned = True
        if low:
            return "warning: the network never ponders (N stays at 1); try a lower --tau or --tau-warmup"
        return f"warning: N stays at its limit {self.config.max_steps}; try a higher --tau or a lower --learning-rate"


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C and SIGTERM into a question; a second Ctrl-C ends at once."""
    asked = False

    def ask(signum: int, frame: Any) -> None:
        nonlocal asked
        if asked and signum == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


@contextmanager
def ends_at_once(asked: Callable[[], bool]) -> Iterator[None]:
    """Ctrl-C or SIGTERM in here, or one that came too late to stop the training, stops the evaluation."""
    here = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if here else None
    try:
        if asked():
            raise KeyboardInterrupt
        yield
    except KeyboardInterrupt:
        raise Interrupted("stopped before it was evaluated; the same command does that") from None
    finally:
        if here:
            signal.signal(signal.SIGTERM, before)


def open_log(path: Path, size: int) -> TextIO:
    """The metrics of a run, cut back to the size they had at its checkpoint."""
    file = open(path, "a")  # noqa: SIM115
    if file.tell() < size:
        file.close()
        raise RunError(f"{path}: shorter than at the last checkpoint; delete the run folder to start anew")
    file.truncate(size)
    file.seek(0, os.SEEK_END)  # what comes next is told from here
    return file


def train(
    config: TrainConfig,
    folder: RunFolder,
    *,
    device: str = "cpu",
    backend: str = "auto",
    precision: str = "auto",
    until_error: float | None = None,
    max_minutes: float | None = None,
    checkpoint_seconds: float = 30.0,
) -> dict[str, Any]:
    """Train one network, or go on with it; returns the final result.

    Raises :class:`Interrupted` when stopped early, with a checkpoint to go on from.
    """
    with folder.locked(), ExitStack() as while_training:
        asked = while_training.enter_context(interruptible())
        folder.check(config)
        done = folder.result()
        if done is not None and is_enough(done, config.iterations, until_error):
            return done
        deadline = math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes
        limits = Limits(asked, deadline, until_error, checkpoint_seconds)
        with closing(Session(config, folder, device, backend, precision, limits)) as session:
            with session.reporter as reporter:
                if precision == "auto" and "bfloat16" in session.learner.backend:
                    reporter.say(f"{config.name}: {session.learner.backend} (others: --precision float32)")
                if 0 < session.iteration < config.iterations:
                    by = f" by {session.learner.backend} (before: {session.other})" if session.other else ""
                    reporter.say(f"{config.name}: goes on from iteration {session.iteration}{by}")
                if session.risen:
                    reporter.say(
                        f"{config.name}: the learning rate had fallen, and rises again; "
                        f"{config.iterations} iterations from the beginning give another network"
                    )
                stopped = run(session)
                reporter.say(f"{config.name}: trained in {session.elapsed:.0f} s; evaluating")
            # All that was trained is stored: from here on an interrupt ends what is under way.
            while_training.close()
            with ends_at_once(asked):
                found = measured(session)
            result = {
                "stopped": stopped,
                "until_error": until_error if stopped == "until_error" else None,
                "iterations": session.learner.least,
                "updates": session.updates,
                "seconds": round(session.elapsed, 2),
                **found,
            }
        folder.write_result(result)
        return result


def own_settings(config: TrainConfig, e: int) -> dict[str, Any]:
    """What network e of several has for itself."""
    own = config.member(e)
    rate = {"learning_rate": own.learning_rate} if config.learning_rates else {}
    return {"seed": own.seed, "tau": own.tau, **rate}


def measured(session: Session) -> dict[str, Any]:
    """The final numbers of a network; of several, those of each and the means of those that did not fail."""
    config, learner = session.config, session.learner
    going = {e: network for e, network in enumerate(learner.networks()) if e not in learner.failed}
    device = session.device
    found = by_stacks(going, device, lambda stack: evaluate_all(stack, session.task, device=device))
    if config.size == 1:
        return found[0]
    members = [
        {**own_settings(config, e), "failed": learner.failed.get(e), **found.get(e, {})} for e in range(config.size)
    ]
    means = {k: sum(numbers[k] for numbers in found.values()) / len(found) for k in next(iter(found.values()))}
    return {**means, "members": members}


def is_enough(result: dict[str, Any], iterations: int, until_error: float | None) -> bool:
    """Whether a run need not go on: it made its iterations, or stopped at an error no higher than asked for."""
    if result["iterations"] >= iterations:
        return True
    return until_error is not None and result["stopped"] == "until_error" and result["until_error"] <= until_error


def run(session: Session) -> str:
    """Train to the end and save; returns what the end was."""
    # The first checkpoint, so that there is always one to go back to.
    if session.updates == 0:
        session.save()
    stopped = hogwild_loop(session) if session.config.workers > 1 else loop(session)
    if stopped in ("iterations", "until_error"):
        session.finish()
        return stopped
    session.save()
    where = f"at iteration {session.iteration}; checkpoint in {session.folder.checkpoint}; the same command goes on"
    if stopped == "asked":
        raise Interrupted(f"stopped {where}")
    raise OutOfTime(f"stopped by --max-minutes {where}")


def hogwild_loop(session: Session) -> str:
    from pondertime.hogwild import loop

    return loop(session)


def loop(session: Session) -> str:
    """Make updates until all are made; returns why it stopped."""
    iterations = session.config.iterations
    while session.learner.least < iterations:
        session.learner.advance(iterations)
        stop = session.interval(session.learner.closed_intervals()) or session.between()
        if stop:
            return stop
    return "iterations"


def make_learner(
    config: TrainConfig, task: Task, device: str, backend: str, precision: str = "auto"
) -> Learner | GpuLearner:
    """What makes the updates: on a GPU one program a network where there are several that fit, else a Learner."""
    if torch.device(device).type == "cuda" and config.size > 1 and backend in ("auto", "fused"):
        reason = why_not_gpu_group([config.member(e) for e in range(config.size)], task, precision)
        if reason is None:
            return GpuLearner(config, task, device, "bfloat16" if precision == "auto" else precision)
        if None in config.taus:
            raise ConfigError(f"networks with and without ACT cannot be trained at once: {reason}")
    if None in config.taus:
        raise ConfigError("networks with and without ACT are trained at once on a GPU only")
    network = build_all(config, task, backend=backend).to(device)
    served_by(network, device)
    weights = Weights(network, config.size, share=config.workers > 1)
    return Learner(config, task, network, device, weights=weights, precision=precision)
