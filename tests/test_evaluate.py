"""Evaluation: every number against a plain computation, sequence by sequence, on a tiny network."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import oracle
from compare import TOLERANCE
from pondertime import evaluate as evaluation
from pondertime.act import ACT
from pondertime.evaluate import difficulty_curve, evaluate, generator, measure_all, traces
from pondertime.networks import build
from pondertime.runs import make_task
from pondertime.tasks import Batch, Task
from small_runs import small


def tiny(task: str = "parity", **changes: Any) -> tuple[Task, ACT]:
    """A task and a network of four units in float64 that ponders a few steps."""
    config = small(task, **({"hidden_size": 4, "halt_bias": -0.5, "max_steps": 5} | changes))
    return make_task(config), build(config, make_task(config)).double()


def as_double(batch: Batch) -> Batch:
    return batch._replace(input=batch.input.double()) if batch.input.is_floating_point() else batch


def ask(network: ACT, task: Task, batch: Batch) -> oracle.Answer:
    """What the network answers, computed row by row by the oracle."""
    x = batch.input.double() if batch.input.dim() == 3 else torch.nn.functional.one_hot(batch.input, 256).double()
    zeros = torch.zeros(x.shape[1], 4, dtype=torch.float64)
    kind, state = ("rnn_tanh", zeros) if task.cell == "rnn" else ("lstm", (zeros, zeros))
    limits = {"epsilon": network.epsilon, "max_steps": network.max_steps}
    with torch.no_grad():
        return oracle.act(kind, network.state_dict(), x, state, batch.lengths.tolist(), **limits)


def log_chance(task: Task, output: torch.Tensor, target: list[int]) -> tuple[float, bool]:
    """The logarithm of the chance of a target, and whether the network answers with it."""
    if task.output_size == 1:
        chance = 1 / (1 + math.exp(-float(output[0])))
        return math.log(chance if target[0] else 1 - chance), (chance > 0.5) == bool(target[0])
    total, right, classes = 0.0, True, task.output_size // len(target)
    for k, digit in enumerate(target):
        values = output[k * classes : (k + 1) * classes].tolist()
        total += values[digit] - math.log(sum(math.exp(v) for v in values))
        right &= values[digit] == max(values)
    return total, right


def plainly(network: ACT, task: Task, batches: list[Batch]) -> dict[str, float]:
    """The metrics, one sequence and one target at a time."""
    wrong, shares, losses, targets, inputs, steps, rho = [], [], [], 0, 0, 0, 0.0
    for batch in batches:
        answer = ask(network, task, batch)
        for b, length in enumerate(batch.lengths.tolist()):
            scored = [
                log_chance(task, answer.output[t, b], batch.target[t, b].tolist())
                for t in range(length)
                if batch.mask[t, b]
            ]
            mistakes = sum(not right for _, right in scored)
            wrong.append(float(mistakes > 0))
            shares.append(mistakes / max(len(scored), 1))
            losses.append(-sum(value for value, _ in scored))
            targets, inputs = targets + len(scored), inputs + length
            steps += int(answer.steps[:length, b].sum())
            rho += float(answer.rho[:length, b].sum())
    n = len(wrong)

    def mean_and_error(values: list[float]) -> tuple[float, float]:
        mean = sum(values) / n
        return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)

    (error, error_se), (target_error, target_error_se) = mean_and_error(wrong), mean_and_error(shares)
    a_sequence = max(targets, 1) / n
    return {
        "sequences": n,
        "error": error,
        "error_se": error_se,
        "target_error": target_error,
        "target_error_se": target_error_se,
        "steps": steps / inputs,
        "rho": rho / inputs,
        "loss": sum(losses) / n,
        "bpc": sum(losses) / max(targets, 1) / math.log(2),
        "bpc_se": mean_and_error([value / math.log(2) / a_sequence for value in losses])[1],
    }


@pytest.mark.parametrize("name", ["parity", "logic", "addition", "sort", "wikipedia"])
def test_the_numbers_equal_a_plain_computation(name: str):
    task, network = tiny(name, **({"data": "excerpt", "length": 12} if name == "wikipedia" else {}))
    g = torch.Generator().manual_seed(4)
    batches = [as_double(task.sample(size, g)) for size in (20, 7)]
    network.train()
    assert measure_all(network, task, batches)[0] == pytest.approx(
        plainly(network, task, batches), rel=TOLERANCE[torch.float32]
    )
    assert network.training, "it is left as it was"


def test_every_network_sees_the_same_fresh_sequences(monkeypatch: pytest.MonkeyPatch):
    task, network = tiny()
    network.float()
    monkeypatch.setattr(evaluation, "SEQUENCES", 700)
    first = evaluate(network, task)
    assert evaluate(network, task) == first and first["sequences"] == 700 and "bpc" not in first
    g = generator("cpu")
    batches = [task.sample(500, g), task.sample(200, g)]
    plain = {k: v for k, v in measure_all(network, task, batches)[0].items() if not k.startswith("bpc")}
    assert first == plain
    assert evaluate(network, task, sequences=1)["error_se"] == 0
    assert not any(p.grad is not None for p in network.parameters())


def test_the_difficulty_curve():
    task, network = tiny("logic")
    network.float()
    curve = difficulty_curve(network, task, samples=30)
    assert [(row["difficulty"], row["samples"]) for row in curve] == [(k, 30) for k in range(1, 11)]
    for row in curve:
        batch = task.sample(30, generator("cpu", row["difficulty"]), difficulty=row["difficulty"])
        assert batch.lengths.unique().tolist() == [5]
        expected = measure_all(network, task, [batch])[0]
        assert {k: row[k] for k in expected} == expected
    assert difficulty_curve(network, make_task(small("wikipedia", data="excerpt"))) == []


@pytest.mark.parametrize("name", ["parity", "addition"])
def test_traces(name: str):
    task, network = tiny(name)
    batch = as_double(task.sample(5, torch.Generator().manual_seed(1)))
    answer = ask(network, task, batch)
    for i, trace in enumerate(traces(network, task, batch)):
        length = int(batch.lengths[i])
        assert {len(trace[k]) for k in ("input", "target", "output", "steps", "rho")} == {length}
        assert trace["input"], trace["target"] == task.labels(batch, i)
        assert trace["output"] == task.predictions(answer.output, batch, i)
        assert trace["steps"] == answer.steps[:length, i].tolist()
        assert trace["rho"] == pytest.approx(answer.rho[:length, i].tolist(), abs=1e-4)
        assert trace["difficulty"] == (None if batch.difficulty is None else int(batch.difficulty[i]))
        assert trace["loss"] is None and trace["entropy"] is None


def test_wikipedia_on_a_small_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "text"
    path.write_bytes(b"abcd" * 475 + b"wxyz" * 25)
    task, network = tiny("wikipedia", data=str(path), length=10)
    # A network that knows the first part of the text: always an even chance of four letters.
    with torch.no_grad():
        for name, p in network.named_parameters():
            if name == "output.weight":
                p.zero_()
            elif name == "output.bias":
                p.fill_(-50)[list(b"abcd")] = 0
    result = evaluate(network.float(), task, sequences=12)
    assert result["sequences"] == 12
    assert result["bpc"] == pytest.approx(2) and result["loss"] == pytest.approx(10 * math.log(4), rel=1e-6)
    assert result["bpc_held_out"] == pytest.approx(2 + 50 / math.log(2), rel=1e-6)
    monkeypatch.setattr(evaluation, "WIKIPEDIA_SEQUENCES", 3)
    assert evaluate(network, task)["sequences"] == 3


def test_traces_of_a_text(tmp_path: Path):
    task, network = tiny("wikipedia", data="excerpt", length=15)
    batch = task.sample(2, torch.Generator().manual_seed(1))
    answer = ask(network, task, batch)
    for i, trace in enumerate(traces(network, task, batch)):
        assert trace["target"][:-1] == trace["input"][1:] and trace["difficulty"] is None
        for t in range(15):
            values = answer.output[t, i].tolist()
            total = sum(math.exp(v) for v in values)
            chances = [math.exp(v) / total for v in values]
            bits = -math.log2(chances[int(batch.target[t, i, 0])])
            assert trace["loss"][t] == pytest.approx(bits, abs=1e-3)
            assert trace["entropy"][t] == pytest.approx(-sum(p * math.log2(p) for p in chances), abs=1e-3)
