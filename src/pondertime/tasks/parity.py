"""Parity: the whole problem in one vector."""

import functools
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pondertime.tasks.task import Batch, Task, at_least, drawn_or, integers


@functools.cache
def signs(device: torch.device) -> Tensor:
    """Row 256 m + c: the first m bits of byte c as +1 and -1, then zeros."""
    places = torch.arange(8, device=device)
    bits = torch.arange(256, device=device).unsqueeze(1) >> places & 1
    return torch.where(places < torch.arange(9, device=device).view(-1, 1, 1), 2.0 * bits - 1, 0.0).flatten(0, 1)


@functools.cache
def masks(bits: int, device: torch.device) -> Tensor:
    """Row m: integers of 32 bits whose first m bits, of so many, are set."""
    rows, starts = torch.arange(bits + 1).unsqueeze(1), torch.arange(0, 32 * ((bits + 31) // 32), 8)
    return (2 ** (rows - starts).clamp_(0, 8) - 1).to(torch.uint8).view(torch.int32).to(device)


class Parity(Task):
    """Is the number of ones in a vector odd?

    k of the elements, k from 1 to 64, are +1 or -1 with equal chance; the rest are 0. One step.

        + - + + 0 0 0 0  ->  3 ones (odd)   ->  1
        - + + 0 0 0 0 0  ->  2 ones (even)  ->  0
        - 0 0 0 0 0 0 0  ->  0 ones (even)  ->  0

    ``bits``: the size of the vector (64 in the paper). ``placement``: which k elements, the first
    (``"prefix"``) or random ones (``"scatter"``); the paper does not say. Difficulty: k.
    """

    name = "parity"
    cell = "rnn"
    hidden_size = 128
    batch_size = 128

    def __init__(self, bits: int = 64, placement: Literal["prefix", "scatter"] = "prefix") -> None:
        at_least(1, bits=bits)
        if placement not in ("prefix", "scatter"):
            raise ValueError(f"placement: expected prefix or scatter, got {placement!r}")
        self.bits = bits
        self.placement = placement
        self.input_size = bits
        self.output_size = 1
        self.steps = 1
        self.difficulties = range(1, bits + 1)

    def sample(self, batch_size: int, generator: torch.Generator, difficulty: int | None = None) -> Batch:
        self._check(difficulty)
        device = generator.device
        k, places = self._draw(batch_size, generator, difficulty)
        if self.placement == "prefix":
            starts = torch.arange(0, 8 * places.shape[1], 8, device=device)
            places += (k.unsqueeze(1) - starts).clamp_(0, 8).mul_(256)
        else:
            places += 8 * 256
        values = F.embedding(places, signs(device)).flatten(1)[:, : self.bits]
        if self.placement == "scatter":
            values *= self._scatter(k, generator)
        # Ones less minus ones, and k is both.
        ones = (values.sum(1).long() + k) // 2
        return Batch(
            input=values.unsqueeze(0),
            target=(ones % 2).view(1, batch_size, 1),
            mask=torch.ones(1, batch_size, dtype=torch.bool, device=device),
            lengths=torch.ones(batch_size, dtype=torch.int64, device=device),
            difficulty=k,
        )

    def packed(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor] | None:
        if self.placement == "scatter":
            return None
        k, places = self._draw(batch_size, generator)
        used = masks(self.bits, k.device).index_select(0, k)
        drawn = F.pad(places.to(torch.uint8), (0, 4 * used.shape[1] - places.shape[1])).view(torch.int32)
        ones = drawn & used
        odd = functools.reduce(torch.bitwise_xor, ones.unbind(1))
        for shift in (16, 8, 4, 2, 1):
            odd = odd ^ (odd >> shift)
        return torch.cat([ones, ~drawn & used], 1).unsqueeze(0), (odd & 1).unsqueeze(0)

    def _draw(
        self, batch_size: int, generator: torch.Generator, difficulty: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """How many elements are not 0, and bytes whose bits say which are +1."""
        k = drawn_or(difficulty, 1, self.bits, [batch_size], generator)
        return k, integers(0, 255, [batch_size, (self.bits + 7) // 8], generator)

    def _scatter(self, k: Tensor, generator: torch.Generator) -> Tensor:
        """Choose k positions of each row, every choice with equal chance.

        A position is taken with the chance (those still to take) / (positions left).
        """
        used = torch.rand(self.bits, len(k), generator=generator, device=k.device)
        used *= torch.arange(self.bits, 0, -1, device=k.device).unsqueeze(1)
        left = k.float()
        for row in used:
            row.lt_(left)
            left -= row
        return used.t()

    def input_labels(self, batch: Batch, i: int) -> list[str]:
        return ["".join("0+-"[int(x)] for x in batch.input[0, i].tolist()).rstrip("0")]

    def render(self, batch: Batch, i: int) -> str:
        """``+-++ -> 3 ones (odd) -> 1``, zeros at the end left out."""
        ones = int((batch.input[0, i] > 0).sum())
        count = f"{ones} {'one' if ones == 1 else 'ones'} ({'odd' if ones % 2 else 'even'})"
        return f"{self.input_labels(batch, i)[0]} -> {count} -> {int(batch.target[0, i, 0])}"
