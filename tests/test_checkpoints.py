"""Checkpoints: made from runs, found by name in a checkout and in an installed package, measured as recorded."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pondertime import checkpoints
from pondertime.checkpoints import Checkpoint, available, find, make
from pondertime.cli import main
from pondertime.config import ConfigError, RunError
from pondertime.networks import build
from pondertime.runs import RunFolder, make_task, write_json
from pondertime.show import apart
from small_runs import contents, small, trained

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pondertime.evaluate.DIFFICULTY_SAMPLES", 10)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained(tmp_path_factory.mktemp("runs") / "run", small(seed=3))


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of its own, and a current folder elsewhere."""
    home = tmp_path / "checkout"
    home.mkdir()
    (home / "pyproject.toml").touch()
    monkeypatch.setattr(checkpoints, "CHECKOUT", home)
    monkeypatch.setattr(checkpoints, "SHIPPED", tmp_path / "nowhere")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return home


def grid(path: Path) -> RunFolder:
    """The folder of a grid of two taus and one without ACT with two seeds each, as a GPU leaves it."""
    config = small(members=2, seed=5)
    whole = type(config).from_json({**config.to_json(), "tau": None, "taus": [0.1, 0.01, None]}, path)
    task = make_task(whole)
    weights = [build(whole.member(e), task).state_dict() for e in range(6)]
    stacked = {k: torch.stack([w[k] for w in weights]) for k in weights[0]}
    folder = RunFolder(path)
    path.mkdir()
    folder.write_config(whole)
    write_json(path / "env.json", {"commit": "abc", "command": "pondertime sweep parity", "device": "cuda"})
    folder.save({"model": stacked, "optimiser": {}}, {})
    numbers = {"sequences": 9, "error_se": 0.01, "target_error": 0.2, "target_error_se": 0.01, "steps": 2.0, "rho": 2.5}
    members = [{"seed": 5 + e % 2, "failed": 7 if e == 1 else None, "error": e / 10, **numbers} for e in range(6)]
    folder.write_result({"stopped": "iterations", "iterations": 60, "updates": 60, "seconds": 6.0, "members": members})
    return folder


def test_a_run_as_a_checkpoint(run: RunFolder, checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints.main([str(run.path), "--name", "parity-act", "--out", str(checkout / "checkpoints")])
    card = capsys.readouterr().out
    result = run.result() or {}
    for words in (
        "| seed | 3 |",
        "with ACT, tau 0.003",
        "| updates | 60 by 1 worker |",
        "pondertime evaluate parity-act",
    ):
        assert words in card
    assert f"| error | {100 * result['error']:.2f} % ± {100 * result['error_se']:.2f} % |" in card
    assert f"| commit | {run.environment()['commit']}, on " in card
    home = checkout / "checkpoints" / "parity-act"
    assert {p.name for p in home.iterdir()} == {"card.md", "config.json", "model.safetensors", "result.json"}
    saved = find("parity-act")
    assert isinstance(saved, Checkpoint) and saved.config() == run.config()
    expected = run.load_network()[2].state_dict()
    for name, value in saved.load_network()[2].state_dict().items():
        assert torch.equal(value, expected[name])
    before = contents(checkout)
    main(["evaluate", "parity-act"])
    said = capsys.readouterr().out
    assert f"recorded  {100 * result['error']:.3f} ± " in said and f"measured  {100 * result['error']:.3f} ± " in said
    assert said.endswith("they agree: 0.0 standard errors apart\n")
    assert contents(checkout) == before and not list(Path.cwd().iterdir())
    main(["evaluate", str(home)])
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(("flags", "e"), [(["--seed", "6", "--tau", "0.01"], 3), (["--seed", "5"], 4)])
def test_one_network_of_a_grid(tmp_path: Path, checkout: Path, flags: list[str], e: int) -> None:
    folder = grid(tmp_path / "grid")
    checkpoints.main([str(folder.path), *flags, "--name", "x", "--out", str(checkout / "checkpoints")])
    saved = find("x")
    assert saved.config() == folder.config().member(e) and saved.recorded()["error"] == e / 10  # pyrefly: ignore
    stacked = load_file(folder.path / "checkpoint" / "model.safetensors")
    for name, value in load_file(checkout / "checkpoints" / "x" / "model.safetensors").items():
        assert torch.equal(value, stacked[name][e])
    config, _, network = saved.load_network(saved.find())
    assert (config.size, network.force_steps) == (1, None if e == 3 else 1)


def test_bfloat16(run: RunFolder, tmp_path: Path) -> None:
    home = make(run, "half", tmp_path, bfloat16=True)
    assert {v.dtype for v in load_file(home / "model.safetensors").values()} == {torch.bfloat16}
    assert "stored in bfloat16; the numbers below are those of its float32 weights" in (home / "card.md").read_text()
    expected = run.load_network()[2].state_dict()
    for name, value in Checkpoint(home).load_network()[2].state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, expected[name].bfloat16().float())


def test_a_network_that_reads_text(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pondertime.evaluate.WIKIPEDIA_SEQUENCES", 60)
    run = trained(tmp_path / "run", small("wikipedia", data="excerpt", length=60, hidden_size=8, iterations=5))
    home = make(run, "wikipedia-act", checkout / "checkpoints", bfloat16=True)
    result = run.result() or {}
    assert f"| bits per character | {result['bpc']:.3f} ± {result['bpc_se']:.3f} |" in (home / "card.md").read_text()
    main(["evaluate", "wikipedia-act"])
    said = capsys.readouterr().out
    assert f"recorded  {result['bpc']:.3f} ± " in said and "they agree: 0.0 standard errors apart" in said
    assert "full stop" in said and "word boundaries by entropy: F1 0." in said
    main(["evaluate", str(run.path), "--results", "results"])
    assert {path.name for path in Path("results").glob("*.csv")} == {
        f"wikipedia{kind}.csv" for kind in ("", "-difficulty", "-classes", "-boundaries")
    }
    assert {"classes", "boundaries", "traces"} <= json.loads((run.path / "evaluation.json").read_text()).keys()


def test_what_makes_no_checkpoint(run: RunFolder, tmp_path: Path) -> None:
    folder = grid(tmp_path / "grid")
    with pytest.raises(RunError, match="holds 6 networks; say which with --seed"):
        make(folder, "x", tmp_path)
    with pytest.raises(RunError, match=r"tau0.1-seed6: its loss was not finite"):
        make(folder, "x", tmp_path, seed=6, tau=0.1)
    with pytest.raises(ConfigError, match=r"--name: expected small letters, digits and hyphens, got '\.\./x'"):
        make(run, "../x", tmp_path)
    (folder.path / "result.json").unlink()
    with pytest.raises(RunError, match="not finished yet"):
        make(folder, "x", tmp_path, seed=5, tau=0.1)
    with pytest.raises(SystemExit, match="error: nowhere: no run here"):
        checkpoints.main(["nowhere", "--name", "x"])
    assert not (tmp_path / "x").exists()


def test_names_that_do_not_exist(run: RunFolder, checkout: Path) -> None:
    with pytest.raises(RunError, match=r"chess-act: no run here .* there are no checkpoints here"):
        find("chess-act")
    for name in ("parity-act", "logic-act"):
        make(run, name, checkout / "checkpoints")
    with pytest.raises(RunError, match=r"chess-act: no run here .* the checkpoints are logic-act, parity-act$"):
        find("chess-act")
    with pytest.raises(RunError, match=r"wikipedia-act: no run here .* the checkpoints are logic-act, parity-act$"):
        find("wikipedia-act")
    (checkout / "pyproject.toml").unlink()
    with pytest.raises(RunError, match=r"wikipedia-act: too large to be installed .* checkpoints/wikipedia-act in"):
        find("wikipedia-act")
    assert available() == {}


def test_a_folder_of_that_name_comes_first(run: RunFolder, checkout: Path) -> None:
    make(run, "parity-act", checkout / "checkpoints")
    shutil.copytree(run.path, "parity-act")
    assert type(find("parity-act")) is RunFolder


def test_errors_of_evaluate(run: RunFolder, checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = make(run, "parity-act", checkout / "checkpoints")

    def said(*args: str) -> str:
        with pytest.raises(SystemExit):
            main(["evaluate", "parity-act", *args])
        words = capsys.readouterr().err
        assert words.count("\n") == 1
        return words

    assert "--results: parity-act is a checkpoint, without the learning curve" in said("--results", "results")
    assert "holds no network of seed 8" in said("--seed", "8")
    model = home / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-10])
    assert "model.safetensors: cannot be read (" in said()
    (home / "result.json").unlink()
    assert "not a whole checkpoint (there is no result.json)" in said()


def test_how_far_apart() -> None:
    recorded, many = {"error": 0.10, "error_se": 0.03}, {"sequences": 10**6}
    assert apart(recorded, {"error": 0.20, "error_se": 0.04, **many}, "error") == pytest.approx(2)
    assert apart({"error": 0.0}, {"error": 0.0, "error_se": 0.0, **many}, "error") == 0
    assert apart({"error": 0.0}, {"error": 0.1, **many}, "error") == float("inf")
    assert apart({"bpc": 2.0, "bpc_se": 0.3}, {"bpc": 3.0, "bpc_se": 0.4}, "bpc") == pytest.approx(2)
    # One sequence without a mistake says little against 10 %: its spread is the root of 0.1 0.9.
    assert apart(recorded, {"error": 0.0, "error_se": 0.0, "sequences": 1}, "error") == pytest.approx(0.1 / 0.0909**0.5)


def test_from_an_installed_package(run: RunFolder, tmp_path: Path) -> None:
    """The package as a wheel unpacks it, with no checkout around it, is found by name and stays as it was."""
    site = tmp_path / "site"
    shutil.copytree(ROOT / "src" / "pondertime", site / "pondertime", ignore=shutil.ignore_patterns("__pycache__"))
    make(run, "parity-act", site / "pondertime" / "_checkpoints")
    before = contents(site)
    (tmp_path / "work").mkdir()
    args = ["evaluate", "parity-act", "--sequences", "50", "--backend", "reference"]
    code = "import sys; from pondertime.cli import main; main(sys.argv[1:])"
    environment = os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *args], cwd=tmp_path / "work", env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "recorded  " in done.stdout and "50 sequences" in done.stdout
    assert contents(site) == before and not list((tmp_path / "work").iterdir())


def test_the_wheel_has_the_small_ones(tmp_path: Path) -> None:
    builder = pytest.importorskip("hatchling.builders.wheel")
    project = tmp_path / "project"
    (project / "src" / "pondertime").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "src/pondertime/__init__.py"):
        shutil.copy(ROOT / name, project / name)
    for name in ("parity-act", *checkpoints.LARGE):
        (project / "checkpoints" / name).mkdir(parents=True)
        for file in ("model.safetensors", "config.json", "result.json", "card.md"):
            (project / "checkpoints" / name / file).write_text(json.dumps(name))
    (wheel,) = builder.WheelBuilder(str(project)).build(directory=str(tmp_path), versions=["standard"])
    names = {name for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name}
    files = {f"pondertime/_checkpoints/parity-act/{p.name}" for p in (project / "checkpoints/parity-act").iterdir()}
    assert names == {"pondertime/__init__.py", *files}
    (wheel,) = builder.WheelBuilder(str(project)).build(directory=str(tmp_path), versions=["editable"])
    assert zipfile.ZipFile(wheel).read("_pondertime.pth").decode().strip() == str(project / "src")
    shutil.rmtree(project / "checkpoints")
    (wheel,) = builder.WheelBuilder(str(project)).build(directory=str(tmp_path), versions=["standard"])
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if "_checkpoints" in name]


def test_the_large_ones_are_left_out_of_the_wheel() -> None:
    target = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert target["exclude"] == [f"/checkpoints/{name}" for name in checkpoints.LARGE]
    assert target["sources"]["checkpoints"] == f"pondertime/{checkpoints.SHIPPED.name}"
