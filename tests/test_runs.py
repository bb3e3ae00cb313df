"""Run folders: who may use one, what survives in it, and what is said of one that is damaged."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pondertime.config import ConfigError, RunError, TrainConfig, make_config
from pondertime.networks import build
from pondertime.runs import RunFolder, command, make_task, write_json
from pondertime.train import train
from small_runs import assert_same_run, contents, metrics, processes, small, train_elsewhere, trained, updates, weights


def refused(folder: RunFolder, words: str, config: TrainConfig | None = None) -> None:
    """A training that is refused and leaves everything as it was."""
    before = contents(folder.path)
    with pytest.raises((RunError, ConfigError, OSError), match=words):
        train(config or small(iterations=80), folder)
    assert contents(folder.path) == before


def test_a_run_folder_says_all(tmp_path: Path):
    folder = trained(tmp_path / "runs" / "deep" / "run")
    names = {"config.json", "env.json", "metrics.jsonl", "result.json", "lock", "checkpoint"}
    assert {p.name for p in folder.path.iterdir()} == names
    assert {p.name for p in folder.checkpoint.iterdir()} == {"model.safetensors", "optimiser.safetensors", "state.json"}
    assert folder.config() == small()
    env = json.loads((folder.path / "env.json").read_text())
    assert env["torch"] == torch.__version__ and env["device"] == "cpu" and env["threads"] == 1
    assert {"commit", "python", "device_name", "backend", "command"} <= env.keys()
    config, task, network = folder.load_network()
    assert (config, task.name, network.training) == (small(), "parity", False)
    saved = load_file(folder.checkpoint / "model.safetensors")
    assert all(torch.equal(network.state_dict()[k], v) for k, v in saved.items())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tau": 0.5}, r"tau = 0.003, asked for 0.5; only --iterations may grow"),
        ({"seed": 7}, r"seed = 1, asked for 7"),
        ({"hidden_size": 8}, r"hidden_size = 16, asked for 8"),
        ({"bits": 9}, r"bits = 8, asked for 9"),
        ({"workers": 2}, r"workers = 1, asked for 2"),
        ({"iterations": 59}, r"iterations = 60, asked for 59; only --iterations may grow"),
        ({"task": "logic"}, r"task = parity, asked for logic"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_config_is_refused(tmp_path: Path, changes: dict[str, Any], words: str):
    refused(trained(tmp_path / "run"), words, small(**changes))


def test_what_is_no_run_folder_is_left_alone(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match=r"file: expected a run folder, but it is a file"):
        train(small(), RunFolder(tmp_path / "file"))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "lock").write_text("mine")
    (tmp_path / "photos" / "cat.jpg").write_text("mine")
    with pytest.raises(RunError, match=r"photos: not a run folder, and not empty \(it holds cat.jpg\)"):
        train(small(), RunFolder(tmp_path / "photos"))
    assert {p.name: p.read_text() for p in (tmp_path / "photos").iterdir()} == {"lock": "mine", "cat.jpg": "mine"}
    with pytest.raises(RunError, match=r"photos: no run here \(there is no config.json\)"):
        RunFolder(tmp_path / "photos").load_network()


def test_what_cannot_be_trained_leaves_nothing(tmp_path: Path):
    (tmp_path / "text").write_bytes(b"a short text" * 20)
    folder = RunFolder(tmp_path / "run")
    wrong = [
        ({"data": "excerpt", "hidden_size": 10**9}, RuntimeError, r"memory|overflow"),
        ({"data": str(tmp_path / "missing")}, OSError, r"missing: no such file"),
        ({"data": str(tmp_path / "text")}, ConfigError, r"expected more than 500 bytes to train in .*text, got 228"),
        (
            {"data": str(tmp_path / "text"), "length": 100},
            ConfigError,
            r"more than 100 bytes to held-out in .*, got 12",
        ),
    ]
    for changes, error, words in wrong:
        with pytest.raises(error, match=words):
            train(small("wikipedia", **changes), folder)
        assert not folder.path.exists()
    train(small(), folder)


def hold(path: Path, ready: Any, leave: Any) -> None:
    with RunFolder(path).locked():
        ready.set()
        leave.wait(60)


def test_two_processes_on_one_folder(tmp_path: Path):
    folder = trained(tmp_path / "run")
    ready, leave = processes().Event(), processes().Event()
    other = processes().Process(target=hold, args=(folder.path, ready, leave))
    other.start()
    assert ready.wait(60)
    refused(folder, r"run: another process is training this run")
    folder.load_network()
    leave.set()
    other.join()
    first, second = (
        processes().Process(target=train_elsewhere, args=(small(iterations=80), folder.path, 0.0)) for _ in range(2)
    )
    first.start()
    second.start()
    first.join()
    second.join()
    assert 0 in (first.exitcode, second.exitcode)
    assert_same_run(folder, trained(tmp_path / "alone", small(iterations=80)))


def lose_newest(folder: RunFolder) -> None:
    os.replace(folder.path / "checkpoint", folder.path / "checkpoint.old")


def half_new(folder: RunFolder) -> None:
    new = folder.path / "checkpoint.new"
    new.mkdir()
    (new / "model.safetensors").write_bytes((folder.checkpoint / "model.safetensors").read_bytes()[:100])


def both(folder: RunFolder) -> None:
    lose_newest(folder)
    half_new(folder)


def half_a_line(folder: RunFolder) -> None:
    with open(folder.path / "metrics.jsonl", "a") as file:
        file.write('{"iterations": 80, "upd')


def more_lines(folder: RunFolder) -> None:
    with open(folder.path / "metrics.jsonl", "a") as file:
        file.write(json.dumps(metrics(folder)[-1]) + "\n")


def half_json(folder: RunFolder) -> None:
    (folder.path / "config.json.new").write_text('{"task": "par')


@pytest.mark.parametrize("harm", [lose_newest, half_new, both, half_a_line, more_lines, half_json])
def test_what_a_kill_leaves_is_resumed(tmp_path: Path, harm: Callable[[RunFolder], None]):
    folder = trained(tmp_path / "run")
    harm(folder)
    assert len(folder.metrics()) in (3, 4)
    folder.load_network()
    assert updates(folder) == 60
    train(small(iterations=80), folder)
    assert_same_run(folder, trained(tmp_path / "unbroken", small(iterations=80)))


def cut(name: str) -> Callable[[RunFolder], None]:
    def harm(folder: RunFolder) -> None:
        path = folder.path / name
        path.write_bytes(path.read_bytes()[:-20])

    return harm


def put(name: str, text: str) -> Callable[[RunFolder], None]:
    def harm(folder: RunFolder) -> None:
        (folder.path / name).write_text(text)

    return harm


def drop(name: str) -> Callable[[RunFolder], None]:
    return lambda folder: (folder.path / name).unlink()


def other_sizes(folder: RunFolder) -> None:
    config = small(hidden_size=8)
    network = build(config, make_task(config))
    save_file(network.state_dict(), folder.checkpoint / "model.safetensors")


def no_moments(folder: RunFolder) -> None:
    save_file({"other": torch.zeros(1)}, folder.checkpoint / "optimiser.safetensors")


def other_task(folder: RunFolder) -> None:
    write_json(folder.path / "config.json", small("logic", iterations=80).to_json())


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (cut("checkpoint/model.safetensors"), r"checkpoint: not a whole checkpoint \(.*\); delete the folder to start"),
        (cut("checkpoint/optimiser.safetensors"), r"checkpoint: not a whole checkpoint"),
        (drop("checkpoint/model.safetensors"), r"not a whole checkpoint \(a part of it is missing\)"),
        (drop("checkpoint/state.json"), r"not a whole checkpoint \(.*state.json: no such file\)"),
        (cut("checkpoint/state.json"), r"not a whole checkpoint \(.*state.json: cannot be read"),
        (put("checkpoint/state.json", "[]"), r"not a whole checkpoint \(a part of it is missing\)"),
        (put("checkpoint/state.json", "{}"), r"checkpoint: does not fit the run's config \('sums'\)"),
        (put("checkpoint/state.json", '{"sums": "x"}'), r"checkpoint: does not fit the run's config"),
        (other_sizes, r"checkpoint: its weights do not fit the run's config \(.*size mismatch"),
        (no_moments, r"checkpoint: does not fit the run's config"),
        (other_task, r"this run has task = logic, asked for parity"),
        (put("config.json", "{"), r"config.json: cannot be read"),
        (put("config.json", "[]"), r"config.json: not a run's config"),
        (put("config.json", '{"task": "parity"}'), r"config.json: not a run's config"),
        (put("result.json", "{}"), r"result.json: not a run's result; delete it"),
        (put("result.json", "nonsense"), r"result.json: cannot be read"),
        (drop("metrics.jsonl"), r"metrics.jsonl: shorter than at the last checkpoint"),
    ],
)
def test_what_is_damaged_is_named_and_kept(tmp_path: Path, harm: Callable[[RunFolder], None], words: str):
    folder = trained(tmp_path / "run")
    harm(folder)
    config = small(iterations=60 if "result" in words else 80)
    before = contents(folder.path)
    with pytest.raises(RunError, match=words):
        train(config, folder)
    after = contents(folder.path)
    assert all(after[k] == v for k, v in before.items() if k.startswith(("checkpoint", "result")))


@pytest.mark.parametrize("change", [{"tau": "x"}, {"task": "chess"}, {"iterations": 0}, {"preset": "slow"}])
def test_a_config_that_was_edited(tmp_path: Path, change: dict[str, Any]):
    folder = trained(tmp_path / "run")
    write_json(folder.path / "config.json", small().to_json() | change)
    refused(folder, r"config.json: not a run's config \(")


def test_json_is_whole_or_as_it_was(tmp_path: Path):
    path = tmp_path / "value.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": 1, "b": object()})
    assert json.loads(path.read_text()) == {"a": 1}


def test_names_of_runs():
    assert make_config("parity", tau=0.01, seed=3).name == "parity-tau0.01-seed3"
    assert make_config("sort", "paper", act=False).name == "sort-paper-noact-seed1"
    assert make_config("logic", force_steps=4).name == "logic-fixed4-seed1"


def test_weights_come_from_the_seed_alone():
    config = small()
    task = make_task(config)
    torch.manual_seed(5)
    first = build(config, task).state_dict()
    state = torch.get_rng_state()
    second = build(config, task).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_first_weights_of_a_given_size():
    config = small("logic", init_std=0.2, hidden_size=64, halt_bias=-2.0)
    network: Any = build(config, make_task(config))
    assert network.halt.bias.item() == -2 and not network.cell.bias_hh.any()
    for name in ("cell.weight_ih", "cell.weight_hh", "cell.bias_ih", "halt.weight"):
        w = network.get_parameter(name)
        assert w.detach().std() == pytest.approx(0.2, rel=4 / (2 * w.numel()) ** 0.5), name
        assert abs(w.mean()) < 4 * 0.2 / w.numel() ** 0.5, name
    drawn: Any = (build(replace(config, seed=seed), make_task(config)) for seed in (1, 2))
    again, other = drawn
    assert torch.equal(again.output.weight, network.output.weight)
    assert not torch.equal(other.output.weight, network.output.weight)


def test_a_longer_training_changes_the_weights(tmp_path: Path):
    folder = trained(tmp_path / "run")
    before = weights(folder)
    assert weights(trained(folder.path, small(iterations=61))) != before


def test_a_checkpoint_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = trained(tmp_path / "run", small(iterations=5))
    load = load_file
    times = []

    def replaced(path: Path) -> Any:
        times.append(path)
        if len(times) == 1:
            raise FileNotFoundError(path)
        return load(path)

    monkeypatch.setattr("pondertime.runs.load_file", replaced)
    saved = folder.load()
    assert saved is not None and saved[1]["updates"] == 5


def test_a_command_is_recorded_without_when_it_stops(monkeypatch: pytest.MonkeyPatch):
    for given in (["--max-minutes", "2.5", "--seeds", "2"], ["--seeds", "2", "--max-minutes=3"]):
        monkeypatch.setattr(sys, "argv", ["/somewhere/bin/pondertime", "sweep", "parity", *given])
        assert command() == "pondertime sweep parity --seeds 2"
    monkeypatch.setattr(sys, "argv", ["pondertime", "train", "wikipedia", "--data", "my text.txt"])
    assert command() == "pondertime train wikipedia --data 'my text.txt'", "as it can be typed again"
