"""The command line: every command is a frozen dataclass, and its fields are its flags.

torch is imported by the commands that need it, so help is there at once.
"""

import contextlib
import io
import math
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from pondertime import __version__
from pondertime.config import (
    ConfigError,
    Interrupted,
    OutOfTime,
    RunError,
    TrainConfig,
    check_preset,
    check_task,
    make_config,
    paper_grid,
)
from pondertime.flags import (
    Backend,
    Device,
    NetworkFlags,
    OptionalPath,
    OptionalReal,
    OptionalWhole,
    Positional,
    Precision,
    PresetReal,
    TaskArgument,
    Whole,
    check_count,
    check_minutes,
    check_precision,
    optional,
    parse_numbers,
    pick_device,
)
from pondertime.show import describe, say, show_curve, show_recorded, show_text, show_times, show_trace, waiting


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


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure a trained network on fresh data: errors, ponder, both against difficulty, traces."""

    run_folder: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """A run folder, or the name of a checkpoint such as parity-act."""
    seed: OptionalWhole = None
    """Which network, where the run holds several seeds."""
    tau: OptionalReal = None
    """Which network, where the run holds several time penalties; left out: the one without ACT."""
    sequences: OptionalWhole = None
    """How many; default 10,000 (wikipedia 200 of 500 characters), and 1,000 or fewer at each difficulty."""
    device: Device = "auto"
    backend: Backend = "auto"
    results: OptionalPath = None
    """Also add the network to the result tables of this folder."""

    def run(self) -> None:
        if self.sequences is not None:
            check_count("sequences", self.sequences)
        device = pick_device(self.device, self.backend)
        from pondertime.checkpoints import Checkpoint, find
        from pondertime.evaluate import portrait
        from pondertime.runs import make_task, served_by, write_json

        folder = find(self.run_folder)
        if isinstance(folder, Checkpoint) and self.results is not None:
            raise ConfigError(f"--results: {folder.name} is a checkpoint, without the learning curve that goes there")
        if self.results is not None and folder.config().learning_rates:
            raise ConfigError(
                f"--results: {folder.path} has several learning rates, the tables know tau and seed alone"
            )
        recorded = folder.recorded() if isinstance(folder, Checkpoint) else None
        place = folder.find(seed=self.seed, tau=self.tau)
        config, _, network = folder.load_network(place, backend=self.backend)
        task = make_task(config)
        served_by(network.to(device), device)
        with waiting(f"evaluating {config.name}"):
            stored = self.results is not None
            found = portrait(network, task, sequences=self.sequences, stored=stored, device=device)
        say(describe(config, found.result))
        if folder.result() is None:
            say("its training has not ended")
        show_curve(found.difficulty)
        for trace in found.traces[:2]:
            show_trace(trace)
        show_text(found.classes, found.boundaries)
        if recorded is not None:
            show_recorded(recorded, found.result)
            return
        name = "evaluation.json" if folder.config().size == 1 else f"evaluation-{config.name}.json"
        write_json(folder.path / name, found.to_json())
        say(f"all of it: {folder.path / name}")
        if self.results is not None:
            self.add_to_results(folder, place, config, found)

    def add_to_results(self, folder: Any, place: int, config: TrainConfig, found: Any) -> None:
        """Put a finished network into the result tables."""
        from pondertime.sweep import Places, add, entry

        done = folder.own_result(place)
        if done is None:
            raise ConfigError(f"{folder.path}: not finished yet, so not added to {self.results}")
        if done.get("failed") is not None:
            raise ConfigError(f"{config.name}: its loss was not finite, so it is not added to {self.results}")
        parts = found.difficulty, found.traces, found.classes, found.boundaries
        made = entry(config, folder.environment(), folder.metrics(place), done, *parts)
        add([made], Places(folder.path.parent, self.results or Path("results")))


@dataclass(frozen=True, kw_only=True)
class Sweep(NetworkFlags):
    """Train the grid tau x seed and as many networks without ACT; finished ones are skipped."""

    task: TaskArgument
    """parity, logic, addition, sort or wikipedia."""
    taus: Annotated[str | None, optional("(default: the paper's grid)", "X,X,..")] = None
    """Time penalties such as 0.1,0.01."""
    seeds: Whole = 20
    """How many seeds, from 1 on."""
    no_baseline: bool = False
    """Leave out the networks without ACT."""
    engine: Literal["inline"] = "inline"
    """Where they are trained: in processes of this machine."""
    processes: Whole = 1
    """How many; the seeds of a tau may share one, on a GPU several taus."""
    max_minutes: OptionalReal = None
    """Stop after this time, with checkpoints."""
    dry_run: bool = False
    """Only say what would run, and about how long."""
    runs: Path = Path("runs")
    """Folder of the run folders."""
    results: Path = Path("results")
    """Folder of the result tables."""
    device: Device = "auto"
    backend: Backend = "auto"
    precision: Precision = "auto"

    def run(self) -> None:
        taus = paper_grid(self.task) if self.taus is None else parse_numbers("taus", self.taus)
        base = make_config(self.task, self.preset, tau=taus[0], **self.overrides())
        check_count("seeds", self.seeds)
        check_count("processes", self.processes)
        check_minutes(self.max_minutes)
        device = pick_device(self.device, self.backend, base.workers)
        check_precision(self.precision, device)
        from pondertime import sweep

        deadline = math.inf if self.max_minutes is None else time.monotonic() + 60 * self.max_minutes
        places = sweep.Places(self.runs, self.results, device, self.backend, self.precision, deadline)
        every = sweep.plan(base, taus, self.seeds, baseline=not self.no_baseline)
        todo = sweep.unfinished(every, places)
        done = f"{len(every) - len(todo)} done" + (f" (in {self.results})" if len(todo) < len(every) else "")
        say(f"{self.task}: {len(every)} networks, {done}, {len(todo)} to train on {device}")
        if self.dry_run:
            self.forecast(todo, places)
            return
        try:
            failed = self.train(todo, places)
        except KeyboardInterrupt:
            raise Interrupted("stopped; the same command goes on") from None
        if failed:
            raise RunError(f"{len(failed)} of {len(todo)} networks failed, the first {failed[0]}")
        say(f"results in {self.results}; draw them with: pondertime figures --results {self.results}")

    def train(self, todo: list[TrainConfig], places: Any) -> list[str]:
        """Train what is left; returns the names of those that failed."""
        from pondertime.engines import inline

        failed = []
        for i, (config, outcome) in enumerate(inline(todo, places, self.processes), 1):
            if isinstance(outcome, RunError):
                failed.append(config.name)
                say(f"[{i}/{len(todo)}] {config.name}: {outcome}")
            else:
                numbers = (
                    f"error {outcome.error:.2%}" if outcome.bpc is None else f"{outcome.bpc:.3f} bits per character"
                )
                say(f"[{i}/{len(todo)}] {config.name}: {numbers}, ponder {outcome.steps:.2f}")
        return failed

    def forecast(self, todo: list[TrainConfig], places: Any) -> None:
        """Say what would be trained, and about how long."""
        from pondertime import sweep

        for config in todo[:5]:
            say(f"  {config.name}  {config.iterations} iterations")
        if len(todo) > 5:
            say(f"  and {len(todo) - 5} more")
        if todo:
            jobs = sweep.together(todo, places, self.processes)
            seconds = sweep.estimate(jobs[0], places) / jobs[0].size * sum(j.size for j in jobs)
            say(f"about {sweep.total_time(seconds / self.processes)} at the speed of the first updates")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Draw the figures of the paper from stored results, as PNG and SVG."""

    only: Annotated[str | None, optional(metavar="NAME")] = None
    """Figures whose name starts with this, such as parity or enwik_bar."""
    results: Path = Path("results")
    """Folder of the result tables."""
    out: Path = Path("figures")
    """Where the figures go."""
    preset: Annotated[str | None, optional("(default: the preset with most networks)", "fast|paper")] = None
    """Whose results."""

    def run(self) -> None:
        if self.preset is not None:
            check_preset(self.preset)
        try:
            from pondertime import figures
        except ModuleNotFoundError as error:
            raise ConfigError(f"figures need {error.name}: pip install 'pondertime[plot]'") from None
        names = [n for n in figures.NAMES if n.startswith(self.only or "")]
        if not names:
            raise ConfigError(f"--only: no figure starts with {self.only!r}; they are {', '.join(figures.NAMES)}")
        missing = []
        for name in names:
            try:
                figures.save(name, self.results, self.out, preset=self.preset)
            except figures.MissingResults as error:
                missing.append(name)
                say(f"{name}: {error}")
            except ValueError as error:
                raise ConfigError(str(error)) from None
            else:
                say(f"{name}: {self.out / name}.png, .svg")
        if missing:
            raise ConfigError(f"{len(missing)} of {len(names)} figures have no results yet in {self.results}")


@dataclass(frozen=True, kw_only=True)
class Data:
    """Fetch, check and unpack the Wikipedia data."""

    name: Positional[Literal["enwik8"]] = "enwik8"
    """Which data."""
    source: Annotated[Path | None, tyro.conf.arg(name="from", metavar="FILE", help_behavior_hint="")] = None
    """A local copy: plain, .gz, .xz or .zip. Without it the data is downloaded."""

    def run(self) -> None:
        from pondertime import data

        say(f"{data.prepare(self.source)}: 100,000,000 bytes, checked")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Time our backends beside torch.nn making as many updates, and beside the bare matrix products."""

    only: Annotated[str | None, optional("(default: all five)", "TASK")] = None
    """One of the paper's workloads."""
    seconds: Annotated[float, tyro.conf.arg(metavar="X")] = 5.0
    """About how long each table is measured."""
    device: Device = "cpu"
    out: Path = Path("benchmarks/data.csv")
    """The table of all measurements, to which these are added."""

    def run(self) -> None:
        if self.only is not None:
            check_task(self.only)
        if not self.seconds > 0:
            raise ConfigError(f"--seconds: expected a positive number, got {self.seconds}")
        device = pick_device(self.device, "auto")
        from pondertime import bench
        from pondertime.bench import cuda

        on_cpu, names = device == "cpu", [self.only] if self.only else list(bench.WORKLOADS)
        beside, run = ("torch.nn", bench.run) if on_cpu else ("cuDNN", cuda.run)
        say(f"{bench.machine(device)}; milliseconds, and ratios to {beside}, medians of interleaved repeats")
        # Profiles come last: what is timed after one is slower.
        jobs = [(f"timing {name}", partial(run, name, self.seconds, say)) for name in names]
        jobs += [] if on_cpu else [(f"profiling {name}", partial(cuda.inside, name)) for name in names]
        for text, job in jobs:
            with waiting(text):
                rows = job()
            bench.append(rows, self.out, device)
            show_times(rows)
        say(f"added to {self.out}")


COMMANDS: dict[str, Callable[..., Any]] = {
    "train": Train,
    "sweep": Sweep,
    "evaluate": Evaluate,
    "figures": Figures,
    "data": Data,
    "bench": Bench,
}


def parse(args: list[str]) -> Any:
    """The command that the arguments ask for; a mistake ends in one line."""
    if args[0] == "--version":
        say(f"pondertime {__version__}")
        raise SystemExit
    if args[0] not in COMMANDS and not args[0].startswith("-"):
        fail(f"unknown command {args[0]!r}: expected one of {', '.join(COMMANDS)}", 2)
    caught = io.StringIO()
    try:
        with contextlib.redirect_stderr(caught):
            return tyro.extras.subcommand_cli_from_dict(
                COMMANDS,
                prog="pondertime",
                description="Recurrent networks that learn how long to think.",
                args=args,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as leave:
        if leave.code:
            command = f"pondertime {args[0]}" if args[0] in COMMANDS else "pondertime"
            fail(f"{squeeze(caught.getvalue(), command)}; see {command} --help", 2)
        raise


def squeeze(box: str, command: str) -> str:
    """What tyro says is wrong, without its box, title and help, and which options of the command may be meant."""
    text = re.sub("[│╭╮╰╯]", "", box).replace("─", "-")
    parts = [" ".join(part.split()) for part in re.split("-{5,}", text)]
    said = parts[1].removeprefix("Error parsing ").removesuffix(" Expected 1 values.").removesuffix(" (required)")
    said = re.sub(r" \(applied to [^)]*\)| Arguments are applied to .*", "", said)
    hints = re.findall("(--[a-z0-9-]+)(.*?)(?= --|$)", " ".join(parts[2:]).replace(f"in {command} --help", "HERE"))
    meant = " or ".join(dict.fromkeys(name for name, text in hints if "HERE" in text))
    return said.removesuffix(".") + (f"; perhaps you meant {meant}" if meant else "")


def fail(message: str, code: int = 1) -> None:
    """Print one line and leave."""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    raise SystemExit(code)


def main(args: list[str] | None = None) -> None:
    """Run a command. What a person can mend ends with one line; anything else is a bug and shows its trace."""
    args = sys.argv[1:] if args is None else args
    try:
        action = parse(args or ["--help"])
        action.run()
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        raise SystemExit(0 if isinstance(stop, OutOfTime) else 130) from None
    except (ConfigError, RunError) as error:
        fail(str(error))
    except BrokenPipeError:
        # The reader of our output has left; nothing more is to be written to it, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        fail("not enough memory; try a smaller --batch-size, --hidden-size or --length")


def out_of_memory(error: Exception) -> bool:
    """Whether torch could not get its memory; on a CPU only the message tells."""
    words = ("out of memory", "allocate memory", "Storage size calculation overflowed")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)
