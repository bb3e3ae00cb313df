"""Logic: chains of binary gates, and a bit carried from step to step."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from pondertime.tasks.task import NO_TARGET, Batch, Task, at_least, drawn_or, integers

# The paper's truth tables; the four values are those at (P, Q) = TT, TF, FT, FF.
TABLES = {
    "NOR": "FFFT",
    "Xq": "FFTF",
    "ABJ": "FTFF",
    "XOR": "FTTF",
    "NAND": "FTTT",
    "AND": "TFFF",
    "XNOR": "TFFT",
    "if/then": "TFTT",
    "then/if": "TTFT",
    "OR": "TTTF",
}
GATES = tuple(TABLES)
NO_GATE = len(GATES)

# STEP[g, s]: what gate g makes of the pair s = 2 b_i + b_{i-1}, namely 2 b_{i+1} + b_i. No gate changes nothing.
STEP = torch.tensor(
    [[2 * (table[3 - s] == "T") + s // 2 for s in range(4)] for table in TABLES.values()] + [list(range(4))]
)


@cache
def step_on(device: torch.device) -> Tensor:
    """STEP, flat, on a device; copying it for every batch would wait for the device."""
    return STEP.to(device).flatten()


class Logic(Task):
    """Apply a chain of gates to two bits, step after step.

    A sequence has 1 to 10 steps. Each has bits b_0 and b_1 and B gates, B from 1 to 10 and its own
    in every step; b_{i+1} = T_i(b_i, b_{i-1}), P of the table being b_i and Q b_{i-1}. The target is
    b_{B+1}. From the second step on b_0 is the target before it, and the input shows 0.

        b0 = 0, b1 = 1, NOR, XOR    ->  b2 = NOR(1, 0) = 0, b3 = XOR(0, 1) = 1  ->  1
        (b0 = 1,) b1 = 0, if/then   ->  b2 = if/then(0, 1) = 1                  ->  1
        (b0 = 1,) b1 = 1, AND, ABJ  ->  b2 = AND(1, 1) = 1, b3 = ABJ(1, 1) = 0  ->  0

    Input: b_0, b_1, then for each gate ten elements, one of them 1, or none where there is no gate.
    ``length``, ``gates``: the most steps and the most gates a step (10 and 10 in the paper).
    Difficulty: the gates in every step, at length 5.
    """

    name = "logic"
    cell = "lstm"
    hidden_size = 128
    batch_size = 16

    def __init__(self, length: int = 10, gates: int = 10) -> None:
        at_least(1, length=length, gates=gates)
        self.gates = gates
        self.input_size = 2 + gates * len(GATES)
        self.output_size = 1
        self.steps = length
        self.difficulties = range(1, gates + 1)

    def sample(self, batch_size: int, generator: torch.Generator, difficulty: int | None = None) -> Batch:
        self._check(difficulty)
        device, T, B = generator.device, self.steps, batch_size
        lengths = drawn_or(None if difficulty is None else min(5, T), 1, T, [B], generator)
        mask = torch.arange(T, device=device).unsqueeze(1) < lengths
        counts = drawn_or(difficulty, 1, self.gates, [T, B], generator)
        gates = integers(0, NO_GATE - 1, [self.gates, T, B], generator)
        first = integers(0, 1, [B], generator)
        b1 = integers(0, 1, [T, B], generator)

        places = torch.arange(self.gates, device=device).view(-1, 1, 1)
        gates = gates.masked_fill((places >= counts) | ~mask, NO_GATE)
        target = run(gates, first, b1)

        input = torch.zeros(T, B, self.input_size, device=device)
        input[0, :, 0] = first
        input[:, :, 1] = b1 * mask
        one_hot = torch.eye(NO_GATE + 1, NO_GATE, device=device)
        input[:, :, 2:] = F.embedding(gates.movedim(0, -1), one_hot).flatten(2)
        return Batch(
            input=input,
            target=target.masked_fill(~mask, NO_TARGET).unsqueeze(-1),
            mask=mask,
            lengths=lengths,
            difficulty=None if difficulty is None else counts[0],
        )

    def input_labels(self, batch: Batch, i: int) -> list[str]:
        """``01 NOR XOR``: the bits b0 b1, then the gates; ``.`` for a b0 that is not shown."""
        labels = []
        for t, row in enumerate(batch.input[: int(batch.lengths[i]), i].tolist()):
            names = (GATES[j % len(GATES)] for j, x in enumerate(row[2:]) if x)
            b0 = "." if t else str(int(row[0]))
            labels.append(" ".join([f"{b0}{int(row[1])}", *names]))
        return labels

    def render(self, batch: Batch, i: int) -> str:
        """One line a step, ``01 NOR XOR -> 1``."""
        return "\n".join(f"{question} -> {answer}" for question, answer in zip(*self.labels(batch, i), strict=True))


def run(gates: Tensor, first: Tensor, b1: Tensor) -> Tensor:
    """The targets ``[T, B]`` of gates ``[G, T, B]``, the first b_0 ``[B]`` and every b_1 ``[T, B]``.

    A step is a map from the target before it to its own, so all steps run at once, for both values
    of b_0, and only these maps are followed one after the other.
    """
    step = step_on(gates.device)
    pair = 2 * b1 + torch.arange(2, device=gates.device).view(2, 1, 1)
    for gate in gates:
        pair = step[4 * gate + pair]
    if_false, if_true = pair // 2
    targets = []
    before = first
    for t in range(len(b1)):
        before = torch.where(before == 1, if_true[t], if_false[t])
        targets.append(before)
    return torch.stack(targets)
