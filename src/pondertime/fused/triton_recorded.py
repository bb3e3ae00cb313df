"""Ticks recorded once and played again, for networks in training: call after call of one shape.

Starting a product and a kernel takes the host longer than the device takes to compute them. A recording (a CUDA graph)
holds TICKS of both; it needs its tensors at the same addresses in every call, so they lie in a ``Space`` that one run
at a time has for its own, from its forward pass to the end of its backward pass.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from pondertime.fused.common import Grads, Inputs, Outputs, Rules, stream_of
from pondertime.fused.triton_plan import Plan
from pondertime.fused.triton_run import Run
from pondertime.fused.triton_tick_run import TICKS, TickRun, block, key


class Space:
    """Memory of a run, in the order in which a pass asks for it, and the recordings that use it."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.at = capacity, 0
        self.stream: Any = None  # on which recordings are made
        self.tensors: list[Tensor] = []
        self.passes: dict[Any, list[Tensor]] = {}
        self.recordings: dict[Any, Any] = {}

    def begin(self, kind: Any) -> None:
        """Begin a pass; those of one kind ask for the same."""
        self.tensors, self.at = self.passes.setdefault(kind, []), 0

    def take(self, make: Callable[[], Tensor]) -> Tensor:
        """The next tensor: that of the pass before, or a new one."""
        if self.at == len(self.tensors):
            self.tensors.append(make())
        self.at += 1
        return self.tensors[self.at - 1]


class RecordedRun(TickRun):
    """The ticks of a training step; its results are the caller's, its memory is the plan's."""

    roomy = 64  # to record anew takes longer than most updates

    def __init__(self, inputs: Inputs, rules: Rules, plan: Plan, *, keep: bool, seen: bool = False) -> None:
        self.free = plan.spaces.setdefault(stream_of(plan.device), [])
        self.space: Any = self.free.pop() if self.free else Space(0)
        super().__init__(inputs, rules, plan, keep=keep, seen=seen)
        out, names = self.out, ("h", "c", "steps", "remainder") + (() if plan.out else ("y",))
        copies = {k: getattr(out, k).clone() for k in names if getattr(out, k) is not None}
        self.out = out._replace(**copies)

    def guess(self, rows: int) -> int:
        return self.space.capacity or self.room(super().guess(rows))

    def room(self, ticks: int) -> int:
        """A little more, since a longer tape means to record anew."""
        return min(ticks + ticks // 4 + TICKS, max(ticks, self.T * self.plan.limit))

    def forward(self) -> Outputs:
        if self.space.capacity != self.capacity:
            self.space = Space(self.capacity)
        self.space.begin("forward")
        return super().forward()

    def gradients(self, d: Grads, *, x: bool) -> list[Tensor | None]:
        self.space.begin(key(d))
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            made = super().gradients(d, x=x)
        self.free.append(self.space)
        self.space = None  # the next run's
        return made

    def new(self, *shape: int, zero: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
        made = self.space.take(lambda: Run.new(self, *shape, dtype=dtype))
        return made.zero_() if zero else made

    def fixed(self, a: Any) -> Any:
        return None if a is None else self.space.take(lambda: torch.empty_like(a)).copy_(a)

    def report(self) -> Tensor:
        return self.space.take(super().report).zero_()

    def repeat(self, kind: Any, wanted: list[int], tick: Callable[[int], None]) -> None:
        """As many ticks more as fill the last recording do nothing; networks at the end that are done are left out."""
        size = block(self.E)
        for made in range(0, max(wanted), TICKS):
            last = max(e for e, some in enumerate(wanted) if some > made)
            first = min((last // size + 1) * size, self.E)
            recording = self.space.recordings.get((kind, first))
            if recording is None:
                self.space.recordings[kind, first] = self.record(lambda first=first: tick(first))
            else:
                recording.replay()

    def record(self, tick: Callable[[], None]) -> Any:
        """Make TICKS ticks and record as many."""
        for _ in range(TICKS):
            tick()  # this also builds the kernels
        if self.device.type != "cuda":
            return None
        recording, space = torch.cuda.CUDAGraph(), self.space
        space.stream = space.stream or torch.cuda.Stream(self.device)
        with torch.cuda.graph(recording, stream=space.stream, capture_error_mode="thread_local"):
            for _ in range(TICKS):
                tick()
        return recording
