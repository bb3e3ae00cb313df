"""The least time that a call could take on a GPU: by its operations and by the bytes it must move.

``fused/README.md`` derives the counts. No call comes near them while its networks are small: what an update waits for
is the update before it.
"""

from typing import NamedTuple

from pondertime.bench import Workload


class Peak(NamedTuple):
    """What a device can do in a second, by its datasheet."""

    operations: dict[str, float]  # by precision; a multiply-add is two
    bytes: float
    on_chip: int  # bytes of shared memory, of all multiprocessors


# The tensor cores' rates without sparsity; a float32 product is three of TF32.
PEAKS = {
    "H200": Peak({"float32": 495e12 / 3, "tf32": 495e12, "bfloat16": 990e12}, 4.8e12, 132 * 227 * 1024),
    "H100": Peak({"float32": 495e12 / 3, "tf32": 495e12, "bfloat16": 990e12}, 3.35e12, 132 * 227 * 1024),
}


class Floor(NamedTuple):
    """What a call must do."""

    multiply_adds: float
    bytes: float

    def seconds(self, peak: Peak, precision: str) -> float:
        return max(2 * self.multiply_adds / peak.operations[precision], self.bytes / peak.bytes)


def floor(w: Workload, B: int, precision: str, peak: Peak, *, train: bool) -> Floor:
    """The multiply-adds and bytes of k updates an input step of B rows, and in training of the way back."""
    H, updates = w.hidden_size, w.steps * w.updates
    states, gates = (1, 1) if w.cell == "rnn" else (2, 4)
    P = gates * H
    recurrent, once = P * H, P * (w.input_size + 1) + w.output_size * H
    size = 2 if precision == "bfloat16" else 4
    # The weights of an update are read anew where no multiprocessor can keep them.
    passes = 1 if recurrent * size <= peak.on_chip else updates
    multiply_adds = updates * B * recurrent + w.steps * B * once
    moved = size * (passes * recurrent + once) + 4 * w.steps * B * (w.input_size + w.output_size)
    if train:
        # By the states and by the weights; x wants no derivative, the read-out's input does.
        multiply_adds += 2 * updates * B * recurrent + w.steps * B * (once + w.output_size * H)
        tape = 4 * updates * B * (states * H + P)
        moved += size * passes * recurrent + 4 * (recurrent + once) + 2 * tape
    return Floor(multiply_adds, moved)


def peak_of(device_name: str) -> Peak | None:
    """The datasheet of a device, where we know it."""
    return next((peak for name, peak in PEAKS.items() if name in device_name), None)
