"""Speed on a GPU: the fused path beside cuDNN making the same number of updates, and beside the bare products.

The workloads and the networks are those of ``bench``. Both sides compute in the same precision, which is named.
Before a speed is reported the fused path is compared with the reference in float64 on the CPU, in training and in
inference, at the first call and when its calls are recorded.
"""

import functools
import heapq
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pondertime.bench import WORKLOADS, Workload, contestants, equal, inputs, machine, measure, network, ragged, rates
from pondertime.bench.floors import floor, peak_of

# The largest relative difference to float64 that counts as equal.
EQUAL = {"float32": 2e-5, "tf32": 5e-3, "bfloat16": 4e-2}
# Calls of one shape, after which those that are recorded at all are.
CALLS = 12
# Row groups of the curve of ragged halting: more than a device has multiprocessors.
TILES, TILE = 512, 16
# Kernels before those that are profiled, and what their name contains.
PADS, PAD = 500, "erfinv"


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Products in ``float32``, ``tf32`` or, by autocast, ``bfloat16``, on both sides."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16"):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def on_device(w: Workload, N: Tensor) -> tuple[Any, Tensor]:
    net, x = network(w), inputs(w, N).float()
    net.backend = "fused"
    return net.cuda(), x.cuda()


def results(net: Any, x: Tensor, weights: Tensor, *, train: bool) -> tuple[list[Tensor], Tensor]:
    """The output and in training the gradients, and N."""
    net.zero_grad()
    with torch.set_grad_enabled(train):
        output, _, ponder = net(x)
        if train:
            ((output * weights).sum() + ponder.cost.sum()).backward()
    found = [output.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]
    return [a.double().cpu() for a in found], ponder.steps.cpu()


@functools.lru_cache(maxsize=2)
def truth(w: Workload, N: tuple[float, ...], *, train: bool) -> tuple[Tensor, list[Tensor], Tensor]:
    """Weights of the outputs in a loss, and the reference's results in float64 for the inputs of ``on_device``."""
    net = network(w).double()
    net.backend = "reference"
    x = inputs(w, torch.tensor(N, dtype=torch.float64)).float()
    weights = torch.randn(w.steps, len(N), w.output_size)
    return weights, *results(net, x.double(), weights.double(), train=train)


def check(w: Workload, N: Tensor, precision: str, modes: tuple[bool, ...] = (True, False)) -> float:
    """The largest relative difference to the reference in float64; N must not differ at all."""
    net, x = on_device(w, N)
    weights, expected, steps64 = truth(w, tuple(N.tolist()), train=True in modes)
    worst = 0.0
    for train in modes:
        for call in range(CALLS):
            found, steps = results(net, x, weights.to(x.device), train=train)
            if call not in (0, CALLS - 1):
                continue
            if not torch.equal(steps, steps64) or not bool((steps == N).all()):
                raise RuntimeError("the updates are not those asked for; no speed is reported")
            own = expected if train else expected[:1]
            differences = [float((a - b).norm() / b.norm().clamp(min=1e-6)) for a, b in zip(found, own, strict=True)]
            worst = max([worst, *(d if d == d else torch.inf for d in differences)])
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
    return rows + (stacked(name) if name in ("addition", "sort") else [])


def curve(seconds: float) -> list[dict[str, Any]]:
    """Time against the mean over tiles of the tile's largest N, with more tiles than multiprocessors."""
    w = WORKLOADS["parity"]
    generator, k, rows = torch.Generator().manual_seed(0), w.updates, TILES * TILE
    drawn = torch.randint(1, 2 * k, (rows,), generator=generator)
    halting = {
        **{f"every N = {n}": torch.full((rows,), n) for n in (1, 2, k, 10)},
        "N uniform on 1..9, sorted": drawn.sort().values,
        "N uniform on 1..9": drawn,
        "one tile in four N = 20, else 2": torch.where(torch.arange(rows) // TILE % 4 == 0, 20, 2),
        "one row in 64 N = 20, else 2": torch.where(torch.arange(rows) % 64 == 0, 20, 2),
        "every N = 20": torch.full((rows,), 20),
    }
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    found = []
    for mode in ("inference", "train"):
        calls: dict[str, Callable[[], Any]] = {}
        for name, N in halting.items():
            check(w, N.double(), "float32", (mode == "train",))
            calls[name] = contestants(w, N.double(), train=mode == "train", device="cuda", names=("fused",))["fused"]
        times = measure(calls, seconds)
        row = {"workload": "parity", "mode": f"{mode}, float32, {rows} rows", "contestant": "fused", "ratio": None}
        found += [{**row, "halting": name, "value": t, "unit": "ms"} for name, t in times.items()]
    for name, N in halting.items():
        longest = N.view(-1, TILE).amax(1).tolist()
        row = {"workload": "parity", "mode": f"{rows} rows", "halting": name, "unit": "updates", "ratio": None}
        found.append({**row, "contestant": "largest N of a tile, mean", "value": sum(longest) / TILES})
        found.append({**row, "contestant": "busiest multiprocessor", "value": busiest(longest, processors)})
    return found


def busiest(longest: Iterable[float], processors: int) -> float:
    """The updates of the multiprocessor that ends last, where each takes the next tile when it is done with one."""
    loads = [0.0] * processors
    for updates in longest:
        heapq.heapreplace(loads, loads[0] + updates)
    return max(loads)


def stacked(name: str) -> list[dict[str, Any]]:
    """Updates a second of 20 networks at once through the stacked kernels, and of one at a time."""
    w, rows = WORKLOADS[name], []
    for precision in ("float32", "bfloat16"):
        found = {members: rates.learner_rate(name, w, members, precision) for members in (1, 20)}
        rows += [
            {"workload": name, "mode": f"training, {precision}", "halting": f"N = {w.updates}, {w.batch_size} rows",
             "contestant": "one by one" if members == 1 else f"{members} at once", "value": rate, "unit": "updates/s",
             "ratio": rate / found[1]}
            for members, rate in found.items()
        ]  # fmt: skip
    return rows


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
    w, rows = WORKLOADS[name], []
    # Compact knows no autocast of its own; it is the slowest by far.
    names = ("fused", "compact") if precision == "float32" else ("fused",)
    with products_in(precision):
        worst = max(check(w, N, precision) for N in (equal(w), ragged(w)))
        for mode, halting, N in (
            ("train", "equal", equal(w)), ("inference", "equal", equal(w)), ("train", "ragged", ragged(w)),
        ):  # fmt: skip
            make = functools.partial(contestants, w, train=mode == "train", device="cuda")
            calls = make(N, names=names)
            if halting == "ragged":
                calls["fused, whole batch"] = make(torch.full_like(N, N.max().item()), names=("fused",))["fused"]
            times = measure(calls, seconds)
            row = {"workload": name, "mode": f"{mode}, {precision}", "halting": halting, "unit": "ms"}
            rows += [{**row, "contestant": k, "value": t, "ratio": t / times["cuDNN"]} for k, t in times.items()]
    say(f"{name}, {precision}: equal to the reference in float64 to {worst:.0e}")
    return rows


def inside(name: str) -> list[dict[str, Any]]:
    """Of the calls of a workload the kernels alone, with the least that they could take, and the memory.

    To be asked for after everything is timed: a profiler that was used once slows all that comes after it.
    """
    from pondertime.fused.triton_plan import forget

    w, peak, rows = WORKLOADS[name], peak_of(machine("cuda")), []
    for precision in EQUAL:
        with products_in(precision):
            for mode in ("train", "inference"):
                train = mode == "train"
                calls = contestants(w, equal(w), train=train, device="cuda", names=("fused",))
                forget()
                memory = {k: memory_of(calls[k]) / 2**20 for k in ("fused", "cuDNN")}
                times = {k: kernel_time(calls[k]) for k in memory}
                if peak is not None:
                    least = floor(w, w.batch_size, precision, peak, train=train)
                    times["floor"] = 1e3 * least.seconds(peak, precision)
                row = {"workload": name, "halting": "equal"}
                rows += [
                    {**row, "mode": f"{mode}, {precision}, {what}", "contestant": k, "value": v, "unit": unit,
                     "ratio": v / found["cuDNN"]}
                    for what, unit, found in (("kernels", "ms", times), ("memory", "MiB", memory))
                    for k, v in found.items()
                ]  # fmt: skip
    return rows


def kernel_time(call: Callable[[], Any], repeats: int = 10) -> float:
    """Milliseconds of a call in which the GPU computes, copies or fills.

    The profiler may lose the first records of a session: they are of kernels that no call makes.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    pad = torch.zeros(1, device="cuda")
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(PADS):
            pad.erfinv_()
        torch.cuda.synchronize()
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    seen: Any = profiler.profiler
    events = [e for e in seen.kineto_results.events() if e.device_type() == DeviceType.CUDA and PAD not in e.name()]
    if len(events) < repeats:
        raise RuntimeError(f"the profiler saw {len(events)} kernels in {repeats} calls; no time of theirs is reported")
    return sum(e.duration_ns() for e in events) / repeats / 1e6


def memory_of(call: Callable[[], Any]) -> int:
    """The most bytes allocated at once during a call, beside what was there before."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before
