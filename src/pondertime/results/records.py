"""What is kept of a network: its row, learning curve, difficulty points, traces, and what it does with text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

import numpy as np

# preset, halting, tau (None without ACT and with a fixed number of updates), seed.
Key = tuple[str, str, float | None, int]

# What a learning curve is made of.
QUANTITIES = ("error", "target_error", "bpc", "steps")


@dataclass(frozen=True)
class Row:
    """What became of one network; ``halting`` is act, none (without ACT) or fixed-K."""

    task: str
    preset: str
    halting: str
    tau: float | None
    seed: int
    updates: int
    workers: int
    error: float | None
    target_error: float | None
    steps: float
    rho: float
    bpc: float | None
    seconds: float
    device: str
    commit: str
    command: str

    def __post_init__(self):
        fixed = self.halting.removeprefix("fixed-")
        if self.halting not in ("act", "none") and (fixed == self.halting or not fixed.isdecimal() or int(fixed) < 1):
            raise ValueError(f"halting: expected act, none or fixed-K, got {self.halting!r}")
        if (self.halting == "act") != (self.tau is not None):
            raise ValueError(f"tau: expected a number with act and nothing otherwise, got {self.halting}, {self.tau}")
        if self.tau is not None and not self.tau >= 0:
            raise ValueError(f"tau: expected at least 0, got {self.tau}")
        if self.workers < 1 or self.updates < 0:
            raise ValueError(f"expected workers >= 1 and updates >= 0, got {self.workers} and {self.updates}")
        if self.bpc is None and (self.error is None or self.target_error is None):
            raise ValueError("expected both errors, or bits per character")
        for name in ("tau", "error", "target_error", "steps", "rho", "bpc", "seconds"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name}: expected a finite number, got {value}")

    @property
    def key(self) -> Key:
        return self.preset, self.halting, self.tau, self.seed


@dataclass(frozen=True, eq=False)
class Curve:
    """What was measured during training, K times: arrays [K], NaN where there is nothing."""

    updates: np.ndarray
    error: np.ndarray
    target_error: np.ndarray
    bpc: np.ndarray
    steps: np.ndarray

    def __post_init__(self):
        for name in ("updates", *QUANTITIES):
            dtype = np.int64 if name == "updates" else np.float32
            array = np.asarray(getattr(self, name), dtype=dtype)
            if array.ndim != 1 or array.shape != np.shape(self.updates):
                raise ValueError(f"{name}: expected one number for each of updates, got shape {list(array.shape)}")
            object.__setattr__(self, name, array)

    def thinned(self, most: int) -> "Curve":
        """The same in at most so many points: means of neighbours, with the updates made at the last of them."""
        n = len(self.updates)
        starts = np.arange(0, n, max(1, math.ceil(n / most)))
        ends = np.append(starts[1:], n)
        if len(starts) == n:
            return self
        means = (np.add.reduceat(getattr(self, name), starts) / (ends - starts) for name in QUANTITIES)
        return Curve(self.updates[ends - 1], *means)


@dataclass(frozen=True)
class Point:
    """How a network did on ``samples`` sequences of one difficulty."""

    difficulty: int
    samples: int
    error: float
    target_error: float
    steps: float
    rho: float


@dataclass(frozen=True)
class SequenceTrace:
    """One sequence as a network went through it: one item a step in every list; loss and entropy in bits."""

    input: Sequence[str]
    output: Sequence[str]
    target: Sequence[str]
    steps: Sequence[int]
    rho: Sequence[float]
    difficulty: int | None = None
    loss: Sequence[float] | None = None
    entropy: Sequence[float] | None = None
    name: str | None = None

    def __post_init__(self):
        for name in ("input", "output", "target", "steps", "rho", "loss", "entropy"):
            values = getattr(self, name)
            if values is None and name in ("loss", "entropy"):
                continue
            if not isinstance(values, list | tuple) or not values or len(values) != len(self.input):
                raise ValueError(f"{name}: expected a list with one item for each of the {len(self.input)} inputs")
            good = _is_text if name in ("input", "output", "target") else _is_number
            if not all(good(value) for value in values):
                raise ValueError(f"{name}: expected {'text' if good is _is_text else 'finite numbers'}: {values!r:.60}")


@dataclass(frozen=True)
class CharacterClass:
    """What a network does at the characters of one kind: means with standard errors over sequences, in bits."""

    kind: str
    characters: int
    sequences: int
    rho: float
    rho_se: float
    loss: float
    loss_se: float
    entropy: float
    entropy_se: float


@dataclass(frozen=True)
class Boundary:
    """How well the boundaries of one kind are told by a measure that reaches a threshold there."""

    kind: str
    measure: str
    boundaries: int
    threshold: float
    precision: float
    recall: float
    f1: float
    f1_se: float


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


class Entry(NamedTuple):
    """One network with all that is kept of it."""

    row: Row
    curve: Curve | None = None
    points: Sequence[Point] = ()
    traces: Sequence[SequenceTrace] = ()
    classes: Sequence[CharacterClass] = ()
    boundaries: Sequence[Boundary] = ()


Record = TypeVar("Record", Curve, Point, SequenceTrace)


def record(kind: type[Record], values: Record | Mapping[str, Any]) -> Record:
    """A record as it is, or made from a mapping; what the record does not know is left out."""
    if isinstance(values, kind):
        return values
    return kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})  # pyrefly: ignore
