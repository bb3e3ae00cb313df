"""How the kernels are called: scratch memory, sizes of tiles, precision."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pondertime.batches import measure_every
from pondertime.ensemble.gpu import SLOTS
from pondertime.ensemble.lstm_kernel import train_lstm
from pondertime.ensemble.ring import CHUNKS
from pondertime.ensemble.rnn_kernel import train_rnn
from pondertime.fused.common import padded

TYPES: dict[str, tuple[torch.dtype, Any, str]] = {
    "bfloat16": (torch.bfloat16, tl.bfloat16, "ieee"),
    "tf32": (torch.float32, tl.float32, "tf32"),
    "float32": (torch.float32, tl.float32, "ieee"),
}


class Launch:
    """Launches a kernel that trains the networks of a group; its arguments are in the order of both kernels."""

    kernel: Any
    overhead: int  # the cost of an update besides its cell updates, in cell updates
    scratch: tuple[Tensor, ...]

    def __init__(self, group: Any, inputs: int, **options: Any) -> None:
        config, task = group.configs[0], group.task
        B, H = config.batch_size, config.hidden_size
        self.dtype, DT, ieee = TYPES[group.precision]
        self.queue = torch.zeros(1, dtype=torch.int32, device=group.device)
        self.sizes: dict[str, Any] = {
            "B": B,
            "H": H,
            "IN": task.input_size,
            "BP": padded(B),
            "HP": padded(H),
            "IP": max(32, padded(inputs)),
            "PS": group.stride,
            "KP": triton.next_power_of_2(group.K),
            "SLOTS": SLOTS,
            "DT": DT,
            "PRECISION": ieee,
            "FAST": group.precision == "bfloat16",
            **options,
        }

    def data(self, ring: Any) -> tuple[Tensor, ...]:
        """The batches."""
        return ring.words, ring.target

    def ends(self, group: Any) -> tuple[int, ...]:
        """How long the ring and the scratch memory are."""
        raise NotImplementedError

    def launch(self, group: Any, schedule: Tensor, networks: int, until: int) -> None:
        config = group.configs[0]
        budgets, order, filled, taken = schedule
        self.queue.zero_()
        start: Any = self.kernel[(group.programs,)]
        start(
            *group._flat, group.settings, *self.data(group.ring), group._sums, group._intervals, group._interval_at,
            *group._counters, taken, filled, budgets, order, self.queue, *self.scratch,
            networks, until, 1 - config.epsilon, measure_every(config), config.log_every, self.overhead,
            *self.ends(group), group.K, **self.sizes,
        )  # fmt: skip


class RNNLaunch(Launch):
    """Launches ``train_rnn`` for a group."""

    kernel = train_rnn
    overhead = 5

    def __init__(self, group: Any) -> None:
        super().__init__(group, group.task.input_size, BLOCK=4096, STAGES=2, BACK=2, ADAM=1, num_warps=8)
        slots, M, device = group.programs, group.configs[0].max_steps, group.device
        BP, HP = self.sizes["BP"], self.sizes["HP"]
        self.scratch = (
            torch.empty(slots, group.stride, device=device),
            torch.empty(slots, M, BP, HP, dtype=self.dtype, device=device),
            torch.empty(slots, M, BP, HP, dtype=self.dtype, device=device),
            torch.empty(slots, M, 4, BP, device=device),
        )

    def ends(self, group: Any) -> tuple[int, ...]:
        return group.ring.size, group.configs[0].max_steps


class LSTMLaunch(Launch):
    """Launches ``train_lstm`` for a group."""

    kernel = train_lstm
    overhead = 40
    rows = 64  # of the tape that are multiplied at once

    def __init__(self, group: Any) -> None:
        T, device = group.task.steps, group.device
        options = {"BLOCK": 4096, "STAGES": 2, "KB": self.rows, "BACK": 2, "ADAM": 2, "num_warps": 8}
        # Two more inputs: the flag, and a constant whose weight is the bias.
        super().__init__(group, group.task.input_size + 2, T=T, **options)
        slots, self.max_cells = group.programs, T * group.configs[0].max_steps
        C, BP, HP, IP = self.max_cells, *(self.sizes[name] for name in ("BP", "HP", "IP"))
        rows = -(-T * BP // self.rows) * self.rows
        self.scratch = (
            torch.empty(slots, group.stride, device=device),
            torch.empty(slots, group.stride, dtype=self.dtype, device=device),
            torch.empty(slots, C, BP, HP, dtype=self.dtype, device=device),
            torch.empty(slots, C, BP, HP, device=device),
            torch.empty(slots, C, 4, BP, HP, dtype=self.dtype, device=device),
            torch.empty(slots, rows, IP, dtype=self.dtype, device=device),
            torch.empty(slots, T, 4, BP, HP, device=device),
            torch.empty(slots, T, 4, BP, HP, dtype=self.dtype, device=device),
            torch.empty(slots, C, BP, device=device),
            torch.empty(slots, T, 4, BP, device=device),
        )

    def data(self, ring: Any) -> tuple[Tensor, ...]:
        return ring.words, ring.target, ring.lengths

    def ends(self, group: Any) -> tuple[int, ...]:
        return group.ring.per_chunk, CHUNKS, self.max_cells
