"""Speed: our backends beside ``torch.nn`` making the same number of updates, and beside the bare matrix products.

All of a workload's contestants are timed in one run, in turns, so that a busy machine slows them alike. Each
backend's values and gradients are first compared with the reference's: without equality no speed is reported.
"""

import csv
import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from pondertime.act import ACT
from pondertime.config import make_config
from pondertime.fused.buffers import forget
from pondertime.learner import Learner
from pondertime.runs import build_all, commit, make_task

CONTESTANTS = ("fused", "fused-calls", "compact", "torch.nn", "products")
HALT_SCALE = 8.0
TOGETHER = 16
TURN_SECONDS = 0.01
COLUMNS = (
    "commit", "machine", "torch", "threads", "workload", "mode", "halting", "contestant", "value", "unit", "ratio",
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """k updates an input step of one of the paper's networks."""

    cell: str
    hidden_size: int
    batch_size: int
    steps: int
    updates: int
    input_size: int
    output_size: int


WORKLOADS = {
    "parity": Workload("rnn", 128, 128, 1, 5, 64, 1),
    "logic": Workload("lstm", 128, 16, 10, 5, 102, 1),
    "addition": Workload("lstm", 512, 32, 5, 6, 50, 66),
    "sort": Workload("lstm", 512, 16, 20, 5, 2, 15),
    "wikipedia": Workload("lstm", 1500, 32, 50, 2, 256, 256),
}


def network(w: Workload) -> ACT:
    """A network whose first input feature alone sets the halting probability, the same at every update."""
    torch.manual_seed(0)
    H = w.hidden_size
    cell: Any = (nn.RNNCell if w.cell == "rnn" else nn.LSTMCell)(w.input_size + 1, H)
    net = ACT(cell, w.output_size, max_steps=100)
    with torch.no_grad():
        # Unit 0 becomes tanh of feature 0 (of an LSTM: tanh of tanh, input and output gates open, forget gate shut).
        for gate, bias in zip(range(cell.weight_hh.shape[0] // H), (30, -30, 0, 30), strict=False):
            bias = 0 if w.cell == "rnn" else bias
            cell.weight_ih[gate * H], cell.weight_hh[gate * H] = 0, 0
            cell.bias_ih[gate * H], cell.bias_hh[gate * H] = bias, 0
        cell.weight_ih[0 if w.cell == "rnn" else 2 * H, 0] = 1
        net.halt.weight.zero_()
        net.halt.weight[0, 0] = HALT_SCALE
        net.halt.bias.zero_()
    return net


def inputs(w: Workload, N: Tensor) -> Tensor:
    """Inputs that make row r ponder N[r] updates at every step."""
    x = torch.randn(w.steps, len(N), w.input_size)
    h = (1 / (N - 0.5)).clamp(max=0.995)
    unit = torch.logit(h) / HALT_SCALE
    x[:, :, 0] = torch.atanh(unit) if w.cell == "rnn" else torch.atanh(torch.atanh(unit))
    return x


def equal(w: Workload) -> Tensor:
    """N = k in every row."""
    return torch.full((w.batch_size,), float(w.updates)).double()


def ragged(w: Workload) -> Tensor:
    """N uniform on 1..2k-1 over the rows, mean k."""
    return (torch.arange(w.batch_size) % (2 * w.updates - 1) + 1).double()


def contestants(
    w: Workload, N: Tensor, *, train: bool, device: str = "cpu", names: tuple[str, ...] = CONTESTANTS[:3]
) -> dict[str, Callable[[], Any]]:
    """What is timed: these backends, torch.nn over T k steps (on a GPU: cuDNN), the bare products."""
    net, x = network(w).to(device), inputs(w, N).to(device)
    weights = torch.randn(w.steps, len(N), w.output_size, device=device)

    def ours(backend: str) -> Callable[[], Any]:
        def call() -> Any:
            net.backend = backend
            with torch.set_grad_enabled(train):
                output, _, ponder = net(x)
                if train:
                    ((output * weights).sum() + ponder.cost.sum()).backward()
            return output

        return call

    plain: Any = (nn.RNN if w.cell == "rnn" else nn.LSTM)(w.input_size + 1, w.hidden_size, device=device)
    plain.train(train)
    read_out = nn.Linear(w.hidden_size, w.output_size, device=device)
    long = torch.randn(w.steps * w.updates, len(N), w.input_size + 1, device=device)

    def torch_nn() -> Any:
        with torch.set_grad_enabled(train):
            y = read_out(plain(long)[0][:: w.updates])
            if train:
                (y * weights).sum().backward()
        return y

    calls = {name: ours(name) for name in names}
    bare = products(w, len(N), train=train, device=device)
    return {**calls, "torch.nn" if device == "cpu" else "cuDNN": torch_nn, "products": bare}


def products(w: Workload, B: int, *, train: bool, device: str = "cpu") -> Callable[[], Any]:
    """The matrix products of the updates and nothing else, on weights laid out for each."""
    H, updates = w.hidden_size, w.steps * w.updates
    gates = H if w.cell == "rnn" else 4 * H

    half = device != "cpu" and torch.is_autocast_enabled(device)

    def new(*shape: int) -> Tensor:
        # Products into a given tensor know nothing of autocast.
        return torch.randn(*shape, device=device, dtype=torch.get_autocast_dtype(device) if half else None)

    h, g, forward, backward = new(B, H), new(B, gates), new(H, gates), new(gates, H)
    all_g, all_h = new(updates * B, gates), new(updates * B, H)
    x, w_x, d_x = new(w.steps * B, w.input_size), new(w.input_size, gates), new(w.steps * B, gates)

    def call() -> Any:
        with torch.no_grad():
            torch.mm(x, w_x)
            for _ in range(updates):
                torch.mm(h, forward, out=g)
            if train:
                for _ in range(updates):
                    torch.mm(g, backward, out=h)
                torch.mm(all_g.t(), all_h)
                torch.mm(d_x.t(), x)

    return call


def check(w: Workload, N: Tensor) -> float:
    """The largest difference of a fused path to the reference, relative; N must not differ at all."""
    net, x = network(w), inputs(w, N)
    results = []
    for backend in ("reference", "fused", "fused-calls"):
        net.backend = backend
        net.zero_grad()
        output, _, ponder = net(x)
        (output.sum() + ponder.cost.sum()).backward()
        if not bool((ponder.steps == N).all()):
            raise RuntimeError(f"{backend}: the updates are not those asked for; no speed is reported")
        results.append([output.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)])
    difference = max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1))
        for other in results[1:]
        for a, b in zip(other, results[0], strict=True)
    )
    if not difference < 1e-3:
        raise RuntimeError(f"a fused path differs from the reference by {difference:.1e}; no speed is reported")
    return difference


def measure(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Median milliseconds of each, timed in turns for about so many seconds; a GPU's work included."""
    timers = {
        name: Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        for name, call in calls.items()
    }
    once = {name: timer.timeit(1).median for name, timer in timers.items()}
    # Short calls are repeated, as they are in a training.
    repeats = {name: max(1, int(TURN_SECONDS / t)) for name, t in once.items()}
    rounds = max(5, min(200, int(seconds / sum(once[name] * n for name, n in repeats.items()))))
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            times[name].append(timer.timeit(repeats[name]).median)
    return {name: 1e3 * statistics.median(t) for name, t in times.items()}


def measure_ragged(w: Workload, seconds: float) -> dict[str, float]:
    """A ragged step, beside one that keeps the batch whole, and the sum of what its updates cost.

    That is, over its updates, the cost of an update at the number of rows that still run, from a step of equal halting.
    """
    N = ragged(w)
    running = [int((n <= N).sum()) for n in range(1, int(N.max()) + 1)]
    calls = contestants(w, N, train=True)
    calls["fused, whole batch"] = contestants(w, torch.full_like(N, N.max().item()), train=True)["fused"]
    for m in set(running):
        calls[f"{m} rows"] = contestants(w, torch.full((m,), float(w.updates)).double(), train=True)["fused"]
    times = measure(calls, seconds)
    cost = {m: times.pop(f"{m} rows") / w.updates for m in set(running)}
    return {**times, "sum of its updates": sum(cost[m] for m in running)}


def peak_memory(call: Callable[[], Any]) -> int:
    """The most bytes allocated at once during a call, from torch's profiler."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it says when it starts and stops
    from torch.profiler import ProfilerActivity, profile

    call()
    forget()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        call()
    events: Any = profiler.profiler
    changes = [(e.start_ns(), e.nbytes()) for e in events.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda c: c[0]):
        held += change
        peak = max(peak, held)
    return peak


def machine(device: str = "cpu") -> str:
    """The processor and its number of cores, or the GPU."""
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {torch.get_num_threads()} threads"


def run(name: str, seconds: float, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Time one workload; returns the rows of the table."""
    w = WORKLOADS[name]
    differences = [check(w, N) for N in (equal(w), ragged(w))]
    say(f"{name}: equal to the reference to {max(differences):.0e}")
    rows = []
    for mode, halting, N in (
        ("train", "equal", equal(w)), ("inference", "equal", equal(w)), ("train", "ragged", ragged(w)),
    ):  # fmt: skip
        if halting == "ragged":
            times = measure_ragged(w, seconds)
        else:
            times = measure(contestants(w, N, train=mode == "train"), seconds)
        base = times["torch.nn"]
        rows += [
            {"workload": name, "mode": mode, "halting": halting, "contestant": k, "value": t, "unit": "ms",
             "ratio": t / base}
            for k, t in times.items()
        ]  # fmt: skip
    memory = {k: peak_memory(contestants(w, equal(w), train=True)[k]) for k in ("fused", "fused-calls", "torch.nn")}
    rows += [
        {"workload": name, "mode": "memory", "halting": "equal", "contestant": k, "value": peak / 2**20, "unit": "MiB",
         "ratio": peak / memory["torch.nn"]}
        for k, peak in memory.items()
    ]  # fmt: skip
    return rows + (together(seconds) if name == "parity" else [])


def together(seconds: float) -> list[dict[str, Any]]:
    """Whole training updates (data, forward, backward, clipping, Adam) of E parity networks at once and one by one."""
    counters = dict.fromkeys((1, TOGETHER), 0)
    learners = {}
    for members in counters:
        config = make_config("parity", members=members)
        task = make_task(config)
        learners[members] = Learner(config, task, build_all(config, task), "cpu")

    def update(members: int) -> Callable[[], None]:
        def call() -> None:
            for _ in range(TOGETHER // members):
                learners[members].update(counters[members])
                counters[members] += 1

        return call

    names = {1: "one by one", TOGETHER: "at once"}
    times = measure({names[members]: update(members) for members in counters}, seconds)
    return [
        {"workload": "parity", "mode": "training", "halting": f"{TOGETHER} networks", "contestant": k, "value": t,
         "unit": "ms", "ratio": t / times["one by one"]}
        for k, t in times.items()
    ]  # fmt: skip


def append(rows: list[dict[str, Any]], path: Path, device: str = "cpu") -> None:
    """Add rows to the table of all measurements, with where they come from."""
    fresh = not path.exists()
    origin = {"commit": commit(), "machine": machine(device), "torch": torch.__version__}
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if fresh:
            writer.writeheader()
        for row in rows:
            numbers = {k: "" if row[k] is None else f"{row[k]:.4g}" for k in ("value", "ratio")}
            writer.writerow({**row, **numbers, **origin, "threads": torch.get_num_threads()})
