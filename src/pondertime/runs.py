"""Run folders: everything about one training, written so that being killed at any moment loses little.

``config.json`` what was asked, ``env.json`` where it ran, ``metrics.jsonl`` one line an interval,
``checkpoint/`` weights, optimiser and counters, ``result.json`` the end. Every file but the metrics is
written beside and renamed; the metrics are cut back to the checkpoint on resuming.
"""

import contextlib
import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pondertime.act import ACT
from pondertime.config import ConfigError, TrainConfig
from pondertime.tasks import Task, make

CELLS: dict[str, type[nn.Module]] = {"rnn": nn.RNNCell, "lstm": nn.LSTMCell, "gru": nn.GRUCell}


class RunError(RuntimeError):
    """A run folder that cannot be used as asked; its message is one line for a person."""


def make_task(config: TrainConfig) -> Task:
    return make(config.task, **config.task_options)


def build(config: TrainConfig, task: Task, *, backend: str = "auto") -> ACT:
    """The network of a config with fresh weights, drawn from its seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        cell = CELLS[task.cell](task.input_size + 1, config.hidden_size)
        return ACT(
            cell,
            task.output_size,
            epsilon=config.epsilon,
            max_steps=config.max_steps,
            halt_bias=config.halt_bias,
            force_steps=config.force_steps,
            backend=backend,
        )


def write_json(path: Path, value: Any) -> None:
    """Write beside and rename, so that the file is always whole."""
    beside = path.with_name(path.name + ".new")
    with open(beside, "w") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise RunError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read ({error})") from None


def commit() -> str:
    """The commit of the checkout this package runs from, "" where there is none."""
    here = Path(__file__).parent
    try:
        run = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, timeout=10
        )
        if run.returncode:
            return ""
        changed = subprocess.run(
            ["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no", "--", str(here)],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip() + ("+" if changed.stdout.strip() else "")


def environment(device: str, backend: str) -> dict[str, Any]:
    """Where a run is made: versions, commit, device and command."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()
    return {
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device,
        "device_name": name,
        "threads": torch.get_num_threads(),
        "backend": backend,
        "command": command(),
    }


def command() -> str:
    """The command line as it was typed, without the path of the program."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])


class RunFolder:
    """One training's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def checkpoint(self) -> Path:
        """The newest whole checkpoint: between two renames it is the old one."""
        current, old = self.path / "checkpoint", self.path / "checkpoint.old"
        return old if old.exists() and not current.exists() else current

    def open(self, config: TrainConfig) -> TrainConfig:
        """Make the folder, or check that it holds the same run; returns the config to train by.

        More iterations go on with a finished run; any other change is refused.
        """
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path}: expected a run folder, but it is a file")
        self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / "config.json").exists():
            strange = [p.name for p in self.path.iterdir() if p.name not in ("lock", "config.json.new")]
            if strange:
                raise RunError(f"{self.path}: not a run folder, and not empty (it holds {strange[0]})")
        else:
            old = self.config()
            changed = [k for k, v in config.to_json().items() if v != old.to_json()[k] and k != "iterations"]
            if changed:
                k = changed[0]
                raise RunError(
                    f"{self.path}: this run has {k} = {getattr(old, k)}, asked for {getattr(config, k)}; "
                    "only --iterations may grow: use another --out, or delete the folder"
                )
            config = replace(config, iterations=max(config.iterations, old.iterations))
        write_json(self.path / "config.json", config.to_json())
        return config

    def config(self) -> TrainConfig:
        path = self.path / "config.json"
        if not path.exists():
            raise RunError(f"{self.path}: no run here (there is no config.json)")
        try:
            return TrainConfig.from_json(read_json(path), path)
        except ConfigError as error:
            raise RunError(str(error)) from None

    def result(self) -> dict[str, Any] | None:
        path = self.path / "result.json"
        return read_json(path) if path.exists() else None

    def write_result(self, result: dict[str, Any]) -> None:
        write_json(self.path / "result.json", result)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder; a second process that trains into it is refused."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path}: expected a run folder, but it is a file")
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / "lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"{self.path}: another process is training this run") from None
            yield

    def save(self, tensors: dict[str, dict[str, Tensor]], counters: dict[str, Any]) -> None:
        """Write a checkpoint: groups of tensors (model, optimiser) and counters."""
        current, old, new = (self.path / name for name in ("checkpoint", "checkpoint.old", "checkpoint.new"))
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        for group, values in tensors.items():
            save_file({k: v.detach().cpu().contiguous() for k, v in values.items()}, new / f"{group}.safetensors")
        write_json(new / "state.json", counters)
        if current.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(current, old)
        os.replace(new, current)
        shutil.rmtree(old, ignore_errors=True)

    def load(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]] | None:
        """The newest checkpoint, or None before the first."""
        folder = self.checkpoint
        if not folder.exists():
            return None
        try:
            tensors = {f.stem: load_file(f) for f in folder.glob("*.safetensors")}
            counters = read_json(folder / "state.json")
            if "model" not in tensors or "updates" not in counters:
                raise RunError("a part of it is missing")
        except (SafetensorError, RunError, OSError, ValueError) as error:
            raise RunError(f"{folder}: not a whole checkpoint ({error}); delete the folder to start anew") from None
        return tensors, counters

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a half-written last one is left out."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().split("\n")[:-1]
        try:
            return [json.loads(line) for line in lines]
        except ValueError as error:
            raise RunError(f"{path}: cannot be read ({error})") from None

    def load_network(self, *, backend: str = "auto") -> tuple[TrainConfig, Task, ACT]:
        """The trained network of a run."""
        config = self.config()
        saved = self.load()
        if saved is None:
            raise RunError(f"{self.path}: no checkpoint yet")
        task = make_task(config)
        network = build(config, task, backend=backend)
        load_weights(network, saved[0]["model"], self.checkpoint)
        return config, task, network.eval()


def load_weights(network: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Load weights, or say in one line why they do not fit."""
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise RunError(f"{source}: its weights do not fit the run's config ({reason})") from None
