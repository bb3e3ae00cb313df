"""A job of a sweep: trains its networks, measures them and puts them into the result tables."""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pondertime import results
from pondertime.config import Interrupted, OutOfTime, RunError, TrainConfig
from pondertime.evaluate import (
    TEXT_SEQUENCES,
    by_stacks,
    difficulty_curves,
    evaluate_all,
    read_text,
    traced_sequences,
    traces,
)
from pondertime.runs import RunFolder, make_task, own_part
from pondertime.sweep import Places, folder_of, key, updates_in
from pondertime.train import make_learner, train

CURVE_POINTS = 300  # of a learning curve in the result tables

Outcome = tuple[TrainConfig, results.Row | RunError]


def estimate(job: TrainConfig, places: Places) -> float:
    """Seconds that a job will take, from a second of its first updates."""
    learner = make_learner(job, make_task(job), places.device, places.backend, places.precision)
    learner.advance(job.iterations)
    learner.settle()
    start, before = time.monotonic(), learner.work
    while time.monotonic() - start < 1 and learner.least < job.iterations:
        learner.advance(job.iterations)
        learner.closed_intervals()
    learner.settle()
    return (time.monotonic() - start) / max(1, learner.work - before) * job.iterations * job.workers * job.size


def run_job(job: TrainConfig, places: Places) -> list[Outcome]:
    """Train the networks of a job and add them to the result tables."""
    folder = folder_of(job, places)
    where = {"device": places.device, "backend": places.backend, "precision": places.precision}
    try:
        result = train(job, folder, **where, max_minutes=places.minutes_left)
    except OutOfTime:
        ends = ends_so_far(job, folder, places)
        add(list(entries(job, folder, ends, places).values()), places)
        raise
    ends = {e: own_part(result, e) for e in range(job.size)}
    made = entries(job, folder, {e: own for e, own in ends.items() if own.get("failed") is None}, places)
    add(list(made.values()), places)
    return [(job.member(e), made[e].row if e in made else failure(own)) for e, own in ends.items()]


def failure(own: dict[str, Any]) -> RunError:
    """What is wrong with a network that failed."""
    return RunError(f"the loss was not finite at iteration {own['failed']}")


def ends_so_far(job: TrainConfig, folder: RunFolder, places: Places) -> dict[int, dict[str, Any]]:
    """The final numbers, by place, of networks that have made all their updates in a run that has not.

    Only networks that go at their own pace are done before the others. Those that are in the tables stay as they are.
    """
    saved = folder.load()
    counters: dict[str, Any] = {} if saved is None else saved[1]
    made, failed = counters.get("iterations", []), {int(e) for e in counters.get("failed", ())}
    done = [e for e, i in enumerate(made) if i >= job.iterations and e not in failed]
    if job.size == 1 or len(made) != job.size:
        return {}
    stored = {}
    with suppress(ValueError):  # of tables that cannot be read; who adds to them says so
        stored = updates_in(results.read_rows(places.results, job.task))
    done = [e for e in done if stored.get(key(job.member(e)), 0) < job.iterations]
    if not done:
        return {}
    loaded = folder.load_networks(done, backend=places.backend)
    networks = dict(zip(done, (network for _, _, network in loaded), strict=True))
    task, device, seconds = loaded[0][1], places.device, round(counters["seconds"] / job.size, 2)
    found = by_stacks(networks, device, lambda stack: evaluate_all(stack, task, device=device))
    return {e: {"updates": made[e], "seconds": seconds, **numbers} for e, numbers in sorted(found.items())}


def entries(
    job: TrainConfig, folder: RunFolder, ends: dict[int, dict[str, Any]], places: Places
) -> dict[int, results.Entry]:
    """The networks of a run that ended so, by their places, as the result tables have them."""
    if not ends:
        return {}
    loaded, device = folder.load_networks(list(ends), backend=places.backend), places.device
    task = loaded[0][1]
    networks = {e: network.to(device) for e, (_, _, network) in zip(ends, loaded, strict=True)}
    points = by_stacks(networks, device, lambda stack: difficulty_curves(stack, task, device=device))
    metrics, made_by, sequences = folder.all_metrics(), folder.environment(), traced_sequences(task, device)
    made = {}
    for e, own in ends.items():
        traced = [trace for batch in sequences for trace in traces(networks[e], task, batch)]
        read = read_text(networks[e], task, sequences=TEXT_SEQUENCES, device=device)
        made[e] = entry(job.member(e), made_by, metrics.get(e, []), own, points[e], traced, *read)
    return made


def entry(
    config: TrainConfig,
    made_by: dict[str, Any],
    metrics: list[dict[str, Any]],
    result: dict[str, Any],
    points: list[dict[str, Any]],
    traced: list[dict[str, Any]],
    classes: Sequence[results.CharacterClass] = (),
    boundaries: Sequence[results.Boundary] = (),
) -> results.Entry:
    """A finished network as the result tables have it: its row, learning curve, difficulty points and the rest."""
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
        device=made_by["device"],
        commit=made_by["commit"],
        command=made_by["command"],
    )
    # What a row does not have, its curve has not either: no bits per character where nothing is a character.
    measured = ("updates", *results.QUANTITIES)
    curve = results.Curve(*([None if getattr(row, k) is None else line[k] for line in metrics] for k in measured))  # type: ignore[arg-type]
    return results.make_entry(row, curve.thinned(CURVE_POINTS), points, traced, classes, boundaries)


def add(made: list[results.Entry], places: Places) -> None:
    """Add finished networks to the result tables."""
    if not made:
        return
    try:
        results.add_rows(places.results, made[0].row.task, made)
    except ValueError as error:
        raise RunError(f"trained, but the result tables cannot take it: {error}") from None


def attempt(job: TrainConfig, places: Places) -> list[Outcome]:
    """The rows of a job's networks, or what is wrong with them; what stops the whole sweep is raised."""
    try:
        return run_job(job, places)
    except Interrupted:
        raise
    except RunError as error:
        return [(job.member(e), error) for e in range(job.size)]
