"""Many small networks trained at once on a GPU, one program a network (``rnn_kernel.py``, ``lstm_kernel.py``).

Programs, one a multiprocessor, take networks from a queue. A launch gives every network a budget of cell updates in
proportion to the work it has left, but never more than a program can do, and takes the longest first: no program is
idle while there is work. Networks with a small time penalty go ahead: if one comes to ponder long, there is work left
for the other programs meanwhile. What a network computes does not depend on its budgets.
"""

import math
from typing import Any

import torch
from torch import Tensor

from pondertime.batches import SUMS
from pondertime.config import TrainConfig
from pondertime.ensemble.ring import Ring
from pondertime.networks import build
from pondertime.tasks import Task

CHUNK = 1536  # batches that are drawn at once: fewer calls, more memory
PACKING = 0.92  # how full programs get that take one network after the other
AHEAD = 8  # times the share of a network with the largest time penalty, for one with the smallest
SLOTS = 32  # intervals a network may close before they are taken
SHARED = ("task", "batch_size", "hidden_size", "max_steps", "epsilon", "log_every", "bits", "placement")
PRECISIONS = ("bfloat16", "tf32", "float32")


def why_not_gpu_group(configs: list[TrainConfig], task: Task, precision: str = "auto") -> str | None:
    """Why these networks cannot be trained one a program, or None."""
    for name in SHARED:
        if len({getattr(c, name) for c in configs}) > 1:
            return f"the networks differ in {name}"
    config = configs[0]
    if task.name not in ("parity", "logic"):
        return f"it knows parity and logic, not {task.name}"
    if config.hidden_size > 128 or task.input_size > 128:
        return "a network must fit one multiprocessor: at most 128 units and 128 inputs"
    if config.batch_size > (128 if task.name == "parity" else 16):
        return f"the batch of {config.batch_size} does not fit one multiprocessor"
    if config.workers > 1:
        return "it trains with one worker"
    if task.cell == "lstm" and precision not in ("auto", "bfloat16") and config.hidden_size > 64:
        return f"the weights of an LSTM with more than 64 units only fit in bfloat16, not in {precision}"
    return None


class GpuGroup:
    """E networks of one shape, each with its own tau, learning rate and seed, trained on one device."""

    def __init__(
        self, configs: list[TrainConfig], task: Task, device: str = "cuda", *,
        precision: str = "bfloat16", per_chunk: int | None = None, quantum: int = 8192,
    ) -> None:  # fmt: skip
        if precision not in PRECISIONS:
            raise ValueError(f"precision: expected one of {', '.join(PRECISIONS)}, got {precision!r}")
        reason = why_not_gpu_group(configs, task, precision)
        if reason is not None:
            raise ValueError(f"these networks cannot be trained together: {reason}")
        self.configs, self.task, self.device, self.quantum = configs, task, torch.device(device), quantum
        self.precision = precision
        self.seconds = 0.0  # of launches, on a GPU
        E, config = len(configs), configs[0]
        self.iterations, self.stopped = [0] * E, [False] * E
        self.cost = [5.0] * E  # of an update, in cell updates
        self.cells = [0] * E
        self.eagerness = eagerness([c.tau for c in configs])
        self._take_weights([build(c, task).state_dict() for c in configs])
        self.settings = self._tensor([settings(c) for c in configs], torch.float64)
        self.K = len(SUMS) + config.max_steps + 1
        self._sums = torch.zeros(E, self.K, dtype=torch.float64, device=device)
        self._intervals = torch.zeros(E, SLOTS, self.K, dtype=torch.float64, device=device)
        self._interval_at = torch.zeros(E, SLOTS, dtype=torch.int32, device=device)
        # iterations, cell updates, stopped, closed intervals
        self._counters = torch.zeros(4, E, dtype=torch.int32, device=device)
        self._taken, self._closed = [0] * E, [0] * E
        self._intervals_read: list[tuple[int, int, Tensor]] = []
        self._running: list[Any] | None = None  # the events around the launch that has not been read
        kernel = kernels()[task.cell]
        self.per_chunk = per_chunk or CHUNK
        self.ring = Ring(configs, task, device, signed=task.cell == "rnn", per_chunk=self.per_chunk)
        self.processors = multiprocessors(self.device)
        self.programs = min(E, self.processors)
        self.kernel = kernel(self)  # keeps no reference to the group

    def _tensor(self, values: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)

    def _take_weights(self, states: list[dict[str, Tensor]]) -> None:
        """Lay the networks' weights out as flat rows."""
        self.shapes = {name: value.shape for name, value in states[0].items()}
        # The rows of weight_ih start at multiples of four.
        self.pads = {name: -shape[-1] % 4 if name == "cell.weight_ih" else 0 for name, shape in self.shapes.items()}
        sizes = [shape.numel() + self.pads[k] * shape[0] for k, shape in self.shapes.items()]
        self.offsets = [sum(sizes[:k]) for k in range(len(sizes))]
        self.stride = -(-sum(sizes) // 32) * 32
        self._flat = torch.zeros(3, len(states), self.stride, device=self.device)
        for name, view in self._views(self._flat[0]).items():
            view.copy_(torch.stack([state[name] for state in states]))

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters in flat rows, by name, ``[E, ...]``."""
        views = {}
        for (name, shape), start in zip(self.shapes.items(), self.offsets, strict=True):
            *rows, last = shape
            wide = torch.Size([*rows, last + self.pads[name]])
            views[name] = flat[:, start : start + wide.numel()].unflatten(1, wide)[..., :last]
        return views

    def advance(self, until: int) -> None:
        """One launch of progress towards ``until`` updates of each network, begun: what is known is the last one's.

        So the caller makes what it likes of that while the device computes.
        """
        self.wait()
        if not self.behind(until):
            return
        self.ring.refill(self.iterations, until, self.per_chunk // 2)
        on_device = self.device.type == "cuda"
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_device else []
        self.ring.settle()
        for event in events[:1]:
            event.record()
        self._launch(until)
        for event in events[1:]:
            event.record()
        self._running = events
        # While the device computes: draw what will be needed, the most urgent first.
        going = (lambda: not events[1].query()) if on_device else None
        self.ring.refill(self.iterations, until + self.ring.size, self.ring.size, going)

    def wait(self) -> None:
        """Wait for the launch that runs, if one does, and take over its counters."""
        if self._running is None:
            return
        self._read()
        if self._running:
            self.seconds += self._running[0].elapsed_time(self._running[1]) / 1000
        self._running = None

    def run(self, until: int) -> None:
        """Launches until every network that has not stopped has made ``until`` updates."""
        self.wait()
        while self.behind(until):
            self.advance(until)
            self.wait()

    def behind(self, until: int) -> list[int]:
        """The networks that can make updates before ``until``."""
        return [e for e, i in enumerate(self.iterations) if i < until and not self.stopped[e]]

    def _launch(self, until: int) -> None:
        todo = self.behind(until)
        budgets = [0] * len(self.configs)
        for e, budget in self._budgets({e: (until - self.iterations[e]) * self.cost[e] for e in todo}).items():
            budgets[e] = int(budget) + 1
        order = sorted(todo, key=lambda e: -budgets[e])
        schedule = [budgets, order + [0] * (len(budgets) - len(order)), self.ring.filled(), self._taken]
        self.kernel.launch(self, self._tensor(schedule, torch.int32), len(order), until)

    def _budgets(self, work: dict[int, float]) -> dict[int, float]:
        """Share a launch out in proportion to the work left and to eagerness, at most all of one program each."""
        # A network should not use up its ring in one launch.
        cost = sum(self.cost[e] for e in work) / len(work)
        most = min(float(self.quantum), self.per_chunk / 2 * cost * max(1.0, len(work) / self.programs))
        shares = {e: work[e] * self.eagerness[e] for e in work}
        left, room, budgets = sum(shares.values()), most * self.programs, {}
        packed = False
        for e in sorted(work, key=lambda e: -shares[e]):
            if shares[e] * room >= most * left:
                budgets[e] = min(most, work[e])
            else:
                # Beside networks that fill their program, the others must fit in the same time.
                if budgets and not packed:
                    room *= PACKING
                packed = True
                budgets[e] = min(most, work[e], shares[e] * room / left)
            left, room = left - shares[e], room - budgets[e]
        return budgets

    def _read(self) -> None:
        """Wait for the launch; take over its counters and the intervals that it closed."""
        iterations, cells, stopped, self._closed = self._counters.tolist()
        for e, (i, c) in enumerate(zip(iterations, cells, strict=True)):
            if i > self.iterations[e]:
                self.cost[e] = self.kernel.overhead + c / (i - self.iterations[e])
            self.cells[e] += c
        self.iterations, self.stopped = iterations, [bool(s) for s in stopped]
        self._counters[1].zero_()
        places = [(e, j) for e, closed in enumerate(self._closed) for j in range(self._taken[e], closed)]
        if places:
            e, slot = self._tensor([[e for e, _ in places], [j % SLOTS for _, j in places]], torch.int64)
            at, values = self._interval_at[e, slot].tolist(), self._intervals[e, slot].cpu()
            self._intervals_read += [(place[0], i, row) for place, i, row in zip(places, at, values, strict=True)]
            self._taken = list(self._closed)

    def diverged(self) -> list[int]:
        """The networks that stopped because their loss was not finite."""
        return [e for e, stopped in enumerate(self.stopped) if stopped]

    def stop(self, members: list[int]) -> None:
        """Leave these networks as they are."""
        self.wait()
        for e in members:
            self.stopped[e] = True
            self._counters[2, e] = 1

    def sums(self) -> Tensor:
        """The sums of the intervals that are open, ``[E, K]``."""
        self.wait()
        return self._sums.clone()

    def take_intervals(self) -> list[tuple[int, int, list[float]]]:
        """The intervals closed since the last call, as far as is known, as (member, iteration, sums), by member."""
        taken, self._intervals_read = self._intervals_read, []
        return [(e, i, sums.tolist()) for e, i, sums in sorted(taken, key=lambda place: place[:2])]

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Weights and Adam's moments by name, with an axis E in front; copies."""
        self.wait()
        model, first, second = (self._views(flat.clone()) for flat in self._flat)
        step = self._tensor(self.iterations, torch.float32)
        optimiser = {}
        for name in model:
            optimiser[f"{name}.step"] = step.clone()
            optimiser[f"{name}.exp_avg"], optimiser[f"{name}.exp_avg_sq"] = first[name], second[name]
        return {"model": model, "optimiser": optimiser}

    def load(self, tensors: dict[str, dict[str, Tensor]], iterations: list[int], sums: Tensor | None = None) -> None:
        """Go on from ``tensors()`` at these iterations, and from the ``sums()`` of that time."""
        self.wait()
        sources = [
            tensors["model"],
            {k: tensors["optimiser"][f"{k}.exp_avg"] for k in self.shapes},
            {k: tensors["optimiser"][f"{k}.exp_avg_sq"] for k in self.shapes},
        ]
        for flat, source in zip(self._flat, sources, strict=True):
            for name, view in self._views(flat).items():
                view.copy_(source[name])
        self.iterations, self.stopped = list(iterations), [False] * len(iterations)
        self._taken, self._closed = [0] * len(iterations), [0] * len(iterations)
        self._intervals_read = []
        self._counters.zero_()
        self._counters[0] = self._tensor(self.iterations, torch.int32)
        self._sums.zero_()
        if sums is not None:
            self._sums.copy_(sums)
        self.ring.start(self.iterations)


def eagerness(taus: list[float | None]) -> list[float]:
    """How much more than in proportion to its work a network gets: from AHEAD for the smallest tau down to 1."""
    order = sorted({math.inf if tau is None else tau for tau in taus}, reverse=True)
    steps = max(1, len(order) - 1)
    return [AHEAD ** (order.index(math.inf if tau is None else tau) / steps) for tau in taus]


def settings(config: TrainConfig) -> list[float]:
    """A network's row of settings, see ``kernel_parts``."""
    force = config.force_steps or 0
    log_beta2 = math.log(config.beta2) if config.beta2 else -math.inf
    return [
        config.tau or 0.0, config.learning_rate, log_beta2, config.beta2, config.clip or 0.0,
        float(config.tau_warmup), float(force), float(force or config.max_steps),
        config.cooldown * config.iterations, float(config.iterations),
    ]  # fmt: skip


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def kernels() -> dict[str, Any]:
    from pondertime.ensemble.launch import LSTMLaunch, RNNLaunch

    return {"rnn": RNNLaunch, "lstm": LSTMLaunch}
