"""How fast many networks train at once: updates a second over all of them, and how full the device stays.

The rate at a fixed N is that of networks whose halting unit is constant. From it comes the cost of an update, seconds
of a multiprocessor at that N, and with it the share of the device that a grid of tau keeps busy.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pondertime.bench import Workload
from pondertime.config import TrainConfig, make_config, paper_grid
from pondertime.ensemble.gpu import GpuGroup
from pondertime.learner import Learner
from pondertime.runs import build_all, make_task


def fixed(task: str, networks: int) -> list[TrainConfig]:
    """Networks that do not learn."""
    options: dict[str, Any] = {"learning_rate": 1e-30, "max_steps": 100, "log_every": 500}
    return [make_config(task, seed=s, iterations=10**9, **options) for s in range(networks)]


def halt_after(model: dict[str, Tensor], n: int) -> None:
    """Make every row of every network halt after exactly n updates."""
    h = 0.99 / (n - 0.5)
    model["halt.weight"].zero_()
    model["halt.bias"].fill_(30.0 if n == 1 else math.log(h / (1 - h)))


def rate(group: GpuGroup, updates: int, repeats: int = 3) -> dict[str, float]:
    """The median of updates a second over all networks, data included; and of the kernel alone."""
    group.run(updates)
    group.take_intervals()
    rates, kernel = [], []
    for k in range(2, repeats + 2):
        first, cells = sum(group.iterations), sum(group.cells)
        torch.cuda.synchronize()
        start = time.perf_counter()
        group.seconds = 0.0
        group.run(k * updates)
        torch.cuda.synchronize()
        made = sum(group.iterations) - first
        rates.append(made / (time.perf_counter() - start))
        kernel.append(made / group.seconds)
        group.take_intervals()
    return {
        "updates/s": sorted(rates)[repeats // 2],
        "kernel": sorted(kernel)[repeats // 2],
        "cells": (sum(group.cells) - cells) / made,
    }


def fixed_rates(task_name: str, steps: Iterable[int], networks: int, updates: int | None = None) -> dict[int, Any]:
    """The rate at each fixed N, over so many updates at N up to 5; None: over whole chunks, drawn meanwhile."""
    configs = fixed(task_name, networks)
    group = GpuGroup(configs, make_task(configs[0]), "cuda")
    rates = {}
    for n in steps:
        weights = group.tensors()
        halt_after(weights["model"], n)
        group.load(weights, [0] * networks)
        if updates is None:
            rates[n] = rate(group, group.per_chunk, repeats=3 if n <= 20 else 1)
        else:
            rates[n] = rate(group, max(64, updates * 5 // max(5, n)))
    return rates


def cost_of(rates: dict[int, Any], programs: int) -> Callable[[float], float]:
    """Seconds of a multiprocessor that an update of so many cell updates costs: straight lines between the rates."""
    segments = list(pairwise(sorted((r["cells"], programs / r["kernel"]) for r in rates.values())))

    def cost(cells: float) -> float:
        (a, at_a), (b, at_b) = next((s for s in segments if cells <= s[1][0]), segments[-1])
        return at_a + (cells - a) * (at_b - at_a) / (b - a)

    return cost


def grid(task: str) -> list[TrainConfig]:
    """The paper's grid of tau and the networks without ACT."""
    options: dict[str, Any] = {"workers": 1, "learning_rate": 1e-3, "iterations": 10**9, "log_every": 500}
    configs = []
    for seed in range(20):
        configs += [make_config(task, "paper", tau=tau, seed=seed, **options) for tau in paper_grid(task)]
        configs.append(make_config(task, "paper", act=False, seed=seed, **options))
    return configs


def grid_run(task: str, updates: int) -> dict[str, Any]:
    """Train the grid for ``updates`` updates each."""
    configs = grid(task)
    torch.cuda.reset_peak_memory_stats()
    group = GpuGroup(configs, make_task(configs[0]), "cuda")
    group.run(1)  # the compiler
    group.cells = [0] * len(configs)
    torch.cuda.synchronize()
    start = time.perf_counter()
    while group.behind(updates):
        group.advance(updates)
        group.take_intervals()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    made = sum(group.iterations) - len(configs)
    each = [(i - 1, c / (i - 1)) for i, c in zip(group.iterations, group.cells, strict=True) if i > 1]
    return {
        "networks": len(configs),
        "seconds": seconds,
        "updates/s": made / seconds,
        "each": each,  # updates of every network, and cell updates of one
        "GiB": torch.cuda.max_memory_allocated() / 2**30,
    }


def busy(run: dict[str, Any], cost: Callable[[float], float], processors: int) -> float:
    """The share of the device that a grid was busy with its updates, by what they cost at their network's N."""
    return sum(made * cost(cells) for made, cells in run["each"]) / (processors * run["seconds"])


def learner_rate(task: str, w: Workload, members: int, precision: str, seconds: float = 1.0, repeats: int = 3) -> float:
    """Updates a second over all networks, data and Adam included, of a Learner on a GPU; the median of some repeats.

    The networks do not learn, and every row halts after exactly k updates. Before it is timed it trains for as long: it
    records its updates then.
    """
    options: dict[str, Any] = {"learning_rate": 1e-30, "batch_size": w.batch_size, "max_steps": 20}
    config = make_config(task, members=members, iterations=10**9, **options)
    made = make_task(config)
    learner = Learner(config, made, build_all(config, made).to("cuda"), "cuda", precision=precision)
    halt_after(learner.weights.views(learner.weights.all), w.updates)
    rates = []
    for _ in range(1 + repeats):
        torch.cuda.synchronize()
        start, before = time.perf_counter(), learner.work
        while time.perf_counter() - start < seconds:
            learner.advance(10**9)
        torch.cuda.synchronize()
        rates.append((learner.work - before) / (time.perf_counter() - start))
    return statistics.median(rates[1:])


def measure(task: str, updates: int) -> dict[str, Any]:
    """The rates at N = 2 to 40 of as many networks as there are multiprocessors, and the paper's grid.

    How busy the grid is, is counted twice: by what an update costs when there are as many networks as
    multiprocessors, and when there are as many as in the grid, which do not fit the cache.
    """
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    rates = fixed_rates(task, (2, 5, 10, 20, 40), processors)
    run = grid_run(task, updates)
    crowd = fixed_rates(task, (2, 10, 40), run["networks"], 512)
    cost = cost_of(rates, processors)
    run["busy"], run["busy as crowded"] = (busy(run, known, processors) for known in (cost, cost_of(crowd, processors)))
    run["longest"] = max(made * cost(cells) for made, cells in run.pop("each"))  # seconds that one network takes alone
    return {"fixed": rates, "grid": run}
