"""Measure a trained network."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from pondertime.config import ConfigError, TrainConfig
from pondertime.flags import (
    Backend,
    Device,
    OptionalPath,
    OptionalReal,
    OptionalWhole,
    Positional,
    check_count,
    pick_device,
)
from pondertime.show import describe, say, show_curve, show_recorded, show_text, show_trace, waiting


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
        from pondertime.jobs import add, entry
        from pondertime.sweep import Places

        done = folder.own_result(place)
        if done is None:
            raise ConfigError(f"{folder.path}: not finished yet, so not added to {self.results}")
        if done.get("failed") is not None:
            raise ConfigError(f"{config.name}: its loss was not finite, so it is not added to {self.results}")
        parts = found.difficulty, found.traces, found.classes, found.boundaries
        made = entry(config, folder.environment(), folder.metrics(place), done, *parts)
        add([made], Places(folder.path.parent, self.results or Path("results")))
