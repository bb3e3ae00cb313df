"""Measures a network on fresh data: errors, ponder, both against difficulty, single traces. Never trains."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pondertime import characters
from pondertime.act import ACT
from pondertime.batches import beside
from pondertime.ensemble import Ensemble, stacks
from pondertime.halting import Ponder
from pondertime.results import Boundary, CharacterClass
from pondertime.tasks import Batch, Task, Wikipedia

SEED = 20_160_329  # of all evaluation data, so that every network sees the same
SEQUENCES = 10_000
WIKIPEDIA_SEQUENCES = 200  # of 500 characters each
TEXT_SEQUENCES = 1_000  # of them, for the kinds of characters: numbers of pages are rare
DIFFICULTY_SAMPLES = 1_000
MEASURED_TOGETHER = 64  # networks


def chunks(total: int, size: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]


def generator(device: str, key: int = 0) -> torch.Generator:
    return torch.Generator(device).manual_seed(SEED + key)


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """The mean and its standard error."""
    values = values.double()
    spread = values.std().item() if len(values) > 1 else 0.0
    return values.mean().item(), spread / math.sqrt(len(values))


def by_stacks(
    networks: Mapping[int, ACT], device: str, measure: Callable[[ACT | Ensemble], list[Any]]
) -> dict[int, Any]:
    """What ``measure`` finds of each network, by its place; it gets several at once."""
    found: dict[int, Any] = {}
    for places, stack in stacks(networks, MEASURED_TOGETHER):
        found.update(zip(places, measure(stack.to(device)), strict=True))
    return found


def networks_in(network: ACT | Ensemble) -> int:
    return len(network) if isinstance(network, Ensemble) else 1


def answer(network: ACT | Ensemble, batch: Batch) -> tuple[Tensor, Ponder]:
    """Outputs and ponder of a batch; of E networks of the same batch for each, ``[T, E B, ..]``."""
    if isinstance(network, Ensemble):
        E = len(network)
        x = batch.input.unsqueeze(1).expand(-1, E, *batch.input.shape[1:])
        output, ponder = network(x, batch.lengths.expand(E, -1))
        return output.flatten(1, 2), Ponder(*(a.flatten(-2, -1) for a in ponder))
    output, _, ponder = network(batch.input, lengths=batch.lengths)
    return output, ponder


def for_each(batch: Batch, E: int) -> Batch:
    """The same batch E times, side by side."""
    return batch if E == 1 else beside([batch] * E, 1)


@torch.no_grad()
def measure_all(network: ACT | Ensemble, task: Task, batches: list[Batch]) -> list[dict[str, float]]:
    """Errors, ponder and loss of each network over batches, with standard errors over sequences."""
    was_training, E = network.training, networks_in(network)
    network.eval()
    columns: list[Tensor] = []
    inputs = targets = 0
    for batch in batches:
        output, ponder = answer(network, batch)
        every = for_each(batch, E)
        per_sequence = (
            task.error(output, every),
            task.target_error(output, every),
            ponder.steps.sum(0),
            ponder.cost,
            task.loss(output, every),
        )
        columns.append(torch.stack([c.double().cpu().view(E, -1) for c in per_sequence], 1))
        inputs += int(batch.lengths.sum())
        targets += int(batch.mask.sum())
    network.train(was_training)
    return [totals(row, inputs, targets) for row in torch.cat(columns, 2)]


def totals(columns: Tensor, inputs: int, targets: int) -> dict[str, float]:
    """The numbers of a network from those of its sequences."""
    error, target_error, steps, rho, loss = columns
    result: dict[str, float] = {"sequences": len(error)}
    for name, values in {"error": error, "target_error": target_error}.items():
        result[name], result[f"{name}_se"] = mean_and_error(values)
    result["steps"], result["rho"] = steps.sum().item() / inputs, rho.sum().item() / inputs
    result["loss"] = loss.mean().item()
    # Bits a target; the number of targets of a sequence is taken as fixed, as it is where this is reported.
    bits = loss * len(loss) / max(targets, 1) / math.log(2)
    result["bpc"], result["bpc_se"] = mean_and_error(bits)
    return result


def evaluate_all(
    network: ACT | Ensemble, task: Task, *, sequences: int | None = None, device: str = "cpu"
) -> list[dict[str, Any]]:
    """The final numbers of each network: fresh sequences under a fixed seed.

    For wikipedia on the training text, as in the paper, and on the held-out text beside it.
    """
    if task.name != "wikipedia":
        g = generator(device)
        results = measure_all(network, task, [task.sample(n, g) for n in chunks(sequences or SEQUENCES, 500)])
        return [{k: v for k, v in result.items() if k not in ("bpc", "bpc_se")} for result in results]
    total = sequences or WIKIPEDIA_SEQUENCES
    parts = []
    for split in ("train", "held-out"):
        g = generator(device)
        parts.append(measure_all(network, task, [task.sample(n, g, split=split) for n in chunks(total, 50)]))  # type: ignore[call-arg]
    return [
        {**train, "bpc_held_out": held_out["bpc"], "bpc_held_out_se": held_out["bpc_se"]}
        for train, held_out in zip(*parts, strict=True)
    ]


def evaluate(network: ACT, task: Task, *, sequences: int | None = None, device: str = "cpu") -> dict[str, Any]:
    """The final numbers of a network."""
    return evaluate_all(network, task, sequences=sequences, device=device)[0]


def difficulty_curves(
    network: ACT | Ensemble, task: Task, *, samples: int = DIFFICULTY_SAMPLES, device: str = "cpu"
) -> list[list[dict[str, Any]]]:
    """Errors and ponder of each network at every difficulty, fresh samples at each."""
    points = []
    for difficulty in task.difficulties:
        g = generator(device, difficulty)
        batches = [task.sample(n, g, difficulty=difficulty) for n in chunks(samples, 500)]
        found = measure_all(network, task, batches)
        points.append([{"difficulty": difficulty, "samples": samples, **numbers} for numbers in found])
    return [list(curve) for curve in zip(*points, strict=True)] or [[] for _ in range(networks_in(network))]


def difficulty_curve(
    network: ACT, task: Task, *, samples: int = DIFFICULTY_SAMPLES, device: str = "cpu"
) -> list[dict[str, Any]]:
    """Errors and ponder of a network at every difficulty."""
    return difficulty_curves(network, task, samples=samples, device=device)[0]


@torch.no_grad()
def traces(network: ACT, task: Task, batch: Batch) -> list[dict[str, Any]]:
    """What a network answers to single sequences and how long it ponders each step.

    For wikipedia also the loss and the entropy of every prediction, in bits.
    """
    network.eval()
    output, _, ponder = network(batch.input, lengths=batch.lengths)
    surprises = zip(("loss", "entropy"), surprise(output, batch), strict=True) if task.name == "wikipedia" else ()
    per_step, result = dict(surprises), []
    for i, length in enumerate(batch.lengths.tolist()):
        inputs, targets = task.labels(batch, i)
        trace: dict[str, Any] = {
            "input": inputs[:length],
            "target": targets[:length],
            "output": task.predictions(output, batch, i)[:length],
            "steps": ponder.steps[:length, i].tolist(),
            "rho": [round(v, 4) for v in ponder.rho[:length, i].tolist()],
            "difficulty": None if batch.difficulty is None else int(batch.difficulty[i]),
            "loss": None,
            "entropy": None,
        }
        for name, values in per_step.items():
            trace[name] = [round(v, 3) for v in values[:length, i].tolist()]
        result.append(trace)
    return result


def surprise(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss and the entropy of every prediction of one symbol, in bits, ``[T, B]``."""
    logp = torch.log_softmax(output.double(), -1) / math.log(2)
    return -logp.gather(-1, batch.target).squeeze(-1), -(logp.exp2() * logp).sum(-1)


@torch.no_grad()
def read_text(
    network: ACT, task: Task, *, sequences: int | None = None, device: str = "cpu"
) -> tuple[list[CharacterClass], list[Boundary]]:
    """What a network does at each kind of character of the held-out text, and how well that tells boundaries.

    Nothing for a task without text.
    """
    if not isinstance(task, Wikipedia):
        return [], []
    network.eval()
    g, texts, parts = generator(device), [], []
    for n in chunks(sequences or WIKIPEDIA_SEQUENCES, 50):
        batch = task.sample(n, g, split="held-out")
        output, _, ponder = network(batch.input)
        parts.append(torch.stack([ponder.rho.double(), *surprise(output, batch), ponder.steps.double()]).cpu())
        symbols = torch.cat([batch.input, batch.target[-1:, :, 0]]).t().cpu().numpy()
        texts += [row.astype("uint8").tobytes() for row in symbols]
    rho, loss, entropy, steps = torch.cat(parts, 2).transpose(1, 2).numpy()
    values = {"rho": rho, "loss": loss, "entropy": entropy}
    return characters.classes(texts, values), characters.boundaries(texts, {**values, "steps": steps})


# Of addition and sort the traced sequences have these lengths; of the other tasks any.
TRACED_LENGTHS = {"addition": (5, 5, 5), "sort": (10, 20, 30)}


def sample_traces(network: ACT, task: Task, *, device: str = "cpu") -> list[dict[str, Any]]:
    """Traces of the same few sequences for every network, as the paper's figures show them."""
    return [trace for batch in traced_sequences(task, device) for trace in traces(network, task, batch)]


def traced_sequences(task: Task, device: str) -> list[Batch]:
    """The sequences that are traced, each by itself.

    Of wikipedia, held-out text: one stretch of prose and one with XML tags and ID numbers, where there are such.
    """
    if task.name == "wikipedia":
        batch = task.sample(1000, generator(device), split="held-out")  # type: ignore[call-arg]
        texts = [task.render(batch, i) for i in range(len(batch.lengths))]
        chosen = [
            max(range(len(texts)), key=lambda i: prose(texts[i])),
            max(range(len(texts)), key=lambda i: texts[i].count("<id>")),
        ]
    else:
        batch = task.sample(1000, generator(device))
        lengths, chosen = batch.lengths.tolist(), []
        for wanted in TRACED_LENGTHS.get(task.name, (None,) * 3):
            fits = (i for i, n in enumerate(lengths) if i not in chosen and wanted in (None, n))
            chosen += [next(fits)] if wanted in (None, *lengths) else []
    return [batch.rows(slice(i, i + 1)) for i in chosen]


def prose(text: str) -> float:
    """How much of a text is words: letters, spaces and full stops, no markup."""
    return sum(c.isalpha() or c in " .," for c in text) / max(len(text), 1) - 10 * (text.count("<") + text.count("&"))


class Portrait(NamedTuple):
    """All that is measured of a trained network."""

    result: dict[str, Any]
    difficulty: list[dict[str, Any]]
    traces: list[dict[str, Any]]
    classes: list[CharacterClass]
    boundaries: list[Boundary]

    def to_json(self) -> dict[str, Any]:
        text = {k: [asdict(item) for item in getattr(self, k)] for k in ("classes", "boundaries")}
        return {**self.result, "difficulty": self.difficulty, "traces": self.traces, **text}


def portrait(
    network: ACT, task: Task, *, sequences: int | None = None, stored: bool = False, device: str = "cpu"
) -> Portrait:
    """Errors, ponder, both against difficulty, traces; of networks that read text also what they do with it.

    ``stored``: what the result tables hold is measured as a sweep does, however few sequences are asked for.
    """
    samples = DIFFICULTY_SAMPLES if stored or sequences is None else min(sequences, DIFFICULTY_SAMPLES)
    texts = TEXT_SEQUENCES if stored else sequences
    return Portrait(
        evaluate(network, task, sequences=sequences, device=device),
        difficulty_curve(network, task, samples=samples, device=device),
        sample_traces(network, task, device=device),
        *read_text(network, task, sequences=texts, device=device),
    )
