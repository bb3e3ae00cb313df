"""Which implementation serves a call: the only file that looks."""

import functools
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import nn

from pondertime.cells import Network, hooked, is_torch_cell, modules_of, parameter
from pondertime.compact import compact, ponder_compact
from pondertime.fused import fused, fused_calls
from pondertime.halting import in_transform
from pondertime.reference import Result, linear_read_out, ponder_dense, reference

Backend = Callable[..., Result]

# "fused-calls" is "fused" without its C loop, for machines without a compiler and for comparison.
BACKENDS: dict[str, Backend] = {
    "reference": reference,
    "compact": compact,
    "fused": fused,
    "fused-calls": fused_calls,
}
# What the fused path computes in.
TYPES = {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32,)}
PONDERS = {"reference": ponder_dense, "compact": ponder_compact}


def check_backend(backend: str, compact: bool) -> None:
    """Raise for a name that does not exist, or one that contradicts ``compact=False``."""
    if backend != "auto" and backend not in BACKENDS:
        names = ", ".join(map(repr, ["auto", *BACKENDS]))
        raise ValueError(f"backend: expected one of {names}, got {backend!r}")
    if backend == "compact" and not compact:
        raise ValueError("backend 'compact' drops halted rows, but compact=False asks to keep the batch whole")


@functools.cache
def why_not_kernels(device: torch.device) -> str | None:
    """Why the fused path's kernels cannot run on a GPU, None if they can."""
    if find_spec("triton") is None:
        return "on a GPU it needs Triton"
    if torch.version.hip is not None:
        return "nobody has tried its kernels on ROCm"
    if torch.cuda.get_device_capability(device)[0] < 8:
        return "its kernels need tensor cores that take float32 (compute capability 8.0)"
    return None


def autocast_served(where: str) -> bool:
    """Whether the fused path computes in the type that autocast asks for, if it does: on a GPU, bfloat16."""
    if not torch.is_autocast_enabled(where):
        return True
    return where == "cuda" and torch.get_autocast_dtype("cuda") == torch.bfloat16


def why_not_fused(net: Network, device: torch.device) -> str | None:
    """Why the fused path cannot serve a call, None if it can."""
    (cell, halt, output), spec = modules_of(net), net.spec
    if not is_torch_cell(cell):
        return f"it knows nn.RNNCell, nn.GRUCell and nn.LSTMCell, not {type(cell).__name__}"
    if spec.step is not None or spec.visible is not None:
        return "it knows no CellSpec with a step or a visible part of its own"
    if hooked(cell) or hooked(halt) or type(halt) is not nn.Linear or parameter(halt, "bias") is None:
        return "it calls neither the hooks of the cell and the halting unit nor other halting units"
    if not linear_read_out(output):
        return "it takes the read-out of the mean, so the read-out must be an nn.Linear"
    dtype = parameter(cell, "weight_hh").dtype
    if (other := parameter(halt, "weight").dtype) != dtype:
        return f"it computes in one type, not in {dtype} and {other}"
    where = device.type
    reason = why_not_kernels(device) if where == "cuda" else None
    if reason is not None:
        return reason
    if where not in TYPES:
        return f"it runs on a CPU or a CUDA device, not on {where}"
    if dtype not in TYPES[where]:
        return f"on {where} it computes in {' or '.join(map(str, TYPES[where]))}, not in {dtype}"
    if not autocast_served(where):
        return "under autocast it computes in bfloat16 on a GPU, and nothing else"
    if torch.compiler.is_compiling():
        return "torch.compile cannot look into it"
    if torch.autograd.forward_ad._current_level >= 0:
        return "it has no forward mode"
    return why_not_compact(where)


def why_not_compact(where: str) -> str | None:
    """Why rows cannot be dropped in a call, None if they can."""
    if in_transform():
        return "torch.func transforms allow no shapes that change with the data"
    if where not in ("cpu", "cuda"):
        return f"nobody has tried it on {where}"
    return None


def resolve(net: Network, backend: str, compact: bool, device: torch.device) -> str:
    """The name of the backend that serves a call.

    ``auto`` takes the fastest that can; a name that cannot serve raises and says why.
    """
    if backend == "reference":
        return backend
    reason = None
    if backend != "compact":
        reason = why_not_fused(net, device)
        if backend == "fused-calls" and device.type == "cuda":
            reason = "its plain calls are made for a CPU"
        if reason is None:
            return "fused" if backend == "auto" else backend
    if backend in ("auto", "compact"):
        reason = why_not_compact(device.type) if compact else "compact=False"
        if reason is None:
            return "compact"
    if backend == "auto":
        return "reference"
    raise RuntimeError(f"backend {backend!r} cannot serve this call: {reason}; use 'auto' or 'reference'")
