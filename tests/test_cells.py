"""Cells that were not written for ACT: those of torchrecurrent, other protocols, and what a probe may touch."""

import copy
from typing import Any

import pytest
import torch
import torchrecurrent
from torch import Tensor, nn

import pondertime as pt
from compare import assert_same
from zoo import BatchNormCell, differentiate

H = 6
# These return (output, state), not the state that they take.
RETURN_OUTPUT = ["IntersectionRNNCell", "MCLSTMCell", "TLSTMCell"]
NAMES = sorted(n for n in dir(torchrecurrent) if n.endswith("Cell") and n not in RETURN_OUTPUT)


def zeros_after_output(cell: Any, batch_size: int) -> Any:
    """Zeros of what a cell that returns (output, state) returns."""
    with torch.no_grad():
        output, state = copy.deepcopy(cell)(cell.weight_ih.new_zeros(batch_size, cell.input_size))
    return torch.zeros_like(output), torch.utils._pytree.tree_map(torch.zeros_like, state)


RETURNS_OUTPUT = pt.CellSpec(step=lambda cell, x, state: cell(x, state[1]), initial_state=zeros_after_output)


@pytest.mark.parametrize("name", [*NAMES, *RETURN_OUTPUT])
def test_torchrecurrent(name: str) -> None:
    # The IntersectionRNN mixes input and state, so they have one size.
    size = H - 1 if name == "IntersectionRNNCell" else 4
    cell = getattr(torchrecurrent, name)(size + 1, H)
    spec = RETURNS_OUTPUT if name in RETURN_OUTPUT else None
    net = pt.ACT(cell, 2, spec=spec, max_steps=6, halt_bias=-1.0, dtype=torch.float64, backend="reference")
    with torch.no_grad():
        net.halt.weight.mul_(3)
    x = 2 * torch.randn(3, 4, size, dtype=torch.float64)
    reference = differentiate(net, x, None, [3, 1, 2, 3])
    net.backend = "compact"
    assert_same(differentiate(net, x, None, [3, 1, 2, 3]), reference)
    assert reference[0].ponder.steps.max() > 1


class Swapped(nn.Module):
    """A foreign protocol: the state comes first, the result is (logits, {"h", "c"})."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.inner = nn.LSTMCell(input_size, hidden_size)
        self.start = nn.Parameter(torch.randn(hidden_size))

    def forward(self, state: dict[str, Tensor], features: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        h, c = self.inner(features, (state["h"], state["c"]))
        return h.sum(1), {"h": h, "c": c}


def test_foreign_protocol(backend: str) -> None:
    """The same as the LSTM inside it, started from the state that the cell learns."""
    foreign = Swapped(4, 5)
    spec = pt.CellSpec(
        step=lambda cell, x, state: cell(state, x)[1],
        visible=lambda state: state["h"],
        initial_state=lambda cell, n: {"h": cell.start.expand(n, -1), "c": cell.start.new_zeros(n, 5)},
    )
    net = pt.ACT(foreign, 2, spec=spec, dtype=torch.float64, backend=backend)
    plain = pt.ACT(foreign.inner, 2, backend=backend)
    plain.halt, plain.output = net.halt, net.output
    x = torch.randn(3, 4, 3, dtype=torch.float64)
    output, state, ponder = net(x)
    start = foreign.start.expand(4, -1), torch.zeros(4, 5, dtype=torch.float64)
    assert_same((output, tuple(state.values()), ponder), tuple(plain(x, start)))
    (gradient,) = torch.autograd.grad(output.sum(), foreign.start)
    assert gradient.any()


def test_visible_may_be_any_function_of_the_state(backend: str) -> None:
    cell = nn.LSTMCell(4, 5, dtype=torch.float64)
    spec = pt.CellSpec(visible=lambda state: torch.cat(state, 1))
    net: Any = pt.ACT(cell, 2, spec=spec, force_steps=2, backend=backend)
    assert net.halt.weight.shape == (1, 10)
    x = torch.randn(1, 3, 3, dtype=torch.float64)
    first = cell(torch.cat([x[0], torch.ones(3, 1).double()], 1))
    h, c = cell(torch.cat([x[0], torch.zeros(3, 1).double()], 1), first)
    assert_same(net(x).output[0], torch.cat([h, c], 1) @ net.output.weight.T + net.output.bias)


def test_a_subclass_of_a_torch_cell_is_called_not_written_out() -> None:
    class Doubled(nn.GRUCell):
        def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
            return 2 * super().forward(input, hx)

    cell = Doubled(4, 5)
    net = pt.ACT(cell, None, max_steps=1, backend="reference")
    x = torch.randn(1, 3, 3)
    assert_same(net(x).output[0], cell(torch.cat([x[0], torch.ones(3, 1)], 1)))


def test_hooks_of_a_torch_cell_are_called(backend: str) -> None:
    cell = nn.GRUCell(4, 5)
    cell.register_forward_hook(lambda module, args, output: output * 0)
    assert not pt.ACT(cell, None, backend=backend)(torch.randn(2, 3, 3)).output.any()


class Noisy(BatchNormCell):
    """A cell that counts its calls and draws random numbers, even in evaluation."""

    def __init__(self) -> None:
        super().__init__(4, 5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, state: Tensor | None) -> Tensor:
        self.calls += 1
        return nn.functional.dropout(super().forward(x, state), 0.5, training=True)


def test_a_probe_leaves_no_trace() -> None:
    cell = Noisy().train()
    before = copy.deepcopy(cell.state_dict())
    torch.manual_seed(3)
    pt.ACT(cell, None, compact=False)
    after = torch.get_rng_state()
    assert_same(cell.state_dict(), before)
    assert cell.training and all(p.grad is None for p in cell.parameters())
    # What is left is the halting unit's own initialisation.
    torch.manual_seed(3)
    nn.Linear(5, 1)
    assert torch.equal(after, torch.get_rng_state())
