"""The layouts a batch of sequences comes in, turned into one (time first, padded) and back."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils._pytree import tree_map

from pondertime.cells import check_state
from pondertime.halting import State, in_transform


class Sequences(NamedTuple):
    """Input time first, and how to give results back in the layout it came in."""

    x: Tensor  # [T, B, I], or integers [T, B]
    state: State | None  # batch first
    lengths: Tensor | None  # [B] int64 on the CPU; None: all of length T
    unbatched: bool
    batch_first: bool
    packed: PackedSequence | None

    def per_step(self, a: Tensor, *, time: int = 0) -> Tensor:
        """Lay out a result whose axes ``time`` and ``time + 1`` are T and B."""
        if self.unbatched:
            return a.squeeze(time + 1)
        return a.transpose(time, time + 1) if self.batch_first else a

    def per_sequence(self, tree: State) -> State:
        """Lay out a result whose first axis is B."""
        return tree_map(lambda a: a.squeeze(0), tree) if self.unbatched else tree

    def output(self, a: Tensor) -> Tensor | PackedSequence:
        """Lay out the output, packed if the input was."""
        if self.packed is None:
            return self.per_step(a)
        _, batch_sizes, order, unsorted = self.packed
        a = a if order is None else a.index_select(1, order)
        data = torch.cat([a[t, :size] for t, size in enumerate(batch_sizes.tolist())])
        return PackedSequence(data, batch_sizes, order, unsorted)


def read(
    x: Tensor | PackedSequence,
    state: State | None,
    lengths: Tensor | Sequence[int] | None,
    *,
    batch_first: bool,
    features: int | None,
) -> Sequences:
    """Check the input of a network and lay it out time first.

    ``features``: the input size that the cell expects, None where it is not known.
    """
    packed = x if isinstance(x, PackedSequence) else None
    if packed is not None:
        if lengths is not None:
            raise ValueError("lengths: expected None with a PackedSequence, which holds its own")
        x, lengths = pad_packed_sequence(packed)
    if not isinstance(x, Tensor):
        raise TypeError(f"input: expected a Tensor or a PackedSequence, got {type(x).__name__}")
    integer = not x.is_floating_point()
    unbatched = check_rank(x, integer, packed is not None)
    if unbatched:
        if lengths is not None:
            raise ValueError("lengths: expected None with unbatched input")
        x = x.unsqueeze(1)
        state = None if state is None else tree_map(lambda a: a.unsqueeze(0), state)
    elif batch_first and packed is None:
        x = x.transpose(0, 1)
    if 0 in x.shape[:2]:
        raise ValueError(
            f"input: expected at least one sequence of at least one step, got T = {x.shape[0]}, B = {x.shape[1]}"
        )
    lengths = check_lengths(lengths, *x.shape[:2])
    if integer:
        check_integers(x, lengths, features)
    elif features is not None and x.shape[2] != features:
        raise ValueError(
            f"input: expected {features} features (the cell's input_size less the first-step flag), got {x.shape[2]}"
        )
    if state is not None:
        check_state(state, x.shape[1])
    return Sequences(x, state, lengths, unbatched, batch_first, packed)


def check_rank(x: Tensor, integer: bool, packed: bool) -> bool:
    """Raise unless the input has one axis more or less than it may; return whether it is unbatched."""
    batched = 2 if integer else 3
    if integer and x.dtype in (torch.bool, torch.complex64, torch.complex128):
        raise TypeError(f"input: expected floating-point or integer values, got {x.dtype}")
    if x.dim() == batched:
        return False
    if x.dim() == batched - 1 and not packed:
        return True
    axes = "2-D [T, B] or 1-D [T]" if integer else "3-D [T, B, I] or 2-D [T, I]"
    kind = "integer" if integer else "floating-point"
    raise ValueError(f"input: expected {kind} input to be {axes}, got {x.dim()}-D {list(x.shape)}")


def check_lengths(lengths: Any, T: int, B: int) -> Tensor | None:
    """Lengths as int64 ``[B]`` on the CPU, or None where every sequence has length T."""
    if lengths is None:
        return None
    lengths = torch.as_tensor(lengths, device="cpu")
    if lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise TypeError(f"lengths: expected integers, got {lengths.dtype}")
    if lengths.shape != (B,):
        raise ValueError(f"lengths: expected one for each of the {B} sequences, got shape {list(lengths.shape)}")
    low, high = int(lengths.min()), int(lengths.max())
    if low < 1 or high > T:
        raise ValueError(f"lengths: expected numbers from 1 to T = {T}, got {low} to {high}")
    return None if low == T else lengths.long().contiguous()


def check_integers(x: Tensor, lengths: Tensor | None, features: int | None) -> None:
    """Raise unless integers can be one-hot rows of ``features``. On a CPU only: it would stop a device."""
    if features is None:
        raise TypeError("input: expected floating-point input for a cell without an attribute input_size, got integers")
    if x.device.type != "cpu" or in_transform():
        return
    seen = x if lengths is None else x[torch.arange(len(x)).unsqueeze(1) < lengths]
    low, high = int(seen.min()), int(seen.max())
    if low < 0 or high >= features:
        raise ValueError(f"input: expected integers from 0 to {features - 1}, got {low} to {high}")
