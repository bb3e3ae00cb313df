"""How the kernels are called: scratch memory, sizes of tiles, precision."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pondertime.ensemble.gpu import SLOTS, measure_every, padded
from pondertime.ensemble.lstm_kernel import train_lstm
from pondertime.ensemble.ring import CHUNKS
from pondertime.ensemble.rnn_kernel import train_rnn

TYPES: dict[str, tuple[torch.dtype, Any, str]] = {
    "bfloat16": (torch.bfloat16, tl.bfloat16, "ieee"),
    "tf32": (torch.float32, tl.float32, "tf32"),
    "float32": (torch.float32, tl.float32, "ieee"),
}


class RNNLaunch:
    """Launches ``train_rnn`` for a group."""

    programs = 1  # a multiprocessor
    overhead = 5  # the cost of an update besides its cell updates, in cell updates

    def __init__(self, group: Any, *, num_warps: int = 8, stages: int = 2, back: int = 2, adam: int = 1,
                 block: int = 4096) -> None:  # fmt: skip
        config, task = group.configs[0], group.task
        B, H, IN = config.batch_size, config.hidden_size, task.input_size
        BP, HP, IP = padded(B), padded(H), max(32, padded(IN))
        dtype, DT, ieee = TYPES[group.precision]
        slots, M, device = group.programs, config.max_steps, group.device
        self.scratch = (
            torch.empty(slots, group.stride, device=device),
            torch.empty(slots, M, BP, HP, dtype=dtype, device=device),
            torch.empty(slots, M, BP, HP, dtype=dtype, device=device),
            torch.empty(slots, M, 4, BP, device=device),
        )
        self.queue = torch.zeros(1, dtype=torch.int32, device=device)
        self.sizes = {
            "B": B,
            "H": H,
            "IN": IN,
            "BP": BP,
            "HP": HP,
            "IP": IP,
            "PS": group.stride,
            "KP": triton.next_power_of_2(group.K),
            "SLOTS": SLOTS,
            "DT": DT,
            "PRECISION": ieee,
            "FAST": group.precision == "bfloat16",
            "BLOCK": block,
            "STAGES": stages,
            "BACK": back,
            "ADAM": adam,
            "num_warps": num_warps,
        }

    def launch(self, group: Any, schedule: Tensor, networks: int, until: int) -> None:
        config, ring = group.configs[0], group.ring
        budgets, order, filled, taken = schedule
        iterations, cells, stopped, closed = group._counters
        self.queue.zero_()
        start: Any = train_rnn[(group.programs,)]
        start(
            *group._flat, group.settings, ring.words, ring.target, group._sums, group._intervals, group._interval_at,
            iterations, cells, stopped, closed, taken, filled, budgets, order, self.queue, *self.scratch,
            networks, until, 1 - config.epsilon, measure_every(config), config.log_every, self.overhead, ring.size,
            config.max_steps, group.K, **self.sizes,
        )  # fmt: skip


class LSTMLaunch:
    """Launches ``train_lstm`` for a group."""

    programs = 1
    overhead = 40

    def __init__(self, group: Any, *, num_warps: int = 8, stages: int = 2, back: int = 2, adam: int = 2,
                 block: int = 4096, rows: int = 64) -> None:  # fmt: skip
        config, task = group.configs[0], group.task
        T, B, H, IN = task.steps, config.batch_size, config.hidden_size, task.input_size
        # Two more inputs: the flag, and a constant whose weight is the bias.
        BP, HP, IP = padded(B), padded(H), max(32, padded(IN + 2))
        dtype, DT, ieee = TYPES[group.precision]
        slots, C, device = group.programs, T * config.max_steps, group.device
        self.max_cells = C
        self.scratch = (
            torch.empty(slots, group.stride, device=device),
            torch.empty(slots, C, BP, HP, dtype=dtype, device=device),
            torch.empty(slots, C, BP, HP, device=device),
            torch.empty(slots, C, 4, BP, HP, dtype=dtype, device=device),
            torch.empty(slots, T, 4, BP, HP, device=device),
            torch.empty(slots, C, 2, BP, device=device),
            torch.empty(slots, T, 4, BP, device=device),
        )
        self.queue = torch.zeros(1, dtype=torch.int32, device=device)
        self.sizes = {
            "T": T,
            "B": B,
            "H": H,
            "IN": IN,
            "BP": BP,
            "HP": HP,
            "IP": IP,
            "PS": group.stride,
            "KP": triton.next_power_of_2(group.K),
            "SLOTS": SLOTS,
            "DT": DT,
            "PRECISION": ieee,
            "FAST": group.precision == "bfloat16",
            "BLOCK": block,
            "STAGES": stages,
            "KB": rows,
            "BACK": back,
            "ADAM": adam,
            "num_warps": num_warps,
        }

    def launch(self, group: Any, schedule: Tensor, networks: int, until: int) -> None:
        config, ring = group.configs[0], group.ring
        budgets, order, filled, taken = schedule
        iterations, cells, stopped, closed = group._counters
        self.queue.zero_()
        start: Any = train_lstm[(group.programs,)]
        start(
            *group._flat, group.settings, ring.words, ring.target, ring.lengths, group._sums, group._intervals,
            group._interval_at, iterations, cells, stopped, closed, taken, filled, budgets, order, self.queue,
            *self.scratch, networks, until, 1 - config.epsilon, measure_every(config), config.log_every, self.overhead,
            ring.per_chunk, CHUNKS, self.max_cells, group.K, **self.sizes,
        )  # fmt: skip
