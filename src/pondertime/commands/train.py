"""Train one network, or several at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pondertime.config import ConfigError, TrainConfig, make_config
from pondertime.flags import (
    Backend,
    Device,
    NetworkFlags,
    OptionalPath,
    OptionalReal,
    OptionalWhole,
    Precision,
    PresetReal,
    TaskArgument,
    Whole,
    check_minutes,
    check_precision,
    optional,
    parse_numbers,
    pick_device,
)
from pondertime.show import describe, say


@dataclass(frozen=True, kw_only=True)
class Train(NetworkFlags):
    """Train one network, or several at once, into a run folder; the same command goes on with it."""

    task: TaskArgument
    """parity, logic, addition, sort or wikipedia."""
    tau: PresetReal = None
    """Time penalty."""
    no_act: bool = False
    """Without ACT: one update an input step."""
    force_steps: OptionalWhole = None
    """A fixed number of updates an input step."""
    seed: Whole = 1
    """Of the weights and the data."""
    members: Whole = 1
    """Networks trained at once, with this seed and those after it."""
    learning_rates: Annotated[str | None, optional(metavar="X,X,..")] = None
    """Of several networks: one seed after the other has the next of them."""
    until_error: OptionalReal = None
    """Stop when the error of an interval falls below this, such as 0.05."""
    max_minutes: OptionalReal = None
    """Stop after this time, with a checkpoint."""
    runs: Path = Path("runs")
    """Folder of the run folders."""
    out: OptionalPath = None
    """The run folder, if not RUNS/NAME."""
    device: Device = "auto"
    backend: Backend = "auto"
    precision: Precision = "auto"

    def config(self) -> TrainConfig:
        rates = None if self.learning_rates is None else parse_numbers("learning_rates", self.learning_rates)
        return make_config(
            self.task,
            self.preset,
            tau=self.tau,
            act=not self.no_act,
            force_steps=self.force_steps,
            seed=self.seed,
            members=self.members,
            learning_rates=rates,
            **self.overrides(),
        )

    def run(self) -> None:
        config = self.config()
        if self.until_error is not None and not 0 < self.until_error <= 1:
            raise ConfigError(f"--until-error: expected a share between 0 and 1, got {self.until_error}")
        check_minutes(self.max_minutes)
        device = pick_device(self.device, self.backend, config.workers)
        check_precision(self.precision, device)
        from pondertime.runs import RunFolder
        from pondertime.train import train

        folder = RunFolder(self.out or self.runs / config.name)
        say(f"{config.name}: preset {config.preset}, {device}, {folder.path}")
        result = train(
            config,
            folder,
            device=device,
            backend=self.backend,
            precision=self.precision,
            until_error=self.until_error,
            max_minutes=self.max_minutes,
        )
        for member in result.get("members", []):
            own = config.member(member["seed"] - config.seed)
            rate = f", rate {own.learning_rate:g}" if config.learning_rates else ""
            say(f"  {describe(own, member)}{rate}")
        say(describe(config, result))
