"""Which implementation serves a call: the only file that looks."""

from collections.abc import Callable

import torch

from pondertime.cells import in_transform
from pondertime.compact import compact, ponder_compact
from pondertime.reference import Result, ponder_dense, reference

Backend = Callable[..., Result]

BACKENDS: dict[str, Backend] = {"reference": reference, "compact": compact}
PONDERS = {"reference": ponder_dense, "compact": ponder_compact}


def check_backend(backend: str, compact: bool) -> None:
    """Raise for a name that does not exist, or one that contradicts ``compact=False``."""
    if backend != "auto" and backend not in BACKENDS:
        names = ", ".join(map(repr, ["auto", *BACKENDS]))
        raise ValueError(f"backend: expected one of {names}, got {backend!r}")
    if backend == "compact" and not compact:
        raise ValueError("backend 'compact' drops halted rows, but compact=False asks to keep the batch whole")


def resolve(backend: str, compact: bool, device: torch.device) -> str:
    """The name of the backend that serves a call on ``device``.

    ``auto`` drops halted rows where it may; ``torch.func`` transforms and devices that nobody has tried
    go through the reference.
    """
    if backend == "compact" and in_transform():
        raise RuntimeError(
            "backend 'compact' changes shapes with the data, which torch.func transforms do not allow: "
            "use backend 'reference' or 'auto'"
        )
    if backend != "auto":
        return backend
    served = compact and device.type in ("cpu", "cuda") and not in_transform()
    return "compact" if served else "reference"
