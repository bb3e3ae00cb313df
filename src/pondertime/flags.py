"""The flags that commands share, how their values are read, and what is checked before torch is loaded."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import tyro

from pondertime.config import ConfigError, flag

Positional = tyro.conf.Positional
TaskArgument = Annotated[Positional[str], tyro.conf.arg(metavar="TASK")]


def number(kind: type[int] | type[float]) -> Any:
    """How a flag's number is read, so that a wrong one is answered in plain words."""
    expected = "a whole number" if kind is int else "a number"

    def read(words: list[str]) -> Any:
        try:
            return kind(words[0])
        except ValueError:
            raise ValueError(f"expected {expected}, got {words[0]!r}") from None

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="N" if kind is int else "X",
        instance_from_str=read,
        is_instance=lambda value: value is None or isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


def optional(hint: str = "", metavar: str | None = None) -> Any:
    """A flag that may be left out, with what that means."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)


Whole = Annotated[int, number(int)]
PresetWhole = Annotated[int | None, number(int), optional("(default: the preset's)")]
PresetReal = Annotated[float | None, number(float), optional("(default: the preset's)")]
OptionalWhole = Annotated[int | None, number(int), optional()]
OptionalReal = Annotated[float | None, number(float), optional()]
OptionalPath = Annotated[Path | None, optional(metavar="PATH")]
PresetName = Annotated[str, tyro.conf.arg(metavar="fast|paper")]
Device = Annotated[str, tyro.conf.arg(metavar="cpu|cuda|auto")]
Backend = Annotated[str, tyro.conf.arg(metavar="auto|reference|compact|fused")]
Precision = Annotated[
    str,
    tyro.conf.arg(
        metavar="auto|float32|bfloat16",
        help="Of the products, on a GPU; auto: bfloat16 for several networks at once or more than 512 units.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class NetworkFlags:
    """The fields of a preset, and the options of a task; None: the preset's."""

    preset: PresetName = "fast"
    """fast: ours, synchronous, fewer updates. paper: the paper's settings, 16 asynchronous workers."""
    iterations: PresetWhole = None
    """Updates of one worker."""
    workers: PresetWhole = None
    """Hogwild workers; 1 is synchronous."""
    learning_rate: PresetReal = None
    """Of Adam."""
    beta2: PresetReal = None
    """Of Adam, for the squares of the gradient."""
    batch_size: PresetWhole = None
    """Sequences of an update."""
    hidden_size: PresetWhole = None
    """Units of the cell."""
    max_steps: PresetWhole = None
    """The paper's M: no more updates an input step."""
    epsilon: PresetReal = None
    """A step ends when its halting probabilities reach 1 less this."""
    halt_bias: PresetReal = None
    """Initial bias of the halting unit."""
    init_std: PresetReal = None
    """Standard deviation of the first weights, normal; else they are torch.nn's."""
    clip: PresetReal = None
    """Clip the gradient's norm; inf: do not."""
    cooldown: PresetReal = None
    """Share of the iterations, at the end, over which the learning rate falls to 0."""
    tau_warmup: PresetWhole = None
    """Iterations over which tau grows from 0."""
    log_every: PresetWhole = None
    """Iterations between two lines of metrics."""
    bits: OptionalWhole = None
    """parity: length of the input (64)."""
    placement: Annotated[str | None, optional(metavar="prefix|scatter")] = None
    """parity: which inputs are set, the first ones (the default) or any."""
    digits: OptionalWhole = None
    """addition: the most digits of a number (5)."""
    separation: OptionalReal = None
    """sort: least distance of two numbers (0)."""
    data: Annotated[str | None, optional(metavar="FILE")] = None
    """wikipedia: enwik8 (the default), excerpt, or any text file."""
    length: OptionalWhole = None
    """wikipedia: bytes of a sequence (500)."""

    def overrides(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(NetworkFlags) if f.name != "preset"}


def parse_numbers(name: str, text: str) -> tuple[float, ...]:
    """The numbers of a flag, with commas between them."""
    try:
        found = tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise ConfigError(f"{flag(name)}: expected numbers such as 0.1,0.01, got {text!r}") from None
    if not found or len(set(found)) != len(found):
        raise ConfigError(f"{flag(name)}: expected different numbers such as 0.1,0.01, got {text!r}")
    return found


def check_count(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{flag(name)}: expected a number of at least 1, got {value}")


def check_minutes(value: float | None) -> None:
    if value is not None and not value > 0:
        raise ConfigError(f"--max-minutes: expected a positive number, got {value}")


def check_precision(precision: str, device: str) -> None:
    if precision not in ("auto", "float32", "bfloat16"):
        raise ConfigError(f"--precision: expected auto, float32 or bfloat16, got {precision!r}")
    if precision == "bfloat16" and device == "cpu":
        raise ConfigError("--precision: products in bfloat16 are made on a GPU; leave it out, or use --device cuda")


def pick_device(device: str, backend: str, workers: int = 1) -> str:
    """The device to run on, checked; ``auto`` is a GPU if there is one and Hogwild does not need the CPU."""
    import torch

    from pondertime.backends import check_backend

    try:
        check_backend(backend, True)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if device == "auto":
        return "cuda" if torch.cuda.is_available() and workers == 1 else "cpu"
    try:
        kind = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"--device: expected cpu, cuda or auto, got {device!r}") from None
    if kind.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device: expected cpu, cuda or auto, got {device!r}")
    if kind.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: there is no CUDA device here")
    if kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device: there is no {device} here, only {torch.cuda.device_count()} CUDA devices")
    if kind.type == "cuda" and workers > 1:
        raise ConfigError("--device: the workers of Hogwild share memory on the CPU; use cpu, or --workers 1")
    if kind.type == "cuda":
        torch.cuda.set_device(kind.index or 0)  # kernels are started on the current one
    return device if kind.type == "cuda" else "cpu"
