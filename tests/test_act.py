"""The contract of ``ACT``, ``trace`` and ``ponder``, held against what is known without them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import pondertime as pt
from compare import assert_same
from zoo import KINDS, make, make_cell, random_state


class Seen(nn.Module):
    """A cell that keeps what it was given."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.cell, self.inputs = input_size, nn.RNNCell(input_size, hidden_size), []

    def forward(self, x: Tensor, state: Tensor | None) -> Tensor:
        self.inputs.append(x.detach().clone())
        return self.cell(x, state)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def run_plain(cell: nn.Module, x: Tensor, state: Any, flags: list[float]) -> tuple[Tensor, Any]:
    """A cell of torch.nn over time, called once per flag at each input step: the visible states, the last state."""
    hidden = []
    for x_t in x:
        for flag in flags:
            state = cell(torch.cat([x_t, x_t.new_full((len(x_t), 1), flag)], 1), state)
        hidden.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(hidden), state


def test_state_dict_and_repr() -> None:
    net = pt.ACT(nn.LSTMCell(50 + 1, 128), 10)
    cell = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]
    halves = ["halt.weight", "halt.bias", "output.weight", "output.bias"]
    assert list(net.state_dict()) == [*(f"cell.{name}" for name in cell), *halves]
    assert net.halt.weight.shape == (1, 128) and net.halt.bias.tolist() == [1.0]
    assert repr(net).splitlines()[1].strip() == "epsilon=0.01, max_steps=100"
    changed = make("gru", epsilon=0.1, max_steps=7, force_steps=2, compact=False, batch_first=True, backend="reference")
    words = "epsilon=0.1, max_steps=7, force_steps=2, compact=False, batch_first=True, backend='reference'"
    assert changed.extra_repr() == words


def test_without_a_read_out() -> None:
    net = make("lstm", outputs=None)
    assert net.output is None and list(net.state_dict())[-2:] == ["halt.weight", "halt.bias"]
    with_one: Any = pt.ACT(net.cell, 4, dtype=torch.float64)
    with_one.halt.load_state_dict(net.halt.state_dict())
    with torch.no_grad():
        with_one.output.weight.copy_(torch.eye(4))
        with_one.output.bias.zero_()
    x = randn(3, 2, 3)
    assert_same(net(x).output, with_one(x).output)


def test_device_and_type_are_those_of_the_cell_or_as_asked() -> None:
    assert pt.ACT(nn.GRUCell(3, 4, dtype=torch.float64), 2).halt.weight.dtype == torch.float64
    moved = pt.ACT(nn.GRUCell(3, 4), 2, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in moved.parameters()} == {("meta", torch.bfloat16)}


def test_reset_parameters() -> None:
    net = make("lstm", halt_bias=2.5)
    before = copy.deepcopy(net.state_dict())
    net.reset_parameters()
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]) == (name == "halt.bias"), name
    assert net.halt.bias.item() == 2.5


def test_reset_parameters_of_a_cell_of_parts() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 4))

        def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            return self.both(torch.cat([x, state], 1))

    net = pt.ACT(Parts(), 2, spec=pt.CellSpec(initial_state=lambda _, batch: torch.zeros(batch, 4)))
    before = copy.deepcopy(net.state_dict())
    net.reset_parameters()
    assert [k for k, value in net.state_dict().items() if torch.equal(value, before[k])] == ["halt.bias"]


def test_a_backend_is_checked_when_it_is_set() -> None:
    net = make("lstm")
    with pytest.raises(ValueError, match=r"backend: expected one of 'auto', .*, got 'fusd'"):
        net.backend = "fusd"
    assert net.backend == "auto"


def test_the_flag_is_1_on_the_first_update_only(backend: str) -> None:
    cell = Seen(3, 4)
    net = pt.ACT(cell, 2, force_steps=3, backend=backend)
    x = torch.randn(2, 5, 2)
    net(x)
    assert_same([a[:, -1] for a in cell.inputs], [torch.full((5,), flag) for flag in [1.0, 0.0, 0.0] * 2])
    assert_same([a[:, :-1] for a in cell.inputs], [x[0]] * 3 + [x[1]] * 3)


@pytest.mark.parametrize("kind", KINDS[:4])
@pytest.mark.parametrize(("options", "k"), [({"max_steps": 1}, 1), ({"force_steps": 1}, 1), ({"force_steps": 4}, 4)])
def test_a_fixed_number_of_updates_is_the_plain_cell(kind: str, backend: str, options: Any, k: int) -> None:
    net = make(kind, backend=backend, **options)
    x, state = randn(5, 3, 3), random_state(kind, 3, 4)
    hidden, last = run_plain(net.cell, x, state, [1.0] + [0.0] * (k - 1))
    result = net(x, state)
    assert_same(result.output, hidden @ net.output.weight.T + net.output.bias)
    assert_same(result.state, last)
    assert_same(result.ponder[:2], (torch.full((5, 3), k), torch.ones(5, 3).double()))


def test_options_can_be_set_after_training(backend: str) -> None:
    net, x = make("gru", backend=backend), randn(4, 3, 3)
    for name, value in [("epsilon", 0.6), ("max_steps", 2), ("force_steps", 3), ("force_steps", None)]:
        setattr(net, name, value)
        options = {"epsilon": net.epsilon, "max_steps": net.max_steps, "force_steps": net.force_steps}
        fresh = make("gru", backend=backend, **options)
        fresh.load_state_dict(net.state_dict())
        assert_same(net(x), fresh(x))
    assert net(x).ponder.steps.max() == 2


@pytest.mark.parametrize("layout", ["time first", "batch first", "unbatched", "packed"])
def test_trace(layout: str, backend: str) -> None:
    net = make("lstm", batch_first=layout == "batch first", backend=backend)
    lengths = {"unbatched": [3], "packed": [3, 1, 2]}.get(layout, [3, 3, 3])
    x = randn(3, len(lengths), 3)
    given: Any = x
    if layout == "batch first":
        given = x.transpose(0, 1)
    elif layout == "unbatched":
        given = x[:, 0]
    elif layout == "packed":
        given = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
    trace = net.trace(given)
    assert_same(tuple(trace[:3]), tuple(net(given)))
    assert not any(a.requires_grad for a in (trace.h, trace.p, trace.visible, *trace.state, trace.ponder.cost))

    def time_first(a: Tensor) -> Tensor:
        if layout == "unbatched":
            return a.unsqueeze(2)
        return a.transpose(1, 2) if layout == "batch first" else a

    h, p, visible, steps = map(time_first, (trace.h, trace.p, trace.visible, trace.ponder.steps.unsqueeze(0)))
    remainder = time_first(trace.ponder.remainder.unsqueeze(0))
    n_max = int(steps.max())
    assert h.shape == p.shape == (n_max, 3, len(lengths)) and visible.shape == (*h.shape, 4)
    for b, length in enumerate(lengths):
        state = None
        for t in range(3):
            N, s, mean = int(steps[0, t, b]), state, (0.0, 0.0)
            assert (N > 0) == (t < length)
            for n in range(N):
                flagged = torch.cat([x[t, b : b + 1], x.new_full((1, 1), float(n == 0))], 1)
                s = net.cell(flagged, s)
                h_n = torch.sigmoid(s[0] @ net.halt.weight.T + net.halt.bias)[0, 0]
                p_n = h_n if n < N - 1 else remainder[0, t, b]
                assert_same((visible[n, t, b], h[n, t, b], p[n, t, b]), (s[0][0], h_n, p_n))
                mean = tuple(a + p_n * c for a, c in zip(mean, s, strict=True))
            state = mean if N else state
            assert not h[N:, t, b].any() and not p[N:, t, b].any() and not visible[N:, t, b].any()
            assert_same(p[:, t, b].sum(), torch.tensor(float(N > 0)).double())


def test_ponder_takes_any_tree() -> None:
    """x, state and output nested, x with a part that is no tensor; dense and compact, and by hand."""
    levels, B = torch.tensor([0.995, 0.5, 0.35, 0.2], dtype=torch.float64), 4

    def step(x: Any, state: Any, first: bool) -> tuple[Any, Any, Tensor]:
        assert x["name"] is None
        count, (total,) = state
        count, total = count + 1, total + x["in"][0]
        return (count, [total]), {"count": count, "square": (count**2,)}, x["h"]

    x = {"in": [randn(B, 3)], "h": levels, "name": None}
    state = (torch.zeros(B, dtype=torch.float64), [torch.zeros(B, 3, dtype=torch.float64)])
    dense, compact = (pt.ponder(step, x, state, max_steps=4, compact=c) for c in (False, True))
    assert_same(compact, dense)
    # p: [1], [.5, .5], [.35, .35, .3], [.2, .2, .2, .4]
    count = torch.tensor([1, 1.5, 1.95, 2.8], dtype=torch.float64)
    square = torch.tensor([1, 2.5, 0.35 + 4 * 0.35 + 9 * 0.3, 0.2 * 14 + 0.4 * 16], dtype=torch.float64)
    remainder = torch.tensor([1, 0.5, 0.3, 0.4], dtype=torch.float64)
    steps = torch.tensor([1, 2, 3, 4])
    assert_same(dense.state, (count, [count.unsqueeze(1) * x["in"][0]]))
    assert_same(dense.output, {"count": count, "square": (square,)})
    assert_same(tuple(dense.ponder), (steps, remainder, steps + remainder, steps + remainder))


@pytest.mark.parametrize("compact", [False, True])
def test_a_threshold_met_exactly_is_met(compact: bool) -> None:
    def step(x: Tensor, state: Tensor, first: bool) -> tuple[Tensor, Tensor, Tensor]:
        return state + 1, state, x

    x = torch.tensor([0.75, 0.375, 0.25])
    steps = pt.ponder(step, x, torch.zeros(3), epsilon=0.25, compact=compact).ponder.steps
    assert_same(steps, torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("compact", [False, True])
def test_what_a_halted_row_would_compute_does_not_matter(compact: bool) -> None:
    """Row 0 halts at update 2 of 3; the output of its third would be infinite."""

    def step(x: Tensor, state: Tensor, first: bool) -> tuple[Tensor, Tensor, Tensor]:
        state = state + 1
        return state, 1 / (x - state), (0.3 * (9 - x) / x * state).clamp(max=1)

    x = torch.tensor([3.0, 8.0], dtype=torch.float64, requires_grad=True)
    _, output, ponder = pt.ponder(step, x, torch.zeros(2).double(), max_steps=3, compact=compact)
    (gradient,) = torch.autograd.grad(output.sum(), x)
    assert_same(ponder.steps, torch.tensor([2, 3]))
    assert_same(output[0], torch.tensor(0.6 / 2 + 0.4 / 1, dtype=torch.float64))
    # y = h / (x - 1) + (1 - h) / (x - 2) with h = 2.7 / x - 0.3, at x = 3.
    assert_same(gradient[0], torch.tensor(-0.3 / 2 - 0.6 / 4 + 0.3 / 1 - 0.4 / 1, dtype=torch.float64))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("plain", [nn.RNN, nn.GRU, nn.LSTM])
def test_weights_of_plain_layers_and_back(plain: Any, bias: bool, batch_first: bool) -> None:
    options = {"nonlinearity": "relu"} if plain is nn.RNN else {}
    layer = plain(3, 4, bias=bias, batch_first=batch_first, dtype=torch.float64, **options)
    from_plain = {nn.RNN: pt.ACT.from_rnn, nn.GRU: pt.ACT.from_gru, nn.LSTM: pt.ACT.from_lstm}[plain]
    net: Any = from_plain(layer, force_steps=1)
    x = randn(5, 2, 3)
    expected, last = layer(x)
    output, state, _ = net(x)
    squeezed = tuple(a.squeeze(0) for a in last) if plain is nn.LSTM else last.squeeze(0)
    assert_same((output, state), (expected, squeezed))
    assert_same(net.to_rnn().state_dict(), layer.state_dict())
    # A flag that was trained is part of the plain layer's bias.
    nn.init.normal_(net.cell.weight_ih)
    assert_same(net.to_rnn()(x)[0], net(x).output)


def test_other_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected one layer in one direction .* num_layers=2"):
        pt.ACT.from_lstm(nn.LSTM(3, 4, num_layers=2))
    with pytest.raises(TypeError, match=r"expected an nn.RNNCell, nn.GRUCell or nn.LSTMCell, got MemoryCell"):
        make("memory").to_rnn()
    with pytest.raises(TypeError, match=r"expected an nn.RNN, nn.GRU or nn.LSTM, got LSTMCell"):
        pt.ACT.from_lstm(make_cell("lstm", 3, 4))  # type: ignore[bad-argument-type]


def test_a_read_out_that_is_no_module():
    """It may do anything, so it is called on every update."""
    torch.manual_seed(0)
    net: Any = pt.ACT(nn.LSTMCell(4, 8), None, halt_bias=-1.0)
    net.output = lambda v: (v * v).sum(-1, keepdim=True)
    assert net.resolve("cpu") == "compact"
    x = torch.randn(3, 5, 3)
    found = net(x).output
    net.backend = "reference"
    assert_same(found, net(x).output, torch.float32)
