"""A training small enough for a test, and what it leaves behind in a form that can be compared."""

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pondertime.config import TrainConfig, make_config
from pondertime.runs import RunFolder
from pondertime.train import train

SIZES: dict[str, Any] = {"bits": 8, "hidden_size": 16, "batch_size": 16, "max_steps": 10, "log_every": 20}
SIZE_FLAGS = [word for k, v in SIZES.items() for word in ("--" + k.replace("_", "-"), str(v))]


def small(task: str = "parity", **changes: Any) -> TrainConfig:
    """A config that trains in a second."""
    sizes = SIZES if task == "parity" else {k: v for k, v in SIZES.items() if k != "bits"}
    values: dict[str, Any] = {"iterations": 60} | sizes | changes
    return make_config(task, **values)


def trained(path: Path, config: TrainConfig | None = None, **options: Any) -> RunFolder:
    """The folder of a finished small run."""
    folder = RunFolder(path)
    train(config or small(), folder, **options)
    return folder


def weights(folder: RunFolder) -> dict[str, bytes]:
    """Every tensor of the checkpoint, optimiser included, bit for bit."""
    files = sorted(folder.checkpoint.glob("*.safetensors"))
    return {f"{f.stem}.{k}": v.numpy().tobytes() for f in files for k, v in load_file(f).items()}


def metrics(folder: RunFolder) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, times aside."""
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def result(folder: RunFolder) -> dict[str, Any]:
    """result.json, times aside."""
    values = folder.result()
    assert values is not None
    return {k: v for k, v in values.items() if k != "seconds"}


def assert_same_run(folder: RunFolder, expected: RunFolder) -> None:
    """Two runs ended in the same way, bit for bit, times aside."""
    assert weights(folder) == weights(expected)
    assert metrics(folder) == metrics(expected)
    assert result(folder) == result(expected)


def contents(path: Path) -> dict[str, bytes]:
    """All files below a folder but the locks."""
    files = [p for p in path.rglob("*") if p.is_file() and "lock" not in p.name]
    return {str(p.relative_to(path)): p.read_bytes() for p in files}


def processes() -> Any:
    """Where other processes come from; what takes long to load is loaded once."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pondertime.jobs", "pondertime.hogwild", "torch._dynamo"])
    return context


def train_elsewhere(config: TrainConfig, path: Path, checkpoint_seconds: float) -> None:
    torch.set_num_threads(1)
    train(config, RunFolder(path), checkpoint_seconds=checkpoint_seconds)


def updates(folder: RunFolder) -> int:
    """How far the newest checkpoint is, -1 where there is none."""
    for _ in range(100):
        try:
            return json.loads((folder.checkpoint / "state.json").read_text())["updates"]
        except FileNotFoundError:
            if not folder.checkpoint.exists():
                return -1
    raise AssertionError(f"{folder.path}: no checkpoint to be read")


def kill_after(config: TrainConfig, folder: RunFolder, ahead: int, pause: float) -> None:
    """Train in another process and kill it some updates from where it begins."""
    before = updates(folder)
    process = processes().Process(target=train_elsewhere, args=(config, folder.path, 0.0))
    process.start()
    end = time.monotonic() + 60
    while updates(folder) < before + ahead and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(pause)
    assert process.exitcode is None, "the training ended before it could be killed"
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL


def kill_often(config: TrainConfig, folder: RunFolder, times: int, most: int, seed: int) -> None:
    """Kill a training at random moments, at most ``most`` updates apart."""
    draw = random.Random(seed)
    for _ in range(times):
        kill_after(config, folder, draw.randrange(most), draw.uniform(0, 0.02))
