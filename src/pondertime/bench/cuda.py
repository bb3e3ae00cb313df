"""Speed on a GPU: the fused path beside cuDNN making the same number of updates, and beside the bare products.

The workloads and the networks are those of ``bench``. Both sides compute in the same precision, which is named.
Before a speed is reported the fused path is compared with the reference in float64 on the CPU.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pondertime.bench import WORKLOADS, Workload, contestants, inputs, network, ragged, rates

CALLS = 5
# The largest relative difference to float64 that counts as equal.
EQUAL = {"float32": 2e-4, "tf32": 2e-2}


def on_device(w: Workload, N: Tensor) -> tuple[Any, Tensor]:
    net, x = network(w), inputs(w, N).float()
    net.backend = "fused"
    return net.cuda(), x.cuda()


def results(net: Any, x: Tensor, weights: Tensor) -> tuple[list[Tensor], Tensor]:
    """Output and gradients, and N."""
    net.zero_grad()
    output, _, ponder = net(x)
    ((output * weights).sum() + ponder.cost.sum()).backward()
    found = [output.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]
    return [a.double().cpu() for a in found], ponder.steps.cpu()


def check(w: Workload, N: Tensor, precision: str) -> float:
    """The largest relative difference to the reference in float64; N must not differ at all."""
    net, x = on_device(w, N)
    weights = torch.randn(w.steps, len(N), w.output_size, dtype=torch.float64)
    found, steps = results(net, x, weights.float().cuda())
    truth = network(w).double()
    truth.backend = "reference"
    expected, steps64 = results(truth, x.double().cpu(), weights.float().double())
    if not torch.equal(steps, steps64) or not bool((steps == N).all()):
        raise RuntimeError("the updates are not those asked for; no speed is reported")
    worst = max(float((a - b).norm() / b.norm().clamp(min=1e-6)) for a, b in zip(found, expected, strict=True))
    if not worst < EQUAL[precision]:
        raise RuntimeError(f"differs from the reference by {worst:.1e}; no speed is reported")
    return worst


def measure(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Median milliseconds of each over runs of several calls, timed in turns, the device's work included."""

    def once(call: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start) / CALLS

    for call in calls.values():
        once(call)
    spent = sum(once(call) for call in calls.values()) * CALLS / 1e3
    rounds = max(5, min(100, int(seconds / spent)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(once(call))
    return {name: statistics.median(t) for name, t in times.items()}


def run(name: str, seconds: float, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Time one workload in both precisions, and the ensembles of its networks; returns the rows of the table."""
    rows = [row for precision in EQUAL for row in run_in(precision, name, seconds, say)]
    return rows + (ensembles(name) if name in ("parity", "logic") else [])


def ensembles(name: str) -> list[dict[str, Any]]:
    """Updates a second of many networks at once, at a fixed N and over the paper's grid; how busy it is."""
    found = rates.measure(name, updates=10_000 if name == "parity" else 1_000)
    row = {"workload": name, "mode": "training, bfloat16", "unit": "updates/s"}
    rows = [
        {**row, "halting": f"N = {n}", "contestant": f"{what} at once", "value": r[key], "ratio": None}
        for n, r in found["fixed"].items()
        for what, key in (("networks", "updates/s"), ("networks, kernel alone,", "kernel"))
    ]
    grid = found["grid"]
    whole = {**row, "halting": f"grid of {grid['networks']}", "contestant": "networks at once", "ratio": None}
    return [
        *rows,
        {**whole, "value": grid["updates/s"]},
        {**whole, "value": grid["busy"], "unit": "busy"},
        {**whole, "value": grid["GiB"], "unit": "GiB"},
    ]


def run_in(precision: str, name: str, seconds: float, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Time one workload in ``float32`` or ``tf32``; returns the rows of the table."""
    w = WORKLOADS[name]
    equal = torch.full((w.batch_size,), float(w.updates)).double()
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    rows = []
    try:
        worst = max(check(w, N, precision) for N in (equal, ragged(w)))
        for mode, halting, N in (
            ("train", "equal", equal), ("inference", "equal", equal), ("train", "ragged", ragged(w)),
        ):  # fmt: skip
            times = measure(contestants(w, N, train=mode == "train", device="cuda", names=("fused",)), seconds)
            rows += [
                {"workload": name, "mode": f"{mode}, {precision}", "halting": halting, "contestant": k, "value": t,
                 "unit": "ms", "ratio": t / times["cuDNN"]}
                for k, t in times.items()
            ]  # fmt: skip
        say(f"{name}, {precision}: equal to the reference in float64 to {worst:.0e}")
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    return rows
