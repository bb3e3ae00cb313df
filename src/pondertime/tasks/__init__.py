"""The five tasks of the paper, by name."""

from typing import Any

from pondertime.tasks.addition import Addition
from pondertime.tasks.logic import Logic
from pondertime.tasks.parity import Parity
from pondertime.tasks.sort import Sort
from pondertime.tasks.task import Batch, Task
from pondertime.tasks.wikipedia import Wikipedia

TASKS: dict[str, type[Task]] = {
    "parity": Parity,
    "logic": Logic,
    "addition": Addition,
    "sort": Sort,
    "wikipedia": Wikipedia,
}

__all__ = ["TASKS", "Addition", "Batch", "Logic", "Parity", "Sort", "Task", "Wikipedia", "make"]


def make(name: str, **options: Any) -> Task:
    """Make a task by its name; ``options`` go to its class, e.g. ``make("parity", bits=8)``."""
    if name not in TASKS:
        raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {name!r}")
    return TASKS[name](**options)
