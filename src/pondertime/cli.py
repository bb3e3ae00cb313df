"""The command line: every command is a frozen dataclass, and its fields are its flags.

torch is imported by the commands that need it, so help is there at once.
"""

import contextlib
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from pondertime.config import (
    ConfigError,
    PresetName,
    TrainConfig,
    check_task,
    make_config,
    paper_grid,
)

Positional = tyro.conf.Positional
TaskArgument = Annotated[Positional[str], tyro.conf.arg(metavar="TASK")]


@dataclass(frozen=True, kw_only=True)
class NetworkFlags:
    """The fields of a preset, and the options of a task; None: the preset's."""

    preset: PresetName = "fast"
    """fast: ours, synchronous, minutes. paper: the paper's settings, 16 asynchronous workers."""
    iterations: int | None = None
    """Updates of one worker."""
    workers: int | None = None
    """Hogwild workers; 1 is synchronous."""
    learning_rate: float | None = None
    """Of Adam."""
    batch_size: int | None = None
    hidden_size: int | None = None
    max_steps: int | None = None
    """The paper's M: no more updates an input step."""
    epsilon: float | None = None
    halt_bias: float | None = None
    """Initial bias of the halting unit."""
    clip: float | None = None
    """Clip the gradient's norm."""
    tau_warmup: int | None = None
    """Iterations over which tau grows from 0."""
    log_every: int | None = None
    """Iterations between two lines of metrics."""
    bits: int | None = None
    """parity: length of the input."""
    placement: Literal["prefix", "scatter"] | None = None
    """parity: which inputs are set."""
    separation: float | None = None
    """sort: least distance of two numbers."""
    data: str | None = None
    """wikipedia: enwik8, excerpt, or any text file."""
    length: int | None = None
    """wikipedia: bytes of a sequence."""

    def overrides(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(NetworkFlags) if f.name != "preset"}


@dataclass(frozen=True, kw_only=True)
class Train(NetworkFlags):
    """Train one network into a run folder; the same command goes on with it."""

    task: TaskArgument
    """parity, logic, addition, sort or wikipedia."""
    tau: float | None = None
    """Time penalty."""
    no_act: bool = False
    """Without ACT: one update an input step."""
    force_steps: int | None = None
    """A fixed number of updates an input step."""
    seed: int = 1
    until_error: float | None = None
    """Stop when the error of an interval falls below this."""
    max_minutes: float | None = None
    """Stop after this time, with a checkpoint."""
    runs: Path = Path("runs")
    """Folder of the run folders."""
    out: Path | None = None
    """The run folder, if not RUNS/NAME."""
    device: str = "auto"
    backend: str = "auto"

    def config(self) -> TrainConfig:
        return make_config(
            self.task,
            self.preset,
            tau=self.tau,
            act=not self.no_act,
            force_steps=self.force_steps,
            seed=self.seed,
            **self.overrides(),
        )

    def run(self) -> None:
        config = self.config()
        for name in ("until_error", "max_minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"--{name.replace('_', '-')}: expected a positive number, got {value}")
        device = pick_device(self.device, self.backend)
        from pondertime.runs import RunFolder
        from pondertime.train import train

        folder = RunFolder(self.out or self.runs / config.name)
        say(f"{config.name}: preset {config.preset}, {device}, {folder.path}")
        result = train(
            config,
            folder,
            device=device,
            backend=self.backend,
            until_error=self.until_error,
            max_minutes=self.max_minutes,
        )
        say(describe(config, result))


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure a trained network on fresh data: errors, ponder, both against difficulty, traces."""

    run_folder: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """A run folder."""
    sequences: int | None = None
    """How many; default 10,000 (wikipedia 200 of 500 characters)."""
    device: str = "auto"
    backend: str = "auto"
    results: Path | None = None
    """Also add the network to the result tables of this folder."""

    def run(self) -> None:
        if self.sequences is not None and self.sequences < 1:
            raise ConfigError(f"--sequences: expected a number of at least 1, got {self.sequences}")
        device = pick_device(self.device, self.backend)
        from pondertime.evaluate import difficulty_curve, evaluate
        from pondertime.runs import RunFolder, write_json
        from pondertime.sweep import Places, record, sample_traces

        folder = RunFolder(self.run_folder)
        config, task, network = folder.load_network(backend=self.backend)
        network.to(device)
        with waiting(f"evaluating {config.name}"):
            result = evaluate(network, task, sequences=self.sequences, device=device)
            curve = difficulty_curve(network, task, device=device)
            traced = sample_traces(network, task, device)
        say(describe(config, result))
        show_curve(curve)
        for trace in traced[:2]:
            show_trace(trace)
        write_json(folder.path / "evaluation.json", {**result, "difficulty": curve, "traces": traced})
        say(f"all of it: {folder.path / 'evaluation.json'}")
        if self.results is not None:
            done = folder.result()
            if done is None:
                raise ConfigError(f"{folder.path}: not finished yet, so not added to {self.results}")
            record(config, folder, task, network, done, Places(folder.path.parent, self.results, device))


@dataclass(frozen=True, kw_only=True)
class Sweep(NetworkFlags):
    """Train the grid tau x seed and as many networks without ACT; finished ones are skipped."""

    task: TaskArgument
    """parity, logic, addition, sort or wikipedia."""
    taus: str | None = None
    """Time penalties such as 0.1,0.01; default: the paper's grid."""
    seeds: int = 20
    """How many seeds."""
    no_baseline: bool = False
    """Leave out the networks without ACT."""
    engine: Literal["inline"] = "inline"
    processes: int = 1
    """Networks trained at the same time."""
    dry_run: bool = False
    """Only say what would run, and about how long."""
    runs: Path = Path("runs")
    results: Path = Path("results")
    device: str = "auto"
    backend: str = "auto"

    def run(self) -> None:
        taus = paper_grid(self.task) if self.taus is None else parse_taus(self.taus)
        base = make_config(self.task, self.preset, tau=taus[0], **self.overrides())
        for name in ("seeds", "processes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name}: expected a number of at least 1, got {getattr(self, name)}")
        device = pick_device(self.device, self.backend)
        from pondertime import sweep
        from pondertime.runs import RunError

        every = sweep.plan(base, taus, self.seeds, baseline=not self.no_baseline)
        todo = sweep.unfinished(every, self.results)
        say(f"{self.task}: {len(every)} networks, {len(every) - len(todo)} done, {len(todo)} to train on {device}")
        if self.dry_run:
            for config in todo[:5]:
                say(f"  {config.name}  {config.iterations} iterations")
            if len(todo) > 5:
                say(f"  and {len(todo) - 5} more")
            if todo:
                one = sweep.estimate(todo[0], device, self.backend)
                say(f"about {sweep.total_time(one * len(todo) / self.processes)} at the speed of the first updates")
            return
        places = sweep.Places(self.runs, self.results, device, self.backend)
        failed = []
        for i, (config, outcome) in enumerate(sweep.inline(todo, places, self.processes), 1):
            if isinstance(outcome, RunError):
                failed.append(config.name)
                say(f"[{i}/{len(todo)}] {config.name}: {outcome}")
            else:
                say(f"[{i}/{len(todo)}] {config.name}: error {outcome.error:.2%}, ponder {outcome.steps:.2f}")
        if failed:
            raise RunError(f"{len(failed)} of {len(todo)} networks failed, the first {failed[0]}")
        say(f"results in {self.results}; draw them with: pondertime figures --results {self.results}")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Draw the figures of the paper from stored results, as PNG and SVG."""

    only: str | None = None
    """Figures whose name starts with this, such as parity or enwik_bar."""
    results: Path = Path("results")
    out: Path = Path("figures")
    preset: PresetName | None = None
    """Whose results; default: the preset with most networks."""

    def run(self) -> None:
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
            else:
                say(f"{name}: {self.out / name}.png, .svg")
        if missing:
            raise ConfigError(f"{len(missing)} of {len(names)} figures have no results yet")


@dataclass(frozen=True, kw_only=True)
class Data:
    """Fetch, check and unpack the Wikipedia data."""

    name: Positional[Literal["enwik8"]] = "enwik8"
    source: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """A local copy: plain, .gz, .xz or .zip. Without it the data is downloaded."""

    def run(self) -> None:
        from pondertime import data

        say(f"{data.prepare(self.source)}: 100,000,000 bytes, checked")


def parse_taus(text: str) -> tuple[float, ...]:
    try:
        taus = tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise ConfigError(f"--taus: expected numbers such as 0.1,0.01, got {text!r}") from None
    if not taus or len(set(taus)) != len(taus):
        raise ConfigError(f"--taus: expected different numbers such as 0.1,0.01, got {text!r}")
    return taus


def pick_device(device: str, backend: str) -> str:
    """The device to run on, checked; ``auto`` is a GPU if there is one."""
    import torch

    from pondertime.backends import check_backend

    try:
        check_backend(backend, True)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"--device: expected cpu, cuda or auto, got {device!r}") from None
    if kind.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device: expected cpu, cuda or auto, got {device!r}")
    if kind.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: there is no CUDA device here")
    return device


def say(text: str) -> None:
    print(text, flush=True)


@contextlib.contextmanager
def waiting(text: str):
    from pondertime.progress import console

    with console.status(text):
        yield


def describe(config: TrainConfig, result: dict[str, Any]) -> str:
    """A result in one line."""
    if config.task == "wikipedia":
        numbers = f"{result['bpc']:.3f} bits per character ({result['bpc_held_out']:.3f} held out)"
    else:
        numbers = f"error {result['error']:.2%} ± {result['error_se']:.2%}, per target {result['target_error']:.2%}"
    return f"{config.name}: {numbers}, ponder {result['steps']:.2f} (rho {result['rho']:.2f})"


def show_curve(curve: list[dict[str, Any]]) -> None:
    """Error and ponder against difficulty, at most sixteen lines."""
    if not curve:
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("difficulty", "error", "ponder", box=None)
    for row in curve[:: max(1, len(curve) // 16)]:
        table.add_row(str(row["difficulty"]), f"{row['error']:.1%}", f"{row['steps']:.2f}")
    Console().print(table)


def show_trace(trace: dict[str, Any]) -> None:
    """One sequence: inputs, answers and updates of each step."""
    for name in ("input", "output", "steps"):
        say(f"{name:>7}  " + " ".join(str(v) for v in trace[name][:40]))


COMMANDS: dict[str, Callable[..., Any]] = {
    "train": Train,
    "sweep": Sweep,
    "evaluate": Evaluate,
    "figures": Figures,
    "data": Data,
}


def parse(args: list[str]) -> Any:
    """The command that the arguments ask for; a mistake ends in one line."""
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
            words = "".join(c for c in caught.getvalue() if c not in "╭╮╰╯│─")
            words = " ".join(words.split()).split(" For full helptext")[0].split(" Argument helptext")[0]
            fail((words or "the command line is wrong") + "; see pondertime --help")
        raise


def fail(message: str, code: int = 2) -> None:
    """Print one line and leave."""
    print("error: " + " ".join(str(message).split()), file=sys.stderr)
    raise SystemExit(code)


def main(args: list[str] | None = None) -> None:
    args = sys.argv[1:] if args is None else args
    action = parse(args or ["--help"])
    if hasattr(action, "task"):
        try:
            check_task(action.task)
        except ConfigError as error:
            fail(str(error))
    try:
        action.run()
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except (ConfigError, RuntimeError, ValueError, OSError) as error:
        report(error)


def report(error: Exception) -> None:
    """End with one line for what a person can mend; anything else is a bug and shows its trace."""
    from pondertime.runs import RunError
    from pondertime.train import Interrupted

    if isinstance(error, Interrupted):
        fail(str(error), 130)
    if isinstance(error, (ConfigError, RunError, OSError)):
        fail(str(error), 1)
    raise error
