"""What a cell is, and the protocols it may speak.

A cell is one step of a recurrent network, ``state = cell(input, state)``. Cells that do it
otherwise are described by a :class:`CellSpec`; nothing about a cell is guessed.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from pondertime.halting import State

Step = Callable[[Any, Tensor, State], State]


@dataclass(frozen=True)
class CellSpec:
    """How to use a cell that does not follow ``torch.nn``'s protocol; every part is optional.

    ``step(cell, x, state) -> state``: one update; by default ``cell(x, state)``.
    ``visible(state) -> [B, V]``: what the read-out and the halting unit see; by default the state
    itself, or the first of a tuple.
    ``initial_state(cell, batch_size) -> state``: by default zeros for the cells of ``torch.nn``, for
    others whatever they make of the state ``None``.
    """

    step: Step | None = None
    visible: Callable[[State], Tensor] | None = None
    initial_state: Callable[[Any, int], State] | None = None


class Network(Protocol):
    """What the backends need to know of an ACT network."""

    spec: CellSpec
    halt: nn.Linear
    output: nn.Linear | None

    @property
    def cell(self) -> Any: ...
    @property
    def epsilon(self) -> float: ...
    @property
    def max_steps(self) -> int: ...
    @property
    def force_steps(self) -> int | None: ...


def rnn_step(cell: Any, x: Tensor, h: Tensor) -> Tensor:
    """h' = tanh(W_x x + b_x + W_h h + b_h), or relu for tanh."""
    gates = F.linear(x, cell.weight_ih, cell.bias_ih) + F.linear(h, cell.weight_hh, cell.bias_hh)
    return torch.tanh(gates) if cell.nonlinearity == "tanh" else torch.relu(gates)


def gru_step(cell: Any, x: Tensor, h: Tensor) -> Tensor:
    """h' = (1 - z) n + z h, where n = tanh(W_n x + b + r (U_n h + b))."""
    x_r, x_z, x_n = F.linear(x, cell.weight_ih, cell.bias_ih).chunk(3, -1)
    h_r, h_z, h_n = F.linear(h, cell.weight_hh, cell.bias_hh).chunk(3, -1)
    r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
    n = torch.tanh(x_n + r * h_n)
    return (1 - z) * n + z * h


def lstm_step(cell: Any, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """c' = f c + i g, h' = o tanh(c')."""
    h, c = state
    gates = F.linear(x, cell.weight_ih, cell.bias_ih) + F.linear(h, cell.weight_hh, cell.bias_hh)
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


# The cells of torch.nn written out: vmap has no rule for aten::lstm_cell.
WRITTEN_OUT: dict[type[nn.Module], Step] = {
    nn.RNNCell: rnn_step,
    nn.GRUCell: gru_step,
    nn.LSTMCell: lstm_step,
}


def is_torch_cell(cell: nn.Module) -> bool:
    """Whether a cell is one of ``torch.nn`` itself; a subclass may compute anything."""
    return type(cell) in WRITTEN_OUT


def modules_of(net: Any) -> tuple[Any, Any, Any]:
    """Cell, halting unit and read-out of a network, without torch's look elsewhere."""
    modules, own = net._modules, net.__dict__
    # What is no module, such as None, is an attribute like any other.
    return modules["cell"], modules["halt"], own["output"] if "output" in own else modules["output"]


def parameter(module: nn.Module, name: str) -> Any:
    """A parameter of a module, without torch's look elsewhere: a call asks for some twenty."""
    found = module._parameters.get(name)
    return getattr(module, name) if found is None else found


def hooked(module: nn.Module) -> bool:
    """Whether somebody listens to the calls of a module, which must then be called."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    return bool(before or after or module._backward_hooks or module._backward_pre_hooks)


def call_cell(cell: Any, x: Tensor, state: State) -> State:
    return cell(x, state)


def step_function(cell: nn.Module, spec: CellSpec, *, written_out: bool = False) -> Step:
    """The function ``(cell, x, state) -> state`` that makes one update."""
    if spec.step is not None:
        return spec.step
    if written_out and is_torch_cell(cell) and not hooked(cell):
        return WRITTEN_OUT[type(cell)]
    return call_cell


def visible_state(state: State, spec: CellSpec) -> Tensor:
    """What the read-out and the halting unit see of a state, ``[B, V]``."""
    if spec.visible is not None:
        seen = spec.visible(state)
    elif isinstance(state, (tuple, list)) and state:
        seen = state[0]
    else:
        seen = state
    if not isinstance(seen, Tensor):
        raise TypeError(
            "visible: expected a state that is a tensor or starts with one, got "
            f"{describe(state)}; name the visible part: CellSpec(visible=lambda state: ...)"
        )
    if seen.dim() != 2:
        raise ValueError(f"visible: expected a tensor [B, V], got shape {list(seen.shape)}")
    return seen


def like_of(cell: nn.Module) -> Tensor:
    """A tensor with the device and the floating type of a cell."""
    for p in cell.parameters():
        if p.is_floating_point():
            return p.detach()
    return torch.empty(0)


def initial_state(cell: Any, spec: CellSpec, batch_size: int) -> State:
    """The state before the first input step; None leaves it to the cell."""
    if spec.initial_state is not None:
        return spec.initial_state(cell, batch_size)
    if not is_torch_cell(cell):
        return None
    zeros = cell.weight_hh.detach().new_zeros(batch_size, cell.hidden_size)
    return (zeros, zeros) if isinstance(cell, nn.LSTMCell) else zeros


def visible_size(cell: nn.Module, spec: CellSpec) -> int:
    """The size of the visible state, found by a probe that leaves the cell as it was."""
    state = initial_state(cell, spec, 2)
    if state is None:
        size = getattr(cell, "input_size", None)
        if not isinstance(size, int):
            raise TypeError(
                f"{type(cell).__name__}: the size of its state is unknown; give the cell an attribute "
                "input_size, or name its first state: CellSpec(initial_state=lambda cell, batch_size: ...)"
            )
        probe, x = copy.deepcopy(cell).eval(), like_of(cell).new_zeros(2, size)
        state = probed(probe, spec, x, None)
        check_state(state, 2)
        probed(probe, spec, x, state)
    check_state(state, 2)
    return visible_state(state, spec).shape[1]


def probed(cell: nn.Module, spec: CellSpec, x: Tensor, state: State) -> State:
    """The state after an update, which must have that before it in its shape."""
    try:
        with torch.no_grad():
            new = step_function(cell, spec)(cell, x, state)
        if state is not None:
            check_update(state, new, 2)
    except Exception as error:
        raise TypeError(
            f"{type(cell).__name__}: expected a cell called as state = cell(input, None), then as state = "
            f"cell(input, state), on an input {list(x.shape)}, got {type(error).__name__}: {error}; "
            "describe another protocol with CellSpec(step=..., initial_state=...)"
        ) from error
    return new


def describe(state: State) -> str:
    """A state's structure in a few words: ``(Tensor [3, 5], Tensor [3, 5])``."""
    if isinstance(state, Tensor):
        return f"Tensor {list(state.shape)}"
    if isinstance(state, dict):
        return "{" + ", ".join(f"{k!r}: {describe(v)}" for k, v in state.items()) + "}"
    if isinstance(state, list):
        return "[" + ", ".join(map(describe, state)) + "]"
    if isinstance(state, tuple):
        return "(" + ", ".join(map(describe, state)) + ")"
    return type(state).__name__


def check_state(state: State, batch_size: int, what: str = "state") -> None:
    """Raise unless every leaf is a floating tensor with the batch first; ``what`` opens the message."""
    leaves = tree_leaves(state)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            kind = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(f"{what}: expected floating-point tensors (ACT takes their mean), got {kind}")
    if not leaves or any(leaf.dim() == 0 or len(leaf) != batch_size for leaf in leaves):
        raise ValueError(f"{what}: expected tensors [B, ...] with batch size B = {batch_size}, got {describe(state)}")


def check_same(before: State, after: State, what: str) -> None:
    """Raise unless two states have the same structure and shapes; ``what`` opens the message."""
    (a, spec_a), (b, spec_b) = tree_flatten(before), tree_flatten(after)
    if spec_a != spec_b or any(u.shape != v.shape for u, v in zip(a, b, strict=True)):
        raise ValueError(f"{what}: expected {describe(before)}, got {describe(after)}")


def check_update(before: State, after: State, n: int) -> None:
    """Raise if update n changed the structure or the shapes of the state."""
    check_same(before, after, f"the cell changed the shape or structure of its state at update {n}")
