"""An LSTM's forward pass without a tape by ``gluon_lstm``, in one launch, and how programs become a cluster.

A cluster (of compute capability 9.0) is up to 16 programs whose multiprocessors see each other's shared memory. Triton
has no words for one of several programs: a kernel built as any other is launched with the attribute.
"""

import functools
from typing import Any

import torch

from pondertime.fused.common import LSTM, Inputs, Rules
from pondertime.fused.triton_loop_run import MOST_READ_OUT
from pondertime.fused.triton_plan import Plan
from pondertime.fused.triton_run import Run, contiguous, make
from pondertime.fused.triton_tape import FLOAT32, HALF

try:
    from pondertime.fused.gluon_lstm import AT, INPUT, ROWS, SHARED, UNITS, WARPS, lstm_kernel
except ImportError:  # a Triton without Gluon, or with another
    lstm_kernel = None

# Sizes of clusters, by how many multiples of 8 units; more programs than this at once and they wait for each other.
SIZES, MOST = (4, 8, 16), 64
# Input steps up to which the kernel projects; features by how many multiples of 32 it has.
MOST_STEPS, FEATURES = 64, (1, 2, 4)


# Devices that have no room for a cluster of this kernel, as a part of a GPU may.
_full: set[torch.device] = set()


class NoRoom(RuntimeError):
    """No cluster fits the device."""


@functools.cache
def has_clusters(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None or lstm_kernel is None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def cluster_for(plan: Plan) -> int | None:
    """The size of the clusters that serve calls of a plan without a tape; None where none do."""
    served = plan.kind is LSTM and not plan.front and plan.precision != HALF.value and plan.T > 0
    if not served or plan.device in _full or not has_clusters(plan.device):
        return None
    size = next((n for n in SIZES if n * UNITS >= plan.H), None)
    return size if size and plan.H > UNITS and size * -(-plan.B // ROWS) <= MOST else None


@functools.cache
def as_cluster(made: Any, size: int, shared: int) -> tuple[Any, Any, tuple[int, int, int]]:
    """What launches a kernel that was built as any other in clusters, with so much shared memory."""
    from triton.runtime import driver

    assert made.metadata.shared <= AT.value, (
        f"Triton's own {made.metadata.shared} bytes of shared memory reach into ours"
    )
    active: Any = driver.active
    run = made.run  # this loads the function
    if active.utils.cuOccupancyMaxActiveClusters(made.function, shared, size) < 1:  # this allows so much
        raise NoRoom
    return run, made.function, (WARPS, size, shared)


class ClusterPlan:
    """What the calls of a plan have in common."""

    def __init__(self, plan: Plan, size: int) -> None:
        self.grid = 1, -(-plan.B // ROWS), 1  # of clusters
        project = plan.floating and plan.T <= MOST_STEPS and plan.features > 0
        self.steps = next((n for n in FEATURES if project and 32 * n >= plan.features), 0)
        self.out = plan.out if plan.out <= MOST_READ_OUT else 0
        self.meta = {
            "RAGGED": plan.ragged, "BIAS": plan.biased, "BIAS_Y": plan.biased_out, "FORCED": plan.forced,
            "PRECISE": plan.precision == FLOAT32.value, "CG": size, "XS": self.steps, "OUT": self.out,
        }  # fmt: skip
        shared = SHARED + (INPUT.value * plan.T if self.steps else 0)
        self.launch = functools.partial(as_cluster, size=size, shared=shared)


def serve(inputs: Inputs, rules: Rules, plan: Plan, **options: Any) -> Run:
    """A run by clusters; where the device has no room for one, as without them."""
    try:
        return ClusterRun(inputs, rules, plan, **options)
    except NoRoom:
        _full.add(plan.device)
        plan.run = None
        return make(inputs, rules, keep=False)


class ClusterRun(Run):
    """One launch, without a way back."""

    def __init__(self, inputs: Inputs, rules: Rules, plan: Plan, *, keep: bool, seen: bool = False) -> None:
        super().__init__(inputs, rules, plan, keep=keep)
        i, T, B, H = self.inputs, self.T, self.B, self.H
        cut = plan.cut
        mean = self.new(*((T * B, H) if plan.out else (T, B, H)), zero=plan.ragged)
        y = self.new(T, B, cut.out) if cut.out else None
        out = self.outputs(mean if y is None else y, zero=plan.ragged, whole=True)
        if plan.ragged and out.rho is not None:
            out.rho.zero_()
        x, xw = (i.x, None) if cut.steps else (None, self.project())
        read_out = (i.weight_y, i.bias_y) if cut.out else (None, None)
        given = contiguous(
            x,
            xw,
            i.weight_hh,
            i.weight_ih,
            i.bias_ih,
            i.bias_hh,
            i.halt,
            i.halt_bias,
            self.lengths,
            i.h,
            i.c,
            *read_out,
        )
        plan.starter(
            lstm_kernel, cut.grid, cut.meta, given, *given[:4], plan.features + 1, *given[4:], y, mean, *out[1:],
            T, B, H, plan.limit, plan.threshold, cluster=cut.launch, num_warps=WARPS,
        )()  # fmt: skip
        self.mean = mean
        self.out: Any = self.read(out) if plan.out and y is None else out
