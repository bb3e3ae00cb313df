"""What a run is made of: the presets of every task and the settings of one training.

Nothing here imports torch: the command line's help is made from this file.
"""

import math
import zlib
from dataclasses import MISSING, asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

TASK_NAMES = ("parity", "logic", "addition", "sort", "wikipedia")


class ConfigError(ValueError):
    """A setting that cannot be used; its message is one line for a person."""


class RunError(RuntimeError):
    """A run or its folder that cannot go on as asked; its message is one line for a person."""


class Diverged(RunError):
    """The loss is not finite; the last good checkpoint is kept."""

    @classmethod
    def at(cls, i: int) -> "Diverged":
        return cls(
            f"the loss is not finite at iteration {i}; the last good checkpoint is kept. Try, in another folder, "
            "a lower --learning-rate, --clip 1, a higher --tau or a lower --max-steps"
        )


class Interrupted(RunError):
    """Stopped by a person, with a checkpoint to go on from."""


class OutOfTime(Interrupted):
    """Stopped by the clock, as asked for."""


@dataclass(frozen=True)
class Preset:
    """The settings of a task that the command line may override."""

    tau: float
    hidden_size: int
    batch_size: int
    iterations: int  # updates of one worker
    learning_rate: float
    workers: int = 1
    max_steps: int = 100
    beta2: float = 0.999  # of Adam; the paper gives none
    epsilon: float = 0.01
    halt_bias: float = 1.0
    clip: float | None = None
    tau_warmup: int = 0
    cooldown: float = 0.0
    init_std: float | None = None  # of the first weights; None: as torch.nn draws them
    log_every: int = 500  # iterations


# The paper's section 3: Adam 1e-4, Hogwild with 16 workers, 1M iterations of one worker, no clipping. The
# batch size of wikipedia is ours (the paper gives none), tau is one of its grid that solves the task.
PAPER = {
    "parity": Preset(0.003, 128, 128, 1_000_000, 1e-4, 16),
    "logic": Preset(0.003, 128, 16, 1_000_000, 1e-4, 16),
    "addition": Preset(0.0009, 512, 32, 1_000_000, 1e-4, 16, max_steps=20),
    "sort": Preset(0.001, 512, 16, 1_000_000, 1e-4, 16, log_every=100),
    "wikipedia": Preset(0.006, 1500, 32, 10_000, 1e-4, 16, log_every=10),
}

# Ours: one synchronous worker and a higher learning rate, fewer updates. What else differs is said on the
# tasks' pages in docs/tasks.
FAST = {
    # At this rate N would run away early in some trainings, and learning stall: hence M = 3.
    "parity": replace(
        PAPER["parity"], iterations=60_000, learning_rate=4e-3, beta2=0.99, workers=1, max_steps=3, clip=1.0
    ),
    "logic": replace(PAPER["logic"], iterations=100_000, learning_rate=1e-3, workers=1, clip=1.0),
    "addition": replace(
        PAPER["addition"], iterations=100_000, learning_rate=3e-3, beta2=0.99, workers=1, clip=1.0, cooldown=0.2
    ),
    # With minibatches of 16 and a constant rate every network ended near 30 % (docs/tasks/sort.md).
    "sort": replace(
        PAPER["sort"], batch_size=64, iterations=100_000, learning_rate=1.5e-3, workers=1, clip=1.0, cooldown=0.3
    ),
    # With M = 100 pondering ran away within some hundred updates (docs/log.md).
    "wikipedia": replace(PAPER["wikipedia"], iterations=5_000, learning_rate=1e-3, workers=1, max_steps=10, clip=1.0),
}

PRESETS: dict[str, dict[str, Preset]] = {"fast": FAST, "paper": PAPER}

# The options of a task's constructor, by task.
TASK_OPTIONS = {
    "parity": ("bits", "placement"),
    "logic": (),
    "addition": ("digits",),
    "sort": ("separation",),
    "wikipedia": ("data", "length"),
}


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the weights of one network, but for the device: its random numbers and its rounding."""

    task: str
    preset: str
    tau: float | None  # None: without ACT
    force_steps: int | None
    seed: int
    iterations: int
    workers: int
    learning_rate: float
    beta2: float
    batch_size: int
    hidden_size: int
    max_steps: int
    epsilon: float
    halt_bias: float
    clip: float | None
    tau_warmup: int
    log_every: int
    bits: int | None = None
    placement: str | None = None
    digits: int | None = None
    separation: float | None = None
    data: str | None = None
    length: int | None = None
    members: int = 1  # networks trained at once, with this seed and those after it
    taus: tuple[float | None, ...] = ()  # of a grid, each with all these seeds; None: without ACT
    cooldown: float = 0.0  # share of the iterations, at the end, over which the learning rate falls to 0
    init_std: float | None = None  # of the first weights; None: as torch.nn draws them
    learning_rates: tuple[float, ...] = ()  # of several networks, one seed after the other has the next of them

    def rate_at(self, i: int) -> float:
        """The learning rate of iteration i."""
        last = self.cooldown * self.iterations
        return self.learning_rate * min(1.0, max(0.0, (self.iterations - i) / last) if last else 1.0)

    @property
    def seeds(self) -> range:
        """The seeds of the networks."""
        return range(self.seed, self.seed + self.members)

    @property
    def size(self) -> int:
        """How many networks are trained at once."""
        return self.members * max(1, len(self.taus))

    def member(self, e: int) -> "TrainConfig":
        """The config of network e by itself."""
        place, seed = divmod(e, self.members)
        alone = replace(self, seed=self.seed + seed, members=1, taus=(), learning_rates=())
        if self.learning_rates:
            alone = replace(alone, learning_rate=self.learning_rates[seed % len(self.learning_rates)])
        if not self.taus:
            return alone
        tau = self.taus[place]
        return replace(alone, tau=tau, force_steps=1 if tau is None else None)

    @property
    def halting(self) -> str:
        """How the network halts, as in the result tables: act, none, or fixed-K."""
        if self.tau is not None:
            return "act"
        return "none" if self.force_steps == 1 else f"fixed-{self.force_steps}"

    @property
    def name(self) -> str:
        """The run folder's name: ``parity-tau0.01-seed3``, of several networks ``parity-tau0.01-seeds1-20``."""
        kind = {"act": f"tau{self.tau:g}" if self.tau is not None else "", "none": "noact"}.get(
            self.halting, self.halting.replace("-", "")
        )
        preset = "" if self.preset == "fast" else f"-{self.preset}"
        seed = f"seed{self.seed}" if self.size == 1 else f"seeds{self.seed}-{self.seeds[-1]}"
        if self.taus:
            # Other time penalties, another folder.
            kind = f"{len(self.taus)}taus-{zlib.crc32(repr(self.taus).encode()):08x}"
        return f"{self.task}{preset}-{kind}-{seed}"

    @property
    def task_options(self) -> dict[str, Any]:
        """What the task's constructor is given."""
        return {k: getattr(self, k) for k in TASK_OPTIONS[self.task] if getattr(self, k) is not None}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any], source: Path) -> "TrainConfig":
        # Later versions may add fields; what an older run does not say has its default.
        names = {f.name for f in fields(TrainConfig)}
        needed = {f.name for f in fields(TrainConfig) if f.default is MISSING}
        if not isinstance(values, dict) or not needed <= set(values) <= names:
            raise ConfigError(f"{source}: not a run's config (its fields are not those of this version)")
        try:
            given: dict[str, Any] = {**values}
            given.update({name: tuple(values.get(name, ())) for name in ("taus", "learning_rates")})
            config = TrainConfig(**given)
            check(config)
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"{source}: not a run's config ({error})") from None
        return config


def check_task(task: str) -> str:
    if task not in TASK_NAMES:
        raise ConfigError(f"unknown task {task!r}: expected one of {', '.join(TASK_NAMES)}")
    return task


def check_preset(preset: str) -> str:
    if preset not in PRESETS:
        raise ConfigError(f"--preset: expected {' or '.join(PRESETS)}, got {preset!r}")
    return preset


def make_config(
    task: str,
    preset: str = "fast",
    *,
    tau: float | None = None,
    act: bool = True,
    force_steps: int | None = None,
    seed: int = 1,
    members: int = 1,
    **overrides: Any,
) -> TrainConfig:
    """A task's preset with some of its fields overridden (None: leave it), checked."""
    check_task(task)
    check_preset(preset)
    base: dict[str, Any] = asdict(PRESETS[preset][task])
    preset_tau = base.pop("tau")
    for name in chain(*TASK_OPTIONS.values()):
        if overrides.get(name) is not None and name not in TASK_OPTIONS[task]:
            raise ConfigError(f"{task} has no option --{name}")
    base.update({k: v for k, v in overrides.items() if v is not None})
    if overrides.get("learning_rates") and overrides.get("learning_rate") is not None:
        raise ConfigError("--learning-rates are those of the networks: they take no --learning-rate")
    if not act and (tau is not None or force_steps is not None):
        raise ConfigError("--no-act trains without ACT: it takes neither --tau nor --force-steps")
    if force_steps is not None and tau is not None:
        raise ConfigError("--force-steps makes a fixed number of updates: it takes no --tau")
    if not act:
        force_steps = 1
    if force_steps is None and tau is None:
        tau = preset_tau
    if force_steps is not None and overrides.get("max_steps") is None:
        base["max_steps"] = max(base["max_steps"], force_steps)
    base.update(task=task, preset=preset, tau=tau, force_steps=force_steps, seed=seed, members=members)
    config = TrainConfig(**base)
    check(config)
    return config


def check(config: TrainConfig) -> None:
    """Raise for settings that no training can use."""
    check_task(config.task)
    check_preset(config.preset)
    for name in ("iterations", "workers", "batch_size", "hidden_size", "max_steps", "log_every", "members"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{flag(name)}: expected a number of at least 1, got {getattr(config, name)}")
    for name in ("bits", "digits", "length", "force_steps"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{flag(name)}: expected a number of at least 1, got {value}")
    if config.force_steps is not None and config.force_steps > config.max_steps:
        raise ConfigError(f"--force-steps: expected at most --max-steps {config.max_steps}, got {config.force_steps}")
    if config.size > 1 and config.workers > 1:
        raise ConfigError("--members: networks trained at once are synchronous; use --workers 1")
    if not 0 <= config.seed <= config.seeds[-1] < 2**63:
        raise ConfigError(f"--seed: expected a number from 0 to 2^63 - 1, got {config.seed}")
    for tau in (config.tau, *config.taus):
        if tau is not None and not 0 <= tau < float("inf"):
            raise ConfigError(f"--tau: expected a number of at least 0, got {tau}")
    if not 0 < config.epsilon < 1:
        raise ConfigError(f"--epsilon: expected a number between 0 and 1, got {config.epsilon}")
    if not 0 < config.learning_rate < float("inf"):
        raise ConfigError(f"--learning-rate: expected a positive number, got {config.learning_rate}")
    if config.learning_rates and not 1 < len(config.learning_rates) <= config.members:
        rates = len(config.learning_rates)
        raise ConfigError(f"--learning-rates: expected 2 or more, up to --members {config.members}, got {rates}")
    for rate in config.learning_rates:
        if not 0 < rate < float("inf"):
            raise ConfigError(f"--learning-rates: expected positive numbers, got {rate}")
    if not math.isfinite(config.halt_bias):
        raise ConfigError(f"--halt-bias: expected a finite number, got {config.halt_bias}")
    if not 0 <= config.beta2 < 1:
        raise ConfigError(f"--beta2: expected a number from 0 to below 1, got {config.beta2}")
    if config.clip is not None and not config.clip > 0:
        raise ConfigError(f"--clip: expected a positive number, got {config.clip}")
    if config.tau_warmup < 0:
        raise ConfigError(f"--tau-warmup: expected 0 or more, got {config.tau_warmup}")
    if not 0 <= config.cooldown <= 1:
        raise ConfigError(f"--cooldown: expected a share from 0 to 1, got {config.cooldown}")
    if config.init_std is not None and not 0 < config.init_std < float("inf"):
        raise ConfigError(f"--init-std: expected a positive number, got {config.init_std}")
    if config.placement not in (None, "prefix", "scatter"):
        raise ConfigError(f"--placement: expected prefix or scatter, got {config.placement}")
    if config.separation is not None and not 0 <= config.separation <= 0.1:
        raise ConfigError(f"--separation: expected a number from 0 to 0.1, got {config.separation}")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def paper_grid(task: str) -> tuple[float, ...]:
    """The time penalties i x 10^-j of the paper: i 1..10, j 1..4 (wikipedia 1..3), each once, ascending."""
    last = 3 if check_task(task) == "wikipedia" else 4
    return tuple(sorted({float(f"{i}e-{j}") for j in range(1, last + 1) for i in range(1, 11)}))
