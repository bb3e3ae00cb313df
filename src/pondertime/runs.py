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
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pondertime.act import ACT
from pondertime.config import ConfigError, RunError, TrainConfig
from pondertime.ensemble import Ensemble
from pondertime.networks import build
from pondertime.tasks import Task, Wikipedia, make


def make_task(config: TrainConfig) -> Task:
    """The task of a config; a text that is too short for it is found here, not after the training."""
    try:
        task = make(config.task, **config.task_options)
        if isinstance(task, Wikipedia):
            for split in ("train", "held-out"):
                task.sample(1, torch.Generator(), split=split)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return task


def build_all(config: TrainConfig, task: Task, *, backend: str = "auto") -> ACT | Ensemble:
    """The network of a config, or all of them stacked."""
    networks = [build(config.member(e), task, backend=backend) for e in range(config.size)]
    if config.size == 1:
        return networks[0]
    if backend not in ("auto", "fused", "fused-calls"):
        raise ConfigError(f"--members: networks are trained at once by the fused backend, not by {backend}")
    return Ensemble(networks, plain=backend == "fused-calls")


def served_by(network: ACT | Ensemble, device: str) -> str:
    """The backend that will serve a network, or in one line why the one asked for cannot."""
    try:
        return network.resolve(device)
    except RuntimeError as error:
        raise ConfigError(str(error)) from None


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
    """The commit of the checkout this package runs from, "" where there is none; PONDERTIME_COMMIT knows better."""
    known = os.environ.get("PONDERTIME_COMMIT")
    if known:
        return known
    git = ["git", "-C", str(Path(__file__).parent)]

    def ask(*words: str) -> str | None:
        try:
            done = subprocess.run([*git, *words], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return None if done.returncode else done.stdout.strip()

    head = ask("rev-parse", "--short=10", "HEAD")
    changed = head and ask("status", "--porcelain", "--untracked-files=no", "--", str(Path(__file__).parent))
    return (head or "") + ("+" if changed else "")


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
    """The command line as it was typed, without the path of the program, and without --max-minutes: that is when a call
    stops, not what is made."""
    name = Path(sys.argv[0]).name
    line = shlex.join(["pondertime" if name == "__main__.py" else name, *sys.argv[1:]])
    return re.sub(r" --max-minutes[ =]\S+", "", line)


def own_part(result: dict[str, Any], e: int) -> dict[str, Any]:
    """How network e of a run ended, from the result of all, with its share of the time."""
    members = result.get("members")
    if members is None:
        return result
    return {**result, **members[e], "seconds": round(result["seconds"] / len(members), 2)}


class RunFolder:
    """One training's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def checkpoint(self) -> Path:
        """The newest whole checkpoint: between two renames it is the old one."""
        current, old = self.path / "checkpoint", self.path / "checkpoint.old"
        return old if old.exists() and not current.exists() else current

    def check(self, config: TrainConfig, *, fewer: bool = False) -> None:
        """Raise if the folder holds a run of other settings; iterations may grow (``fewer``: or be less)."""
        if not (self.path / "config.json").exists():
            return
        old = self.config()
        for name, value in config.to_json().items():
            before = getattr(old, name)
            if value == before or (name == "iterations" and (fewer or value > before)):
                continue
            raise RunError(
                f"{self.path}: this run has {name} = {before}, asked for {value}; "
                "only --iterations may grow: use another folder (train --out, sweep --runs), or delete this one"
            )

    def config(self) -> TrainConfig:
        path = self.path / "config.json"
        if not path.exists():
            raise RunError(f"{self.path}: no run here (there is no config.json)")
        try:
            return TrainConfig.from_json(read_json(path), path)
        except ConfigError as error:
            raise RunError(str(error)) from None

    def write_config(self, config: TrainConfig) -> None:
        write_json(self.path / "config.json", config.to_json())

    def result(self) -> dict[str, Any] | None:
        """How the run ended, None before that."""
        path = self.path / "result.json"
        if not path.exists():
            return None
        result = read_json(path)
        if not isinstance(result, dict) or not {"stopped", "iterations", "updates", "seconds"} <= result.keys():
            raise RunError(f"{path}: not a run's result; delete it to evaluate the run again")
        return result

    def own_result(self, e: int) -> dict[str, Any] | None:
        """How network e of the run ended, None before that."""
        result = self.result()
        return None if result is None else own_part(result, e)

    def write_result(self, result: dict[str, Any]) -> None:
        write_json(self.path / "result.json", result)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder; a second process that trains into it is refused. One that stays empty goes again."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path}: expected a run folder, but it is a file")
        fresh = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        names = sorted(p.name for p in self.path.iterdir() if p.name not in ("lock", "config.json.new"))
        if names and "config.json" not in names:
            raise RunError(f"{self.path}: not a run folder, and not empty (it holds {names[0]})")
        with open(self.path / "lock", "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"{self.path}: another process is training this run") from None
            if os.fstat(file.fileno()).st_nlink == 0:
                raise RunError(f"{self.path}: another process could not train this run and has just left it")
            try:
                yield
            finally:
                with contextlib.suppress(FileNotFoundError):
                    if fresh and os.listdir(self.path) == ["lock"]:
                        shutil.rmtree(self.path, ignore_errors=True)

    def save(self, tensors: dict[str, dict[str, Tensor]], counters: dict[str, Any]) -> None:
        """Write a checkpoint: groups of tensors (model, optimiser) and counters."""
        current, old, new = (self.path / name for name in ("checkpoint", "checkpoint.old", "checkpoint.new"))
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        try:
            for group, values in tensors.items():
                save_file({k: v.detach().cpu().contiguous() for k, v in values.items()}, new / f"{group}.safetensors")
        except SafetensorError as error:
            raise RunError(f"{new}: cannot be written ({error}); the last checkpoint is kept") from None
        write_json(new / "state.json", counters)
        if current.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(current, old)
        os.replace(new, current)
        shutil.rmtree(old, ignore_errors=True)

    def load(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]] | None:
        """The newest checkpoint, or None before the first."""
        for last in (False, False, True):
            folder = self.checkpoint
            if not folder.exists():
                return None
            try:
                tensors = {f.stem: load_file(f) for f in folder.glob("*.safetensors")}
                counters = read_json(folder / "state.json")
                if not {"model", "optimiser"} <= tensors.keys() or not isinstance(counters, dict):
                    raise RunError("a part of it is missing")
                return tensors, counters
            except (SafetensorError, RunError, OSError, ValueError) as error:
                # A training may have put a newer one in its place meanwhile.
                if last:
                    why = f"not a whole checkpoint ({error}); delete the folder to start anew"
                    raise RunError(f"{folder}: {why}") from None
                time.sleep(0.02)
        raise AssertionError

    def metrics(self, e: int = 0) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, of several networks those of number e; a half-written last one is left out."""
        return self.all_metrics().get(e, [])

    def environment(self) -> dict[str, Any]:
        """Where the run was made last: commit, command and more."""
        found = read_json(self.path / "env.json")
        if not isinstance(found, dict) or not {"commit", "command", "device"} <= found.keys():
            raise RunError(f"{self.path / 'env.json'}: not a run's environment")
        return found

    def all_metrics(self) -> dict[int, list[dict[str, Any]]]:
        """The lines of metrics.jsonl by the number of the network."""
        path = self.path / "metrics.jsonl"
        found: dict[int, list[dict[str, Any]]] = {}
        for text in path.read_text().split("\n")[:-1] if path.exists() else []:
            try:
                line = json.loads(text)
                found.setdefault(line.get("member", 0), []).append(line)
            except (AttributeError, ValueError) as error:
                raise RunError(f"{path}: cannot be read ({error})") from None
        return found

    def find(self, *, seed: int | None = None, tau: float | None = None) -> int:
        """The place of a network in a run of several, by its seed and, in a grid, its tau (None: without ACT)."""
        config = self.config()
        if seed is None and config.members > 1:
            raise RunError(f"{self.path}: holds {config.size} networks; say which with --seed")
        seed = config.seed if seed is None else seed
        if seed not in config.seeds:
            raise RunError(f"{self.path}: holds no network of seed {seed}")
        if tau not in (config.taus or (config.tau, None)):
            raise RunError(f"{self.path}: holds no network {'without ACT' if tau is None else f'of tau {tau:g}'}")
        return seed - config.seed + config.members * (config.taus.index(tau) if config.taus else 0)

    def load_network(self, e: int = 0, *, backend: str = "auto") -> tuple[TrainConfig, Task, ACT]:
        """The trained network of a run; of several, number e."""
        return self.load_networks([e], backend=backend)[0]

    def load_networks(self, places: Sequence[int], *, backend: str = "auto") -> list[tuple[TrainConfig, Task, ACT]]:
        """The trained networks of a run at these places."""
        whole, saved = self.config(), self.load()
        if saved is None:
            raise RunError(f"{self.path}: no checkpoint yet")
        task, found = make(whole.task, **whole.task_options), []  # without a look at the data
        for e in places:
            config, weights = whole.member(e), saved[0]["model"]
            if whole.size > 1:
                try:
                    weights = {k: a[e].clone() for k, a in weights.items()}
                except IndexError as error:
                    raise RunError(f"{self.checkpoint}: its weights do not fit the run's config ({error})") from None
            network = build(config, task, backend=backend)
            load_weights(network, weights, self.checkpoint)
            found.append((config, task, network.eval()))
        return found


def load_weights(network: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Load weights, or say in one line why they do not fit."""
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise RunError(f"{source}: its weights do not fit the run's config ({reason})") from None
