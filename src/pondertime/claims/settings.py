"""How a stored network was trained: from its preset and the command that it was made with."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pondertime.config import PAPER, PRESETS, TASK_OPTIONS
from pondertime.results import Row
from pondertime.results.commands import settings


class Setting(NamedTuple):
    """What the result tables do not say by themselves."""

    learning_rate: float
    max_steps: int
    cooldown: float
    batch_size: int
    init_std: float | None


def setting(row: Row) -> Setting:
    """The learning rate and what else is told of it: those of the command, else of the preset."""
    found = settings(row.command, PRESETS[row.preset][row.task])
    whole = {name: int(found[name]) for name in ("max_steps", "batch_size")}
    return Setting(found["learning_rate"], cooldown=found["cooldown"], init_std=found["init_std"], **whole)


def sizes(row: Row) -> list[str]:
    """What the command says of the size of the network, if it is not the paper's, and of the task."""
    found = settings(row.command, PRESETS[row.preset][row.task])
    units = found["hidden_size"]
    own = [f"{units:g} units"] if units != PAPER[row.task].hidden_size else []
    options = [(name, found[name]) for name in TASK_OPTIONS[row.task] if name in found]
    return own + [f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in options]


def describe(rows: Sequence[Row]) -> str:
    """The setting of some networks in a few words."""
    every = [setting(row) for row in rows]
    workers = sorted({row.workers for row in rows})
    batches = [s.batch_size for s in every]
    papers = {PAPER[row.task].batch_size for row in rows}
    parts = [
        f"{_range([row.updates for row in rows])} updates"
        + (f" of {_range(batches)} sequences" if set(batches) != papers else ""),
        f"rate {_range([s.learning_rate for s in every])}"
        + (", at last falling to 0" if any(s.cooldown for s in every) else ""),
        f"M {_range([s.max_steps for s in every])}",
        *sorted({size for row in rows for size in sizes(row)}),
        *sorted({f"first weights of {s.init_std:g}" for s in every if s.init_std}),
        f"preset {', '.join(sorted({row.preset for row in rows}))}",
    ]
    return ", ".join([*parts, *([f"{workers[-1]} workers"] if workers[-1] > 1 else [])])


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    texts = [f"{v:,}" if isinstance(v, int) else f"{v:g}" for v in (low, high)]
    return texts[0] if low == high else f"{texts[0]} to {texts[1]}"


def origins(rows: Sequence[Row]) -> str:
    """The commands and commits that networks were made with, the most frequent first."""
    commands = [f"`{command}`" for command, _ in Counter(row.command for row in rows).most_common()]
    commits = [commit or "unknown" for commit, _ in Counter(row.commit for row in rows).most_common()]
    more = f" and {len(commands) - 5} like them" if len(commands) > 5 else ""
    others = " and others" if len(commits) > 5 else ""
    return f"{', '.join(commands[:5])}{more}, commit {', '.join(commits[:5])}{others}"
