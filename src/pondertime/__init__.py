"""Recurrent networks that learn how long to think: Adaptive Computation Time for PyTorch."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pondertime.act import ACT, ACTOutput, PonderOutput, Trace, ponder
    from pondertime.cells import CellSpec
    from pondertime.halting import Halting, Ponder, halting_distribution

__version__ = "0.1.0"

# Loaded on first use: the command line's help must not wait for torch.
_HOME = {
    "ACT": "act",
    "ACTOutput": "act",
    "PonderOutput": "act",
    "Trace": "act",
    "ponder": "act",
    "CellSpec": "cells",
    "Halting": "halting",
    "Ponder": "halting",
    "halting_distribution": "halting",
}

__all__ = [
    "ACT",
    "ACTOutput",
    "CellSpec",
    "Halting",
    "Ponder",
    "PonderOutput",
    "Trace",
    "halting_distribution",
    "ponder",
]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'pondertime' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pondertime.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
