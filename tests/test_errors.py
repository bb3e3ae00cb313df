"""Bad input: each an error that names what was expected and what came, and none that loops."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import pack_padded_sequence

import pondertime as pt
from compare import assert_same
from zoo import make

F64 = torch.float64


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=F64)


# The network has 3 features and 4 hidden units; T = 5, B = 2 where nothing else is said.
INPUTS: list[tuple[Any, tuple[Any, ...], str]] = [
    ("feature size", (zeros(5, 2, 4),), r"input: expected 3 features .*, got 4"),
    ("feature size, unbatched", (zeros(5, 2),), r"input: expected 3 features .*, got 2"),
    ("rank 4", (zeros(5, 2, 3, 1),), r"floating-point input to be 3-D .* or 2-D .*, got 4-D \[5, 2, 3, 1\]"),
    ("rank 1", (zeros(5),), r"floating-point input to be 3-D .* or 2-D .*, got 1-D \[5\]"),
    ("rank of integers", (zeros(5, 2, 3).long(),), r"integer input to be 2-D .* or 1-D .*, got 3-D \[5, 2, 3\]"),
    ("no steps", (zeros(0, 2, 3),), r"at least one sequence of at least one step, got T = 0, B = 2"),
    ("no rows", (zeros(5, 0, 3),), r"at least one sequence of at least one step, got T = 5, B = 0"),
    ("no steps, unbatched", (zeros(0, 3),), r"at least one sequence of at least one step, got T = 0, B = 1"),
    ("too long", (zeros(5, 2, 3), None, [5, 6]), r"lengths: expected numbers from 1 to T = 5, got 5 to 6"),
    ("too short", (zeros(5, 2, 3), None, [0, 5]), r"lengths: expected numbers from 1 to T = 5, got 0 to 5"),
    ("too many", (zeros(5, 2, 3), None, [5, 5, 5]), r"lengths: expected one for each of the 2 .*, got shape \[3\]"),
    ("not a vector", (zeros(5, 2, 3), None, 5), r"lengths: expected one for each of the 2 sequences, got shape \[\]"),
    ("unbatched", (zeros(5, 3), None, [5]), r"lengths: expected None with unbatched input"),
    ("state size", (zeros(5, 2, 3), zeros(2, 7)), r"state: expected Tensor \[2, 4\], got Tensor \[2, 7\]"),
    ("state rows", (zeros(5, 2, 3), zeros(3, 4)), r"state: expected .* batch size B = 2, got Tensor \[3, 4\]"),
    ("state, unbatched", (zeros(5, 3), zeros(2, 4)), r"state: expected Tensor \[1, 4\], got Tensor \[1, 2, 4\]"),
    ("state structure", (zeros(5, 2, 3), (zeros(2, 4),)), r"state: expected Tensor \[2, 4\], got \(Tensor \[2, 4\]\)"),
    ("no state", (zeros(5, 2, 3), ()), r"state: expected tensors \[B, ...\] with batch size B = 2, got \(\)"),
    ("integer too large", (torch.tensor([[0, 3]]),), r"input: expected integers from 0 to 2, got 0 to 3"),
    ("integer below 0", (torch.tensor([[-1, 2]]),), r"input: expected integers from 0 to 2, got -1 to 2"),
    ("type", (torch.zeros(5, 2, 3),), r"input: expected the cell's type torch.float64, got torch.float32"),
]
TYPES: list[tuple[str, tuple[Any, ...], str]] = [
    ("booleans", (torch.zeros(5, 2, dtype=torch.bool),), r"floating-point or integer values, got torch.bool"),
    ("complex", (torch.zeros(5, 2, dtype=torch.complex64),), r"floating-point or integer values, got torch.complex64"),
    ("a list", ([[1.0]],), r"input: expected a Tensor or a PackedSequence, got list"),
    ("lengths that are floats", (zeros(5, 2, 3), None, [5.0, 5.0]), r"lengths: expected integers, got torch.float32"),
    ("a state of integers", (zeros(5, 2, 3), zeros(2, 4).long()), r"state: expected floating-point .* got torch.int64"),
    ("a state of numbers", (zeros(5, 2, 3), 1.0), r"state: expected floating-point tensors .* got float"),
]


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        *(pytest.param(ValueError, *case[1:], id=case[0]) for case in INPUTS),
        *(pytest.param(TypeError, *case[1:], id=case[0]) for case in TYPES),
    ],
)
def test_input(error: type[Exception], arguments: tuple[Any, ...], message: str, backend: str) -> None:
    net = make("gru", backend=backend)
    with pytest.raises(error, match=message):
        net(*arguments)
    with pytest.raises(error, match=message):
        net.trace(*arguments)


def test_lengths_with_a_packed_sequence() -> None:
    packed = pack_padded_sequence(zeros(5, 2, 3), torch.tensor([5, 4]))
    with pytest.raises(ValueError, match=r"lengths: expected None with a PackedSequence"):
        make("gru")(packed, None, [5, 4])


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("epsilon", 0.0, r"epsilon: expected a number between 0 and 1, got 0.0"),
        ("epsilon", 1, r"epsilon: expected a number between 0 and 1, got 1"),
        ("max_steps", 0, r"max_steps: expected a whole number of at least 1, got 0"),
        ("max_steps", 2.5, r"max_steps: expected a whole number of at least 1, got 2.5"),
        ("force_steps", 0, r"force_steps: expected a whole number of at least 1, got 0"),
        ("output_size", 0, r"output_size: expected a positive number or None, got 0"),
        ("backend", "fast", r"backend: expected one of 'auto', 'reference', 'compact'.*, got 'fast'"),
    ],
)
def test_options(option: str, value: Any, message: str) -> None:
    cell = nn.GRUCell(4, 4)
    options: dict[str, Any] = {"output_size": 1, option: value}
    with pytest.raises(ValueError, match=message):
        pt.ACT(cell, **options)
    if option in ("epsilon", "max_steps", "force_steps"):
        with pytest.raises(ValueError, match=message):
            setattr(pt.ACT(cell, 1), option, value)
    if option in ("epsilon", "max_steps"):
        with pytest.raises(ValueError, match=message):
            keywords: dict[str, Any] = {option: value}
            pt.ponder(lambda x, s, first: (s, s, s[:, 0]), zeros(2, 1), zeros(2, 1), **keywords)


class Misbehaving(nn.Module):
    """A cell that does as told from its second update on; counts its calls."""

    def __init__(self, fault: Any) -> None:
        super().__init__()
        self.input_size, self.fault, self.calls = 3, fault, 0

    def forward(self, x: Tensor, state: Any) -> Any:
        self.calls += 1
        state = x.new_zeros(len(x), 4) if state is None else state
        return self.fault(state) if self.calls == 2 else state


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (lambda s: s[:, :2], ValueError, r"changed .* state at update 2: expected Tensor \[5, 4\], got .* \[5, 2\]"),
        (lambda s: s[:2], ValueError, r"changed .* state at update 2: expected Tensor \[5, 4\], got Tensor \[2, 4\]"),
        (
            lambda s: (s, s),
            ValueError,
            r"changed .* at update 2: expected Tensor \[5, 4\], got \(Tensor .*, Tensor .*\)",
        ),
        (lambda s: [s], ValueError, r"changed .* at update 2: expected Tensor \[5, 4\], got \[Tensor \[5, 4\]\]"),
        (lambda s: s * float("nan"), RuntimeError, r"got NaN at input step 0, update 2 in 5 of the 5 rows"),
    ],
    ids=["size", "rows", "structure", "list", "nan"],
)
def test_a_cell_that_changes(fault: Any, error: type[Exception], message: str, backend: str) -> None:
    cell = Misbehaving(fault)
    cell.calls = 2  # while it is made
    net = pt.ACT(cell, 1, halt_bias=-10.0, backend=backend)
    cell.calls = 0
    with pytest.raises(error, match=message):
        net(torch.zeros(3, 5, 2))
    assert cell.calls == 2


def test_nan_says_where(backend: str) -> None:
    x = torch.zeros(4, 3, 3, dtype=F64)
    x[2, 1] = float("nan")
    with pytest.raises(
        RuntimeError, match=r"expected numbers from the cell, got NaN at input step 2, update 1 in 1 of"
    ):
        make("lstm", backend=backend)(x)


class Returns(nn.Module):
    """A cell that returns what a function makes of its input."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.input_size, self.function = 3, function

    def forward(self, x: Tensor, state: Any) -> Any:
        return self.function(x)


class OutputAndState(nn.Module):
    """A cell that also returns an output, as layers of torch.nn do."""

    input_size = 3

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        state = x if state is None else state.tanh()
        return state, state


def fail(x: Tensor) -> Tensor:
    raise KeyError("no such thing")


@pytest.mark.parametrize(
    ("cell", "error", "message"),
    [
        (fail, TypeError, r"cell: expected a torch.nn.Module, got function"),
        (
            nn.Linear(3, 3),
            TypeError,
            r"Linear: the size of its state is unknown; give the cell an attribute input_size",
        ),
        (nn.LSTM(3, 4), TypeError, r"cell: expected a cell such as nn.LSTMCell, got nn.LSTM; see ACT.from_rnn"),
        (Returns(lambda x: x[:1]), ValueError, r"state: expected tensors \[B, ...\] .* = 2, got Tensor \[1, 3\]"),
        (Returns(lambda x: x.long()), TypeError, r"state: expected floating-point tensors .*, got torch.int64"),
        (Returns(lambda x: {"a": x}), TypeError, r"visible: expected a state that is .*, got {'a': Tensor \[2, 3\]}"),
        (Returns(lambda x: x.unsqueeze(2)), ValueError, r"visible: expected a tensor \[B, V\], got shape \[2, 3, 1\]"),
        (
            Returns(fail),
            TypeError,
            r"Returns: expected a cell called as state = .* \[2, 3\], got KeyError: 'no such thing'",
        ),
        (
            OutputAndState(),
            TypeError,
            r"OutputAndState: expected .* then as state = cell\(input, state\), .* got AttributeError: 'tuple' object",
        ),
    ],
    ids=["no module", "unknown size", "a layer", "another batch size", "integers", "a dict", "3-D", "raises", "output"],
)
def test_cells(cell: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pt.ACT(cell, 1)


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (lambda x, s, first: (s, s, s), ValueError, r"h: expected .* \[B\] .*, got torch.float64 \[2, 1\]"),
        (lambda x, s, first: (s, s, s[:, 0].long()), ValueError, r"h: expected .*, got torch.int64 \[2\]"),
        (lambda x, s, first: (s[:0], s[:0], s[:0, 0]), ValueError, r"h: expected .* B >= 1, got torch.float64 \[0\]"),
        (lambda x, s, first: (s, s, s[:, 0] / 0), RuntimeError, r"got NaN at update 1 in 2 of the 2 rows"),
        (lambda x, s, first: ((s,), s, s[:, 0]), ValueError, r"at update 1: expected Tensor \[2, 1\], got \(Tensor"),
        (
            lambda x, s, first: (s, s, s[:, 0] + 3),
            ValueError,
            r"h: expected probabilities, .*, got numbers from 3 to 3",
        ),
        (lambda x, s, first: (s, s.long(), s[:, 0]), TypeError, r"output: expected floating-point .*, got torch.int64"),
        (
            lambda x, s, first: (s, s.sum(), s[:, 0]),
            ValueError,
            r"output: expected tensors \[B, ...\] .*, got Tensor \[\]",
        ),
    ],
    ids=["rank", "integers", "empty", "nan", "structure", "logits", "integer output", "scalar output"],
)
@pytest.mark.parametrize("compact", [False, True])
def test_ponder(step: Any, error: type[Exception], message: str, compact: bool) -> None:
    with pytest.raises(error, match=message):
        pt.ponder(step, zeros(2, 1), zeros(2, 1), compact=compact)


def test_ponder_drops_rows_of_what_has_rows() -> None:
    shared, step = (zeros(2, 1), zeros(3, 3)), lambda x, s, first: (s, s, s[:, 0])
    with pytest.raises(
        ValueError, match=r"x: with compact=True expected .* B = 2, got \(Tensor \[2, 1\], Tensor \[3, 3\]\)"
    ):
        pt.ponder(step, shared, zeros(2, 1), compact=True, max_steps=3)
    assert pt.ponder(step, shared, zeros(2, 1), max_steps=3).ponder.steps.tolist() == [3, 3]


@pytest.mark.parametrize("h", [[1.5, -1.0, 0.5], [0.5, -0.1]])
def test_a_halting_distribution_is_of_probabilities(h: list[float]) -> None:
    with pytest.raises(ValueError, match=r"h: expected probabilities, such as a sigmoid gives, got numbers from -"):
        pt.halting_distribution(torch.tensor(h))


H, B = 8, 4


@pytest.mark.parametrize("path", ["fused", "fused-calls", "reference", "compact"])
@pytest.mark.parametrize(
    ("cell", "state", "message"),
    [
        (
            nn.LSTMCell(6, H),
            lambda b: (zeros(b, H), zeros(b, 1)),
            r"state: expected .* got \(.* \[4, 8\], .* \[4, 1\]\)",
        ),
        (nn.LSTMCell(6, H), lambda b: (zeros(b, H), zeros(b, H).float()), r"state: expected the cell's type"),
        (nn.GRUCell(6, H), lambda b: zeros(b, 20), r"state: expected Tensor \[4, 8\], got Tensor \[4, 20\]"),
        (nn.GRUCell(6, H), lambda b: zeros(2, H), r"state: expected Tensor \[4, 8\], got Tensor \[2, 8\]"),
    ],
    ids=["c", "type", "width", "rows"],
)
def test_a_first_state_of_the_wrong_kind(cell: Any, state: Any, message: str, path: str) -> None:
    """Before anybody reads it by its address."""
    made = pt.CellSpec(initial_state=lambda _, b: state(b))
    net = pt.ACT(cell.double(), 2, spec=made, backend=path)
    with pytest.raises(ValueError, match=message):
        net(zeros(3, B, 5))


@pytest.mark.parametrize("path", ["fused", "fused-calls"])
@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        ("output", "weight", zeros(2, 4)), ("output", "weight", zeros(2, 9)), ("output", "bias", zeros(3)),
        ("halt", "weight", zeros(1, 4)), ("halt", "bias", zeros(1).float()), ("cell", "weight_ih", zeros(24, 9)),
        ("cell", "weight_ih", zeros(32, 9)), ("cell", "bias_hh", zeros(32).float()), ("cell", "bias_ih", zeros(31)),
        ("cell", "weight_hh", zeros(32, 9)),
    ],
)  # fmt: skip
def test_a_parameter_of_the_wrong_kind(module: str, name: str, value: Tensor, path: str) -> None:
    net = pt.ACT(nn.LSTMCell(6, H), 2, backend=path).double()
    setattr(getattr(net, module), name, nn.Parameter(value))
    with pytest.raises(ValueError, match=r"^\S+: expected \[.*\] torch.float64 on cpu beside cell.weight_hh, got \["):
        net(zeros(3, B, 5))


def test_a_torch_cell_with_a_step_of_its_own() -> None:
    """May have any state."""

    def step(cell: Any, x: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"h": cell(x, state["h"]), "m": state["m"] + state["h"].mean(1, keepdim=True)}

    spec = pt.CellSpec(step, lambda state: state["h"], lambda _, b: {"h": zeros(b, H), "m": zeros(b, 1)})
    net = pt.ACT(nn.GRUCell(6, H).double(), 2, spec=spec)
    output, state, _ = net(zeros(3, B, 5))
    assert output.shape == (3, B, 2) and state["m"].shape == (B, 1)
    assert net(zeros(3, B, 5), state).state["h"].shape == (B, H)
    with pytest.raises(ValueError, match=r"state: expected {'h': .* 'm': Tensor \[4, 1\]}, got Tensor"):
        net(zeros(3, B, 5), zeros(B, H))


def test_any_halting_unit() -> None:
    """One of several layers is served by the paths that call it."""
    net, x = pt.ACT(nn.LSTMCell(6, H), 2).double(), torch.randn(3, B, 5, dtype=F64)
    linear = net.halt
    net.halt = nn.Sequential(linear, nn.Identity())  # type: ignore[assignment]
    assert net.resolve("cpu") == "compact"
    found = tuple(net(x)), tuple(net(torch.tensor([[1, 2, 3, 4]])))
    net.halt = linear
    assert_same(found, (tuple(net(x)), tuple(net(torch.tensor([[1, 2, 3, 4]])))))
    net.halt = nn.Sequential(linear, nn.Identity())  # type: ignore[assignment]
    net.reset_parameters()


def test_probabilities_rounded() -> None:
    """Sums of shares may exceed 1 by a rounding; a trace sees no numbers."""
    h = torch.full((1, 3), 1.0, dtype=torch.bfloat16) + torch.finfo(torch.bfloat16).eps
    assert pt.halting_distribution(h).steps.tolist() == [1, 1, 1]
    traced = make_fx(lambda h: pt.halting_distribution(h).p)(torch.rand(3, 2))
    assert traced(torch.full((3, 2), 0.4)).shape == (3, 2)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own
def test_forward_mode() -> None:
    """Not by the fused path; else as the reference."""
    net, x = make("lstm"), torch.randn(2, 2, 3, dtype=F64)
    tangents = []
    with forward_ad.dual_level(), torch.no_grad():
        for net.backend in ("auto", "reference"):
            y = net(forward_ad.make_dual(x, torch.ones_like(x))).output
            tangents.append(forward_ad.unpack_dual(y).tangent)
        net.backend = "fused"
        with pytest.raises(RuntimeError, match=r"backend 'fused' cannot serve this call: it has no forward mode"):
            net(x)
    assert_same(tangents[0], tangents[1])
    net(x)


def test_what_a_backend_cannot_do_it_says() -> None:
    net = make("gru", backend="compact")
    with pytest.raises(RuntimeError, match=r"backend 'compact' .* torch.func transforms"):
        torch.func.grad(lambda x: net(x).output.sum())(zeros(2, 2, 3))
