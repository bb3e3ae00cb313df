"""Speed on a GPU: the fused path beside cuDNN making the same number of updates, and beside the bare products.

The workloads and the networks are those of ``bench``. Both sides compute in the same precision, which is named.
Before a speed is reported the fused path is compared with the reference in float64 on the CPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pondertime.bench import WORKLOADS, Workload, contestants, inputs, measure, network, ragged, rates

# The largest relative difference to float64 that counts as equal.
EQUAL = {"float32": 2e-4, "tf32": 2e-2, "bfloat16": 1e-1}
# Row groups of the curve of ragged halting: more than a device has multiprocessors.
TILES, TILE = 512, 16


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


def run(name: str, seconds: float, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Time one workload in every precision, and the ensembles of its networks; returns the rows of the table."""
    rows = [row for precision in EQUAL for row in run_in(precision, name, seconds, say)]
    if name == "parity":
        rows += curve(seconds)
    if name in ("parity", "logic"):
        return rows + ensembles(name)
    return rows + (stacked(name, seconds) if name in ("addition", "sort") else [])


def curve(seconds: float) -> list[dict[str, Any]]:
    """Time against the mean over tiles of the tile's largest N, with more tiles than multiprocessors."""
    w = WORKLOADS["parity"]
    generator, k, rows = torch.Generator().manual_seed(0), w.updates, TILES * TILE
    drawn = torch.randint(1, 2 * k, (rows,), generator=generator)
    halting = {
        f"every N = {k}": torch.full((rows,), k),
        "N uniform on 1..9, sorted": drawn.sort().values,
        "N uniform on 1..9": drawn,
        "one tile in four N = 20, else 2": torch.where(torch.arange(rows) // TILE % 4 == 0, 20, 2),
        "one row in 64 N = 20, else 2": torch.where(torch.arange(rows) % 64 == 0, 20, 2),
        "every N = 20": torch.full((rows,), 20),
    }
    calls: dict[str, Callable[[], Any]] = {}
    for name, N in halting.items():
        net, x = on_device(w, N.double())
        calls[name] = lambda net=net, x=x: net(x)
    with torch.no_grad():
        times = measure(calls, seconds)
    return [
        {"workload": "parity", "mode": f"inference, float32, {rows} rows", "halting": name,
         "contestant": f"fused, largest N of a tile {halting[name].view(-1, TILE).amax(1).double().mean():.2f}",
         "value": t, "unit": "ms", "ratio": None}
        for name, t in times.items()
    ]  # fmt: skip


def stacked(name: str, seconds: float) -> list[dict[str, Any]]:
    """Updates a second of 20 networks at once through the stacked kernels, and of one at a time."""
    found = {members: rates.learner_rate(name, members, seconds) for members in (1, 20)}
    names = {1: "one by one, float32", 20: "20 at once, bfloat16"}
    return [
        {"workload": name, "mode": "training", "halting": "early in training", "contestant": names[members],
         "value": rate, "unit": "updates/s", "ratio": rate / found[1]}
        for members, rate in found.items()
    ]  # fmt: skip


def ensembles(name: str) -> list[dict[str, Any]]:
    """Updates a second of many networks at once, at a fixed N and over the paper's grid; how busy it is."""
    found = rates.measure(name, 10_000 if name == "parity" else 1_000)
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
        {**whole, "value": grid["busy as crowded"], "unit": "busy, by the cost of as many networks"},
        {**whole, "value": grid["longest"] / grid["seconds"], "unit": "of the time the longest network's own"},
        {**whole, "value": grid["GiB"], "unit": "GiB"},
    ]


def run_in(precision: str, name: str, seconds: float, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Time one workload in ``float32``, ``tf32`` or, under autocast, ``bfloat16``; returns the rows of the table."""
    w = WORKLOADS[name]
    equal = torch.full((w.batch_size,), float(w.updates)).double()
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    rows = []
    half = torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16")
    try:
        with half:
            worst = max(check(w, N, precision) for N in (equal, ragged(w)))
        for mode, halting, N in (
            ("train", "equal", equal), ("inference", "equal", equal), ("train", "ragged", ragged(w)),
        ):  # fmt: skip
            with half:
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
