"""Wikipedia: predict the next byte of a text."""

from pathlib import Path
from typing import Literal

import numpy as np
import torch

from pondertime import data
from pondertime.tasks.task import Batch, Task, at_least, integers


class Wikipedia(Task):
    """Predict every next byte of 500 consecutive bytes from a random place.

        input   T h e   c a
        target  h e   c a t

    501 bytes are read; the input is all but the last, the target all but the first. ``data``:
    ``"enwik8"``, ``"excerpt"`` (300 kB of it, shipped, for a first try) or the path of any other
    file. ``length``: the bytes of a sequence (500 in the paper). The last 5 % of a file, 5,000,000
    bytes of enwik8, are held out: only ``sample(..., split="held-out")`` reads them.

    The file is looked for when the first batch is drawn, and memory-mapped. No difficulty.
    """

    name = "wikipedia"
    cell = "lstm"
    hidden_size = 1500
    batch_size = 32

    def __init__(self, data: str | Path = "enwik8", length: int = 500) -> None:
        at_least(1, length=length)
        self.data = data
        self.input_size = 256
        self.output_size = 256
        self.steps = length

    def sample(
        self,
        batch_size: int,
        generator: torch.Generator,
        difficulty: int | None = None,
        *,
        split: Literal["train", "held-out"] = "train",
    ) -> Batch:
        self._check(difficulty)
        device, T, B = generator.device, self.steps, batch_size
        text = self.text(split)
        if len(text) <= T:
            raise ValueError(f"data: expected more than {T} bytes to {split} in {self.data}, got {len(text)}")
        starts = integers(0, len(text) - T - 1, [B], generator).cpu().numpy()
        windows = np.lib.stride_tricks.sliding_window_view(text, T + 1)[starts]
        symbols = torch.from_numpy(windows).to(device).t().long()
        return Batch(
            input=symbols[:-1],
            target=symbols[1:].unsqueeze(-1),
            mask=torch.ones(T, B, dtype=torch.bool, device=device),
            lengths=torch.full([B], T, device=device),
            difficulty=None,
        )

    def text(self, split: Literal["train", "held-out"] = "train") -> np.ndarray:
        """The bytes of one part of the file, memory-mapped."""
        if split not in ("train", "held-out"):
            raise ValueError(f"split: expected train or held-out, got {split!r}")
        path = data.find(self.data)
        size = path.stat().st_size
        text = np.memmap(path, np.uint8, mode="r") if size else np.empty(0, np.uint8)
        held_out = size // 20
        return text[: size - held_out] if split == "train" else text[size - held_out :]

    def input_labels(self, batch: Batch, i: int) -> list[str]:
        return [self.answer_label([x]) for x in batch.input[:, i].tolist()]

    def answer_label(self, classes: list[int]) -> str:
        """The character; a line break is ``↵``, a byte outside printable ASCII ``\\xe2``."""
        (x,) = classes
        return "↵" if x == ord("\n") else chr(x) if 32 <= x < 127 else f"\\x{x:02x}"

    def render(self, batch: Batch, i: int) -> str:
        """The text, the last target included."""
        symbols = [*batch.input[:, i].tolist(), int(batch.target[-1, i, 0])]
        return bytes(symbols).decode(errors="replace")
