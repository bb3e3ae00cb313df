"""Several networks in one run: each is trained as it would be alone, fails alone, and is found by its seed."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compare import assert_same
from pondertime.batches import Batches
from pondertime.cli import main
from pondertime.config import Diverged, RunError, TrainConfig
from pondertime.ensemble import stacks
from pondertime.evaluate import evaluate_all
from pondertime.learner import Learner
from pondertime.networks import build
from pondertime.runs import RunFolder, build_all, make_task
from pondertime.train import train
from small_runs import SIZE_FLAGS, assert_same_run, kill_often, metrics, result, small, trained


@pytest.fixture(autouse=True)
def few_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pondertime.evaluate.SEQUENCES", 200)


def by_the_book(config: TrainConfig, updates: int) -> dict[str, Any]:
    """The weights after some updates by the reference, torch's own Adam and its own clipping."""
    task = make_task(config)
    network = build(config, task, backend="reference")
    optimiser = torch.optim.Adam(network.parameters(), config.learning_rate, (0.9, config.beta2))
    data = Batches(task, config.batch_size, [config.seed], 0, "cpu")
    for i in range(updates):
        output, _, ponder = network(data[i].input, lengths=data[i].lengths)
        loss = task.loss(output, data[i]) + (config.tau or 0) * ponder.cost
        optimiser.zero_grad()
        loss.mean().backward()
        if config.clip is not None:
            nn.utils.clip_grad_norm_(network.parameters(), config.clip)
        optimiser.step()
    return network.state_dict()


@pytest.mark.parametrize(
    ("members", "taus", "rates"), [(1, (), ()), (3, (), ()), (2, (0.5, 0.01), ()), (3, (0.5, 0.01), (1e-3, 4e-3))]
)
@pytest.mark.parametrize("task", ["parity", "logic", "addition"])
def test_updates_are_those_of_torch(task: str, members: int, taus: tuple[float, ...], rates: tuple[float, ...]) -> None:
    config = small(task, members=members, clip=0.5, learning_rate=2e-3, halt_bias=-1.0)
    config = replace(config, taus=taus, learning_rates=rates)
    if rates:
        assert [config.member(e).learning_rate for e in range(6)] == 2 * [1e-3, 4e-3, 1e-3]
    learner = Learner(config, make_task(config), build_all(config, make_task(config)), "cpu")
    for i in range(8):
        learner.update(i)
    for e in range(config.size):
        expected = by_the_book(config.member(e), 8)
        made = {k: v if config.size == 1 else v[e] for k, v in learner.network.state_dict().items()}
        for name, value in expected.items():
            assert_same(made[name], value, torch.float32)


def test_a_run_of_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--members", "3", "--seed", "5", "--iterations", "40", "--runs", str(tmp_path)]
    main(["train", "parity", *SIZE_FLAGS, *flags])
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("parity-tau0.003-seeds5-7: preset fast")
    assert [line.split(":")[0].strip() for line in said[1:]] == [
        "parity-tau0.003-seed5", "parity-tau0.003-seed6", "parity-tau0.003-seed7", "parity-tau0.003-seeds5-7",
    ]  # fmt: skip
    folder = RunFolder(tmp_path / "parity-tau0.003-seeds5-7")
    assert [line["seed"] for line in metrics(folder)] == [5, 6, 7, 5, 6, 7]
    assert [line["iterations"] for line in folder.metrics(1)] == [20, 40]
    alone = trained(tmp_path / "alone", small(seed=6, iterations=40))
    for line, expected in zip(folder.metrics(1), metrics(alone), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert line["histogram"] == expected["histogram"]
    outcome = result(folder)
    assert outcome["error"] == pytest.approx(sum(m["error"] for m in outcome["members"]) / 3)
    main(["evaluate", str(folder.path), "--seed", "6", "--sequences", "200"])
    assert f"error {outcome['members'][1]['error']:.2%}" in capsys.readouterr().out


def test_every_network_its_learning_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "parity", *SIZE_FLAGS, "--members", "3", "--iterations", "40", "--runs", str(tmp_path)]
    main([*command, "--learning-rates", "1e-3,2e-2"])
    said = capsys.readouterr().out.splitlines()
    assert [line.rpartition(", ")[2] for line in said[1:4]] == ["rate 0.001", "rate 0.02", "rate 0.001"]
    folder = RunFolder(tmp_path / "parity-tau0.003-seeds1-3")
    assert [line["learning_rate"] for line in metrics(folder)] == 2 * [1e-3, 2e-2, 1e-3]
    alone = trained(tmp_path / "alone", small(seed=2, iterations=40, learning_rate=2e-2))
    for line, expected in zip(folder.metrics(1), metrics(alone), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert folder.load_network(folder.find(seed=2))[0].learning_rate == 2e-2
    assert [m["learning_rate"] for m in result(folder)["members"]] == [1e-3, 2e-2, 1e-3]
    for wrong, words in (
        (command, r"this run has learning_rates = \(0.001, 0.02\), asked for \(\)"),
        (["evaluate", str(folder.path), "--seed", "2", "--results", str(tmp_path)], "several learning rates"),
    ):
        with pytest.raises(SystemExit):
            main(wrong)
        assert re.search(words, capsys.readouterr().err)


@pytest.mark.parametrize("backend", ["fused", "fused-calls"])
@pytest.mark.parametrize("task", ["logic", "addition"])
def test_measured_together_as_alone(task: str, backend: str) -> None:
    """Sequences of a task differ in length; every network of a stack must see its own."""
    config = small(task, members=3, halt_bias=-1.0)
    networks = [build(config.member(e), make_task(config), backend=backend) for e in range(3)]
    ((places, stack),) = stacks(dict(enumerate(networks)), 8)
    assert places == [0, 1, 2]
    for numbers, network in zip(evaluate_all(stack, make_task(config)), networks, strict=True):
        assert numbers == pytest.approx(evaluate_all(network, make_task(config))[0], rel=1e-5)


def test_which_network_must_be_said(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run", small(members=2, iterations=5))
    with pytest.raises(RunError, match="holds 2 networks; say which with --seed"):
        folder.find()
    with pytest.raises(RunError, match="holds no network of seed 9"):
        folder.find(seed=9)
    config, _, _ = folder.load_network(folder.find(seed=2))
    assert (config.seed, config.members, config.name) == (2, 1, "parity-tau0.003-seed2")


def test_killed_and_resumed(tmp_path: Path) -> None:
    config = small(members=2, iterations=400)
    killed = RunFolder(tmp_path / "killed")
    kill_often(config, killed, 3, 60, seed=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train(config, killed)
        assert_same_run(killed, trained(tmp_path / "unbroken", config))
    finally:
        torch.set_num_threads(threads)


def test_a_network_that_diverges_leaves_the_others_alone(tmp_path: Path) -> None:
    config = small(members=3, iterations=40)
    before = trained(tmp_path / "whole", config)
    poisoned = RunFolder(tmp_path / "poisoned")
    train(small(members=3, iterations=1), poisoned)
    tensors, counters = poisoned.load() or ({}, {})
    # A weight so large that the loss overflows.
    tensors["model"]["output.weight"][1] = 3e38
    poisoned.save(tensors, counters)
    train(config, poisoned)
    outcome = result(poisoned)
    assert [m["failed"] for m in outcome["members"]] == [None, 1, None]
    assert outcome["members"][1].keys() == {"seed", "tau", "failed"}, "nothing is measured of it"
    for e in (0, 2):
        assert outcome["members"][e] == result(before)["members"][e]
    assert outcome["error"] == pytest.approx((outcome["members"][0]["error"] + outcome["members"][2]["error"]) / 2)


def test_a_network_that_failed_stays_as_it_is() -> None:
    config = small(members=3, learning_rate=1e-2)
    learner = Learner(config, make_task(config), build_all(config, make_task(config)), "cpu")
    for i in range(5):
        learner.update(i)
    learner.fail(1, 5)
    before = learner.weights.all.clone()
    learner.weights.all[2, :500] = float("nan")
    for i in range(5, 10):
        learner.update(i)
    assert learner.failed == {1: 5, 2: 5}
    assert torch.equal(learner.weights.all[1], before[1]) and not torch.equal(learner.weights.all[0], before[0])
    assert learner.weights.all.isfinite().all()
    learner.weights.all[0] = float("nan")
    with pytest.raises(Diverged, match="at iteration 10"):
        learner.update(10)


def test_a_learning_rate_that_is_too_high(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights are finite when it is given up, but too large to run."""
    rates = ["--members", "2", "--learning-rates", "1e-3,1e38", "--iterations", "40"]
    main(["train", "parity", *SIZE_FLAGS, *rates, "--out", str(tmp_path / "run")])
    _, fine, failed, mean = capsys.readouterr().out.splitlines()
    assert "error" in fine and re.search(r"seed2: its loss was not finite at iteration \d+, rate 1e\+38$", failed)
    numbers = re.compile("error [0-9.]+% .*ponder [0-9.]+")
    assert numbers.findall(fine) == numbers.findall(mean) != []
