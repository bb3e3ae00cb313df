"""What calls of one shape have in common on a GPU: sizes, constants and built kernels, worked out once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pondertime.fused.common import GRU, KINDS, Inputs, Rules, check_inputs, stream_of
from pondertime.fused.triton_tape import FLOAT32, HALF, TF32

# What calls of a shape have in common.
_plans: dict[tuple[Any, ...], "Plan"] = {}
MOST_PLANS = 1000


def precision_of(half: bool) -> int:
    """How products are made: in bfloat16 under autocast, else as torch's own are, by either way to say so."""
    if half:
        return HALF.value
    return TF32.value if torch.backends.cuda.matmul.fp32_precision == "tf32" else FLOAT32.value


class Plan:
    """What calls of one shape and the same rules have in common, worked out once."""

    def __init__(self, inputs: Inputs, rules: Rules, precision: int) -> None:
        self.B, self.H = inputs.h.shape[-2:]
        self.front = (inputs.x.shape[0],) if rules.stacked else ()
        self.E, self.T = (inputs.x.shape[0], inputs.x.shape[1]) if rules.stacked else (1, inputs.x.shape[0])
        self.device, self.kind, kind = inputs.h.device, rules.kind, rules.kind
        self.X, self.S, self.P = (k * self.H for k in (kind.x_width, kind.slots, kind.gates))
        self.limit, self.forced = min(rules.force_steps or rules.max_steps, 2**31 - 1), rules.force_steps is not None
        self.threshold, self.ragged = 1 - rules.epsilon, rules.lengths is not None
        self.biased = inputs.bias_ih is not None
        self.precision, self.half = precision, precision == HALF.value
        self.out = 0 if inputs.weight_y is None else inputs.weight_y.shape[-2]  # size of the read-out
        self.biased_out = inputs.bias_y is not None
        self.floating, self.features = inputs.x.is_floating_point(), inputs.weight_ih.shape[-1] - 1
        # Features of x that rows of a tape can hold: its product comes with that of the states. A GRU's input sees
        # other derivatives than its state.
        small = self.floating and self.features <= self.H
        self.taped = self.features if small and kind is not GRU else 0
        self.calls, self.due = 0, 0  # calls since the last recording was asked for, and at which it is (0: the first)
        self.spaces: list[Any] = []  # for calls that are recorded, when no run has them
        self.updates: int | None = None  # that the last such call needed
        self.ticks: list[int] | None = None  # and each of its networks
        self.run: Any = None  # the class that serves it
        self.recorded: Any = None  # and the one that serves a training
        self.cut: Any = None  # how a loop shares out its work
        self.metas: dict[tuple[Any, ...], dict[str, Any]] = {}
        # What starts a kernel, by what it was built for: run, function, metadata, the constants after its arguments.
        self.built: dict[tuple[Any, ...], tuple[Any, Any, Any, tuple[Any, ...]]] = {}

    def meta(self, sizes: dict[str, Any], **options: Any) -> dict[str, Any]:
        """What a kernel is made for."""
        key = tuple(options.items())
        if key not in self.metas:
            kind = self.kind
            made = {"CELL": KINDS.index(kind), "GATES": kind.gates, "SLOTS": kind.slots}
            self.metas[key] = made | options | {"FORCED": self.forced} | sizes
        return self.metas[key]

    def starter(
        self, kernel: Any, grid: tuple[int, ...], meta: dict[str, Any], users: tuple[Tensor | None, ...], *args: Any,
        cluster: Callable[[Any], tuple[Any, Any, Any]] | None = None, **options: Any,
    ) -> Callable[[], None]:  # fmt: skip
        """What starts a kernel with these arguments; ``cluster`` says how, where its programs are clusters.

        One that was built before for the same numbers is started without Triton's look at every argument. What it was
        built for includes how the users' tensors are aligned.
        """
        # Triton asks the driver about every tensor; numbers it takes as they are.
        given, places = list(args), 0
        for k, a in enumerate(args):
            if isinstance(a, Tensor) and a.is_cuda:
                given[k] = place = a.data_ptr()
                places |= place
        aligned = places % 16 == 0 or tuple(a is None or a.data_ptr() % 16 == 0 for a in users)
        key, built, device = (kernel, grid, id(meta), aligned), self.built, self.device

        def start() -> None:
            known = built.get(key)
            if known is None and cluster is not None:
                made = kernel.run(*args, grid=grid, warmup=True, **meta, **options)
                known = built[key] = *cluster(made), tuple(meta.values())
            elif known is None:
                made = kernel[grid](*args, **meta, **options)
                if made is not None:  # the interpreter builds nothing
                    built[key] = made.run, made.function, made.packed_metadata, tuple(meta.values())
                return
            run, function, metadata, constants = known
            run(*grid, stream_of(device), function, metadata, None, None, None, *given, *constants)

        return start


def forget() -> None:
    """Give up all plans, and with them the memory in which calls are recorded."""
    _plans.clear()


def plan_of(inputs: Inputs, rules: Rules, keep: bool) -> Plan:
    """The plan of a call."""
    kind, epsilon, max_steps, force_steps, lengths, stacked, half, _ = rules
    key = (
        keep, kind.name, epsilon, max_steps, force_steps, lengths is None, stacked,
        *[a if a is None else (a.shape, a.dtype, a.device) for a in inputs], precision_of(half),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        check_inputs(inputs, kind)
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = Plan(inputs, rules, key[-1])
    return plan
