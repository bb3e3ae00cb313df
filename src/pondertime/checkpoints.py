"""Trained networks by name: ``checkpoints/NAME`` holds weights, config, the numbers of the training and a card.

One is made from a finished run, or from one network of a run of several:

    python -m pondertime.checkpoints runs/parity-tau0.003-seed1 --name parity-act
    python -m pondertime.checkpoints runs/GRID --seed 4 --tau 0.003 --name parity-act
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pondertime.config import ConfigError, RunError, TrainConfig
from pondertime.runs import RunFolder, write_json

HERE = Path(__file__).parent
SHIPPED = HERE / "_checkpoints"  # in an installed package; pyproject.toml puts them there
CHECKOUT = HERE.parents[1]
# Those that are too large to be installed with the package.
LARGE = ("wikipedia-act",)


class Checkpoint(RunFolder):
    """A trained network with what is known of it, and nothing to go on training from."""

    @property
    def checkpoint(self) -> Path:
        return self.path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def load(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """The weights; those in bfloat16 become float32 where they are loaded into a network."""
        path = self.path / "model.safetensors"
        try:
            return {"model": load_file(path)}, {}
        except (SafetensorError, OSError) as error:
            raise RunError(f"{path}: cannot be read ({error})") from None

    def recorded(self) -> dict[str, Any]:
        """The numbers that were measured at the end of training."""
        result = self.result()
        if result is None:
            raise RunError(f"{self.path}: not a whole checkpoint (there is no result.json)")
        return result


def folders() -> list[Path]:
    """Where named checkpoints may lie: in the installed package, or in the checkout that this file belongs to."""
    return [SHIPPED, *([CHECKOUT / "checkpoints"] if (CHECKOUT / "pyproject.toml").exists() else [])]


def available() -> dict[str, Path]:
    """The checkpoints that are here, by name."""
    return {path.parent.name: path.parent for home in folders() for path in sorted(home.glob("*/model.safetensors"))}


def find(where: Path | str) -> RunFolder:
    """What lies at a path, a run or a checkpoint; else the checkpoint of that name."""
    where = Path(where)
    if (where / "model.safetensors").exists():
        return Checkpoint(where)
    name, here = str(where), available()
    if where.exists() or name != where.name:
        return RunFolder(where)
    if name in here:
        return Checkpoint(here[name])
    if name in LARGE and not (CHECKOUT / "pyproject.toml").exists():
        raise RunError(
            f"{name}: too large to be installed with the package; it is checkpoints/{name} in "
            f"pondertime's repository: get that folder, then `pondertime evaluate PATH/{name}`"
        )
    names = f"; the checkpoints are {', '.join(sorted(here))}" if here else "; there are no checkpoints here"
    raise RunError(f"{name}: no run here (there is no config.json), nor a checkpoint of that name{names}")


def make(
    folder: RunFolder,
    name: str,
    out: Path,
    *,
    seed: int | None = None,
    tau: float | None = None,
    bfloat16: bool = False,
) -> Path:
    """Put one network of a finished run into ``out/NAME``; returns that folder."""
    if not re.fullmatch("[a-z0-9][a-z0-9.-]*", name):
        raise ConfigError(f"--name: expected small letters, digits and hyphens, got {name!r}")
    e = folder.find(seed=seed, tau=tau)
    result, made_by = folder.own_result(e), folder.environment()
    if result is None:
        raise RunError(f"{folder.path}: not finished yet")
    if result.get("failed") is not None:
        raise RunError(f"{folder.config().member(e).name}: its loss was not finite, so it makes no checkpoint")
    config, _, network = folder.load_network(e)
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    weights = {k: v.detach().to(dtype).contiguous() for k, v in network.state_dict().items()}
    home = out / name
    home.mkdir(parents=True, exist_ok=True)
    save_file(weights, home / "model.safetensors")
    result = {k: v for k, v in result.items() if k not in ("members", "failed")}
    result |= {k: made_by[k] for k in ("commit", "command", "device_name") if k in made_by}
    write_json(home / "config.json", config.to_json())
    write_json(home / "result.json", result)
    (home / "card.md").write_text(card(name, config, result, weights))
    return home


def card(name: str, config: TrainConfig, result: dict[str, Any], weights: dict[str, Tensor]) -> str:
    """What a person wants to know of a checkpoint."""
    count, dtype = sum(v.numel() for v in weights.values()), str(weights["halt.weight"].dtype).removeprefix("torch.")
    kind = "without ACT" if config.halting == "none" else config.halting if config.tau is None else "with ACT"
    rounded = "" if dtype == "float32" else "; the numbers below are those of its float32 weights"
    lines = [
        ("task", config.task + "".join(f", {k} {v}" for k, v in config.task_options.items())),
        ("network", f"{config.hidden_size} units, {count:,} weights, stored in {dtype}{rounded}"),
        ("halting", f"{kind}, tau {config.tau:g}" if config.tau is not None else kind),
        ("seed", str(config.seed)),
        ("updates", f"{result['updates']:,} by {config.workers} worker{'s' if config.workers > 1 else ''}"),
        (
            "setting",
            f"preset {config.preset}, Adam with rate {config.learning_rate:g}"
            + (f", falling to 0 over the last {config.cooldown:.0%}," if config.cooldown else "")
            + f" and beta2 {config.beta2:g}, batch "
            f"{config.batch_size}, M {config.max_steps}, clip {config.clip}"
            + (f", first weights normal with standard deviation {config.init_std:g}" if config.init_std else ""),
        ),
        *numbers(result),
        ("made with", f"`{result.get('command', '')}`"),
        ("commit", f"{result.get('commit') or 'unknown'}, on {result.get('device_name', 'an unknown device')}"),
        ("measure it", f"`pondertime evaluate {name}`"),
    ]
    table = "\n".join(f"| {k} | {v} |" for k, v in lines)
    return f"# {name}\n\n| | |\n|---|---|\n{table}\n"


def numbers(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The results of a network, each with its standard error over sequences."""
    shown = [("sequences measured", f"{result['sequences']:,}")]
    if "bpc" in result:
        shown += [
            (words, f"{result[key]:.3f}" + (f" ± {result[f'{key}_se']:.3f}" if f"{key}_se" in result else ""))
            for words, key in (("bits per character", "bpc"), ("bits, held-out text", "bpc_held_out"))
        ]
    else:
        shown += [
            (words, f"{100 * result[key]:.2f} % ± {100 * result[f'{key}_se']:.2f} %")
            for words, key in (("error", "error"), ("error per target", "target_error"))
        ]
    return [*shown, ("ponder N", f"{result['steps']:.2f}"), ("rho", f"{result['rho']:.2f}")]


def main(args: list[str] | None = None) -> None:
    """Make a checkpoint from a run folder."""
    parser = argparse.ArgumentParser("python -m pondertime.checkpoints", description=main.__doc__)
    parser.add_argument("run", type=Path, help="a finished run folder")
    parser.add_argument("--name", required=True, help="such as parity-act")
    parser.add_argument("--seed", type=int, help="which network, where the run holds several seeds")
    parser.add_argument("--tau", type=float, help="which network, of a grid; left out: the one without ACT")
    parser.add_argument("--bfloat16", action="store_true", help="store the weights in half the space")
    parser.add_argument("--out", type=Path, default=Path("checkpoints"), help="the folder of checkpoints")
    given = parser.parse_args(args)
    try:
        home = make(
            RunFolder(given.run), given.name, given.out, seed=given.seed, tau=given.tau, bfloat16=given.bfloat16
        )
    except (ConfigError, RunError, OSError) as error:
        sys.exit(f"error: {error}")
    print((home / "card.md").read_text(), end="")
    print(f"{home}: {sum(p.stat().st_size for p in home.iterdir()) / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
