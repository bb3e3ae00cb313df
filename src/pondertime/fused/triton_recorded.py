"""Ticks recorded once and played again, for calls that come again in the same shape.

Starting a product and a kernel takes the host longer than the device takes to compute them. A recording (a CUDA graph)
holds as many calls as one likes; it needs its tensors at the same addresses every time, so they lie in a ``Space``. The
ticks are recorded TICKS at a time; with ``RecordedRun.step`` all that comes before, between and after them is, too.
``serve`` is for plain calls, of which a run makes one: a ``PlayedRun`` has a space that runs before it had.
"""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pondertime.fused.common import Grads, Inputs, Outputs, Rules, capturing, stream_of
from pondertime.fused.triton_plan import Plan
from pondertime.fused.triton_run import Run, is_small
from pondertime.fused.triton_tick_run import TICKS, Back, TickRun, alike, block

# Recordings of what is between and after the ticks, one for each number of ticks; then the oldest is given up.
MOST_STEPS = 32
# Which plain call of a plan is recorded; how many times as many it takes to be recorded again where that was given up;
# the part of a device's memory that spaces of plain calls may have in all.
CALLS, LATER, PART = 10, 8, 1 / 32
# There is one recording at a time, in a process.
_recording = threading.RLock()


def rounded(ticks: int) -> int:
    """A little more, so that numbers of ticks come again."""
    size = max(TICKS, (1 << ticks.bit_length()) // 32)
    return -(-ticks // size) * size


class Space:
    """Memory of a run, in the order in which a pass asks for it, and the recordings that use it."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity, self.at, self.cuda = capacity, 0, device.type == "cuda"
        self.home = stream_of(device)
        self.bytes = 0
        self.tensors: list[Tensor] = []
        self.passes: dict[Any, list[Tensor]] = {}
        self.ticks: dict[Any, Any] = {}
        self.begun: Any = None  # the recording of what comes before the first tick
        self.steps: dict[Any, Any] = {}
        if self.cuda:
            self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
            self.tick_pool = torch.cuda.graph_pool_handle()

    def begin(self, kind: Any) -> None:
        """Begin a pass; those of one kind ask for the same."""
        self.tensors, self.at = self.passes.setdefault(kind, []), 0

    def take(self, make: Callable[[], Tensor]) -> Tensor:
        """The next tensor: that of the pass before, or a new one."""
        if self.at == len(self.tensors):
            with torch.inference_mode(False):  # others than the one that makes it write to it
                self.tensors.append(make())
            self.bytes += self.tensors[-1].nbytes
        self.at += 1
        return self.tensors[self.at - 1]

    def record(self, call: Callable[[], Any], *, ticks: bool = False) -> tuple[Any, Any]:
        """A recording of a call that was made before, and what it returns.

        All but ticks share a pool, though they are played in any order: what one leaves for another is kept, and
        nothing but ticks is played in between. A library's products write to a workspace that torch keeps for a stream
        (which others may have): it must be one of this pool, and nobody else's.
        """
        recording, pool = torch.cuda.CUDAGraph(), self.tick_pool if ticks else self.pool
        with _recording, torch.cuda.stream(torch.cuda.current_stream(self.stream.device)):
            torch.cuda.synchronize(self.stream.device)
            torch._C._cuda_clearCublasWorkspaces()
            try:
                with torch.cuda.graph(recording, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
                    made = call()
            finally:
                torch._C._cuda_clearCublasWorkspaces()
        return recording, made


class RecordedRun(TickRun):
    """A run by recorded ticks, which can make any number of steps of its networks: its tensors stay, what they hold
    changes."""

    lasting = True
    roomy = 64  # to record anew takes longer than most updates
    space: Any = None
    back: tuple[Any, ...]  # what the backward pass is asked for

    def guess(self, rows: int) -> int:
        return self.room(super().guess(rows))

    def room(self, ticks: int) -> int:
        """A little more, since a longer tape means to record anew."""
        return min(ticks + ticks // 4 + TICKS, max(ticks, self.T * self.plan.limit))

    def forward(self) -> None:
        if self.space is None or self.space.capacity != self.capacity:
            self.space = Space(self.capacity, self.device)
        space = self.space
        if space.begun is not None:
            self.report.zero_()
            space.begun.replay()
        else:
            self.begin()
            if space.cuda:
                space.begun, _ = space.record(self.begin)
        self.advance()

    def begin(self) -> None:
        self.space.begin("forward")
        super().begin()

    def begin_back(self, d: Grads, groups: Any, *, x: bool) -> Back:
        self.back = "backward", x, torch.backends.cuda.matmul.fp32_precision, *(a is None for a in d)
        self.space.begin(self.back)
        return super().begin_back(d, groups, x=x)

    def step(
        self,
        judge: Callable[[Outputs], tuple[Any, Grads]],
        apply: Callable[[Any, Inputs], None],
        state: Any = None,
    ) -> Any:
        """A training step: forward, ``judge`` of the results, backward, ``apply`` of what it saw and the derivatives.

        Returns what ``judge`` saw, which the next step overwrites, as it does the results. The two must do the same
        calls on the same tensors every time, unless ``state`` is another, and ``judge`` must give the same derivatives
        even then; once they are recorded nobody calls them.
        """
        with torch.cuda.device(self.device) if self.space.cuda else nullcontext():
            return self.make_step(judge, apply, state)

    def make_step(self, judge: Any, apply: Any, state: Any) -> Any:
        self.complete()
        groups = alike([min(rounded(ticks), self.capacity) for ticks in self.needed])
        known = self.space.steps.get((state, *groups))
        if known is not None:
            between, (seen, back, _), after = known
            between.replay()
            self.repeat("backward", back.wanted, back.tick)
            after.replay()
            return seen

        def begin_step() -> tuple[Any, Back, tuple[Any, ...]]:
            self.present = None
            seen, d = judge(self.whole())
            d_mean, *by_read_out = self.by_read_out(d.y)
            return seen, self.begin_back(d._replace(y=d_mean), groups, x=False), tuple(by_read_out)

        def end_step(seen: Any, back: Back, by_read_out: tuple[Any, ...]) -> None:
            made: Any = (*self.end_back(back, x=False), *by_read_out)
            apply(seen, Inputs(*made))

        seen, back, by_read_out = begin_step()
        self.repeat("backward", back.wanted, back.tick)
        end_step(seen, back, by_read_out)
        if self.space.cuda:
            if len(self.space.steps) == MOST_STEPS:
                self.space.steps.pop(next(iter(self.space.steps)))
            between, made = self.space.record(begin_step)
            after, _ = self.space.record(lambda: end_step(*made))
            self.space.steps[state, *groups] = between, made, after
        return seen

    def new(self, *shape: int, zero: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
        made = self.space.take(lambda: Run.new(self, *shape, dtype=dtype))
        return made.zero_() if zero else made

    def fixed(self, a: Any) -> Any:
        return None if a is None else self.space.take(lambda: torch.empty_like(a)).copy_(a)

    def new_report(self) -> Tensor:
        return self.space.take(super().new_report).zero_()

    def repeat(self, kind: Any, wanted: list[int], tick: Callable[[int], None]) -> None:
        """As many ticks more as fill the last recording do nothing; networks at the end that are done are left out."""
        size, kind = block(self.E), self.back if kind == "backward" else kind

        def ticks(first: int) -> None:
            for _ in range(TICKS):
                tick(first)

        for made in range(0, max(wanted), TICKS):
            last = max(e for e, some in enumerate(wanted) if some > made)
            first = min((last // size + 1) * size, self.E)
            recording = self.space.ticks.get((kind, first))
            if recording is not None:
                recording.replay()
                continue
            ticks(first)  # this also builds the kernels
            if self.space.cuda:
                self.space.ticks[kind, first], _ = self.space.record(lambda first=first: ticks(first), ticks=True)


# The plans of plain calls that have a space, and its bytes; the one that was used least lately gives its own up.
_held: WeakKeyDictionary[Plan, int] = WeakKeyDictionary()


class PlayedRun(RecordedRun):
    """A plain call by recorded ticks, in a space of its plan; what the caller gets is his own."""

    lasting = False
    roomy = 1

    def __init__(self, inputs: Inputs, rules: Rules, plan: Plan, *, keep: bool, space: Space | None) -> None:
        self.space, self.plan = space, plan
        super().__init__(inputs, rules, plan, keep=keep)

    def __del__(self) -> None:
        if self.space is not None and _held.pop(self.plan, None) is not None:
            _held[self.plan] = self.space.bytes  # as the last one
            self.plan.spaces.append(self.space)

    def guess(self, rows: int) -> int:
        return super().guess(rows) if self.space is None else self.space.capacity

    def forward(self) -> None:
        if self.space is None or self.space.capacity != self.capacity:
            self.space = Space(self.capacity, self.device)
        self.begin()
        self.advance()

    def whole(self) -> Outputs:
        made = zip(super().whole(), self.results, strict=True)
        own: Any = (a.clone() if a is kept and a is not None else a for a, kept in made)
        return Outputs(*own)

    def repeat(self, kind: Any, wanted: list[int], tick: Callable[[int], None]) -> None:
        """What does not fill a recording is started while the recordings run."""
        ticks, rest = divmod(max(wanted), TICKS)
        try:
            super().repeat(kind, [ticks * TICKS] * self.E, tick)
        except RuntimeError:
            # Another thread does what must not be done while anything is recorded: without recordings, then. More
            # ticks than are wanted do nothing.
            _held.pop(self.plan, None)
            rest = max(wanted)
        for _ in range(rest):
            tick(self.E)


def serve(inputs: Inputs, rules: Rules, plan: Plan, *, keep: bool, seen: bool = False) -> TickRun:
    """A plain call by ticks: by recorded ones where calls of its shape came often enough, and no other run has them."""
    stream = stream_of(plan.device)
    if seen or capturing(stream):
        return TickRun(inputs, rules, plan, keep=keep, seen=seen)
    if plan not in _held:
        plan.calls += 1
        if plan.calls == (plan.due or CALLS):
            plan.calls, plan.due = 0, LATER * (plan.due or CALLS)
            if hold(plan, keep=keep):
                return PlayedRun(inputs, rules, plan, keep=keep, space=None)
    try:
        space = plan.spaces.pop()  # nobody else has it now
    except IndexError:
        return TickRun(inputs, rules, plan, keep=keep)
    if space.home != stream:
        _held.pop(plan, None)
        return TickRun(inputs, rules, plan, keep=keep)
    return PlayedRun(inputs, rules, plan, keep=keep, space=space)


def hold(plan: Plan, *, keep: bool) -> bool:
    """Whether a plan may have a space; others may have to give up theirs."""
    room = int(PART * memory(plan.device))
    most = plan.T * plan.limit if is_small(plan, plan.B) else 2 * (plan.updates or 0)
    numbers = plan.T * plan.kind.gates + (most * (plan.kind.slots + plan.kind.leaves) if keep else 0)
    size = 4 * plan.E * plan.H * (plan.B * numbers + plan.P)
    with _recording:
        others = {p: each for p, each in _held.items() if p.device == plan.device}
        if size <= room:
            while sum(others.values()) + size > room:
                oldest = next(iter(others))
                del others[oldest]
                _held.pop(oldest, None)
                oldest.spaces.clear()
            _held[plan] = size
        return size <= room


@cache
def memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 2**34
