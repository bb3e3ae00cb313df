"""The training data of many networks, packed, in rings on the device.

Batch i of a network is a function of (seed, worker, i), the length of a chunk and the type of the device: chunks are
drawn by the task's own code with a generator of their own, exactly as ``batches.Batches`` draws them, only longer.
Inputs must be 0 and 1 (or -1, 0 and 1) and are kept as bits.

On a GPU the calls that draw a chunk are recorded once and played again (a graph), on a stream of their own: where the
networks' programs leave a multiprocessor idle, it draws.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pondertime.batches import Batches
from pondertime.config import TrainConfig
from pondertime.tasks import Task

CHUNKS = 2  # of a ring


class Ring:
    """Packed chunks of every network: ``words [E, CHUNKS, T, R, W]``, ``target [E, CHUNKS, T, R]``,
    ``lengths [E, CHUNKS, R]`` (none where T is 1) with the R rows of a chunk, batch after batch."""

    def __init__(self, configs: list[TrainConfig], task: Task, device: str, *, signed: bool, per_chunk: int) -> None:
        self.task, self.signed, self.per_chunk = task, signed, per_chunk
        self.size = CHUNKS * per_chunk
        batch = configs[0].batch_size
        self.rows = per_chunk * batch
        self.stream = torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None
        self.recorded: Recorded | None = None
        self.data = [Batches(task, batch, c.seeds, 0, device) for c in configs]
        for data in self.data:
            data.per_chunk = per_chunk
        self.width = (task.input_size + 31) // 32
        shape = len(configs), CHUNKS, task.steps, per_chunk * batch
        self.words = torch.zeros(*shape, self.width * (2 if signed else 1), dtype=torch.int32, device=device)
        self.target = torch.zeros(shape, dtype=torch.int8, device=device)
        rows = shape[3] if task.steps > 1 else 0
        self.lengths = torch.zeros(shape[0], CHUNKS, rows, dtype=torch.int8, device=device)
        self.first = [0] * len(configs)  # the first chunk that has not been drawn
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.words.device))
            for a in (self.words, self.target, self.lengths):
                a.record_stream(self.stream)

    def start(self, iterations: list[int]) -> None:
        """Forget what was drawn; networks go on from these iterations."""
        self.first = [i // self.per_chunk for i in iterations]

    def filled(self) -> list[int]:
        """The batches that have been drawn, of each network."""
        return [number * self.per_chunk for number in self.first]

    def refill(self, iterations: list[int], until: int, ahead: int, going: Callable[[], bool] | None = None) -> None:
        """Draw the chunks that hold the next ``ahead`` batches before ``until``, as far as there is room for them.

        The most urgent come first. ``going``: asked before each; the rest is left where it says no.
        """
        due = []
        for e, i in enumerate(iterations):
            wanted = -(-min(until, i + ahead) // self.per_chunk)
            last = min(i // self.per_chunk + CHUNKS, wanted)
            due += [(number * self.per_chunk - i, e, number) for number in range(self.first[e], last)]
        for _, e, number in sorted(due):
            if going is not None and not going():
                return
            self.draw(e, number)
            self.first[e] = number + 1

    def draw(self, e: int, number: int) -> None:
        """Draw chunk ``number`` of network e to its place in the ring."""
        data, place = self.data[e], number % CHUNKS
        to = self.words[e, place], self.target[e, place], self.lengths[e, place]
        if self.stream is None:
            self.sample(data.generator(data.seeds[0], number), to)
            return
        with torch.cuda.stream(self.stream):
            if self.recorded is None:
                self.recorded = Recorded(self, to)
            self.recorded.play(data.key(data.seeds[0], number), to)

    def sample(self, generator: torch.Generator, to: tuple[Tensor, ...]) -> None:
        """Draw a chunk into packed words, targets and lengths."""
        from pondertime.ensemble.kernel_parts import pack

        words, target, lengths = to
        made = self.task.packed(self.rows, generator)
        if made is not None:
            words.copy_(made[0])
            target.copy_(made[1])
            return
        batch = self.task.sample(self.rows, generator)
        x = batch.input.contiguous()
        rows = x.shape[0] * x.shape[1]
        size = 16 if x.device.type == "cuda" else 1024
        start: Any = pack[(-(-rows // size),)]
        start(x, words, rows, self.task.input_size, self.width, self.signed, size)
        target.copy_(batch.target.squeeze(-1))
        if len(lengths):
            lengths.copy_(batch.lengths)

    def settle(self) -> None:
        """What comes after this on the current stream sees all that was drawn."""
        if self.stream is not None:
            torch.cuda.current_stream(self.words.device).wait_stream(self.stream)


class Recorded:
    """The calls that draw a chunk, recorded; the seed is set anew each time."""

    def __init__(self, ring: Ring, like: tuple[Tensor, ...]) -> None:
        self.generator, self.graph = torch.Generator(ring.words.device), torch.cuda.CUDAGraph()
        self.to = tuple(torch.empty_like(a) for a in like)
        ring.sample(self.generator, self.to)  # compiles, and makes what is made once
        self.graph.register_generator_state(self.generator)
        with torch.cuda.graph(self.graph, stream=ring.stream):
            ring.sample(self.generator, self.to)

    def play(self, seed: int, to: tuple[Tensor, ...]) -> None:
        self.generator.manual_seed(seed)
        self.graph.replay()
        for a, made in zip(to, self.to, strict=True):
            a.copy_(made)
