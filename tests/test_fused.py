"""The fused paths, in C and in plain calls, against the reference: values, N, R and every gradient.

N jumps with rounding: in float32 h is kept away from 1 - epsilon, and flips are counted.
"""

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pondertime as pt
from compare import assert_same
from pondertime.fused import function, native
from pondertime.fused.buffers import Pool
from zoo import differentiate, make, random_state

KINDS = ["rnn_tanh", "rnn_relu", "gru", "lstm"]
PATHS = ["fused", "fused-calls"]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    if request.param == "fused" and isinstance(native.library(), str):
        pytest.skip(f"no C loop: {native.library()}")
    return request.param


def everything(net: pt.ACT, backend: str, x: Tensor, state: Any, lengths: Tensor | None) -> tuple[Any, Any]:
    """All values and gradients of a network by one backend."""
    net.backend = backend
    result, gradients = differentiate(net, x, state, lengths)
    return (result.output, result.state, *result.ponder), gradients


def assert_equals_reference(net: pt.ACT, path: str, x: Tensor, state: Any, lengths: Tensor | None) -> None:
    """Assert equality to the tolerance of the network's type; gradients come from a poisoned tape."""
    expected = everything(net, "reference", x, state, lengths)
    dtype = net.halt.weight.dtype
    assert_same(everything(net, path, x, state, lengths), expected, dtype)
    with torch.no_grad():
        assert_same(net(x, state, lengths).output, expected[0][0], dtype)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh buffers are full of NaN, so that one left unwritten shows."""

    def poisoning(make: Any) -> Any:
        def filled(*args: Any, **options: Any) -> Tensor:
            a = make(*args, **options)
            return a.fill_(float("nan")) if a.is_floating_point() else a.fill_(-(2**30))

        return filled

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))
    monkeypatch.setattr("pondertime.fused.function._rows", {})
    monkeypatch.setattr("pondertime.fused.buffers.pool", Pool())


@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_equals_reference_on_any_shape(kind: str, data: st.DataObject) -> None:
    T, B, inputs, H = (data.draw(st.integers(1, high), label) for label, high in zip("TBIH", (5, 7, 4, 9), strict=True))
    net = make(
        kind,
        inputs,
        H,
        max_steps=data.draw(st.sampled_from([1, 2, 4, 30]), "M"),
        epsilon=data.draw(st.sampled_from([0.01, 0.2]), "epsilon"),
        halt_bias=data.draw(st.floats(-4, 4), "bias"),
        force_steps=data.draw(st.sampled_from([None, None, 1, 3]), "force"),
    )
    x = torch.randn(T, B, inputs, dtype=torch.float64)
    lengths = data.draw(st.none() | st.lists(st.integers(1, T), min_size=B, max_size=B), "lengths")
    for path in PATHS:
        assert_equals_reference(
            net, path, x, random_state(kind, B, H), None if lengths is None else torch.tensor(lengths)
        )


@pytest.mark.parametrize("kind", KINDS)
def test_equals_reference_in_float32(kind: str, path: str) -> None:
    H, B = 37, 11
    net = make(kind, 5, H, max_steps=9).float()
    state = random_state(kind, B, H)
    state = tuple(s.float() for s in state) if kind == "lstm" else state.float()
    x = torch.randn(6, B, 5)
    trace = net.trace(x, state)
    margin = (trace.h.cumsum(0) - (1 - net.epsilon)).abs().min()
    assert margin > 1e-5 and len(trace.ponder.steps.unique()) > 1
    assert_equals_reference(net, path, x, state, torch.tensor([6, 1, 2, 3, 4, 5, 6, 6, 2, 1, 6]))


def test_flips_are_rare_in_float32(path: str) -> None:
    """Without a margin rounding may flip N in a few of a thousand steps, never in many."""
    torch.manual_seed(1)
    net = pt.ACT(nn.LSTMCell(9, 32), None, halt_bias=-1.5)
    x = torch.randn(20, 64, 8)
    net.backend = "reference"
    expected = net(x).ponder.steps
    net.backend = path
    assert (net(x).ponder.steps != expected).sum() <= 2


@pytest.mark.parametrize("kind", KINDS)
def test_integers_padding_and_cells_without_bias(kind: str, path: str) -> None:
    cells: dict[str, Any] = {"gru": nn.GRUCell, "lstm": nn.LSTMCell}
    cell = cells.get(kind, nn.RNNCell)(6, 8, bias=False)
    net = pt.ACT(cell.double(), 3, halt_bias=-1)
    x = torch.randint(0, 5, (4, 3), dtype=torch.int16)
    x[2:, 1] = -100
    lengths = torch.tensor([4, 2, 3])
    assert_equals_reference(net, path, x, random_state(kind, 3, 8), lengths)


@pytest.mark.parametrize("kind", KINDS)
def test_trace_is_the_reference_s(kind: str, path: str) -> None:
    net = make(kind)
    x, lengths = torch.randn(4, 5, 3, dtype=torch.float64), torch.tensor([1, 4, 3, 2, 4])
    net.backend = "reference"
    expected = net.trace(x, lengths=lengths)
    net.backend = path
    assert_same(tuple(net.trace(x, lengths=lengths)), tuple(expected), torch.float64)


def test_the_tape_grows(path: str) -> None:
    """N far above the first guess of the tape's size."""
    net = make("lstm", 3, 4, halt_bias=-6, max_steps=60)
    x = torch.randn(3, 5, 3, dtype=torch.float64)
    assert_equals_reference(net, path, x, random_state("lstm", 5, 4), None)
    assert net(x).ponder.steps.max() == 60


@pytest.mark.parametrize("outputs", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_what_nobody_differentiates_is_freed_at_once(
    kind: str, outputs: int | None, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    make_run = function.make_run

    def watched(*args: Any, **options: Any) -> Any:
        run = make_run(*args, **options)
        made.append(weakref.ref(run))
        return run

    monkeypatch.setattr(function, "make_run", watched)
    net = make(kind, outputs=outputs, backend=path)
    gc.disable()
    try:
        result = net(torch.randn(3, 4, 3, dtype=torch.float64))
        assert made[0]() is not None
        del result
        assert made[0]() is None
        differentiate(net, torch.randn(3, 4, 3, dtype=torch.float64), None, None)
        assert all(run() is None for run in made)
    finally:
        gc.enable()


def test_once_differentiable_and_says_so(path: str) -> None:
    net = make("lstm", backend=path)
    x = torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(net(x).output.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        g.sum().backward()


def test_a_kept_graph_can_be_gone_through_again(path: str) -> None:
    net = make("lstm", backend=path)
    x = torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True)
    result = net(x)
    first = torch.autograd.grad(result.output.sum(), x, retain_graph=True)
    torch.autograd.grad(result.ponder.cost.sum(), x, retain_graph=True)
    assert_same(torch.autograd.grad(result.output.sum(), x), first)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_share_no_memory(kind: str, path: str) -> None:
    """Adding a second gradient in place, as .backward() does, and scaling all of them."""
    x = torch.randn(3, 4, 3, dtype=torch.float64)
    grads = []
    for backend in ("reference", path):
        torch.manual_seed(0)
        net = make(kind, backend=backend)
        for _ in range(2):
            net(x).output.pow(2).sum().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        grads.append([p.grad for p in net.parameters()])
    assert_same(grads[1], grads[0], torch.float64)


@pytest.mark.parametrize("outputs", [None, 2])
def test_results_belong_to_the_caller(outputs: int | None, path: str) -> None:
    """What a network returned may be changed in place; its gradients do not notice."""
    net = make("lstm", outputs=outputs, backend=path)
    x = torch.randn(3, 4, 3, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(net(x).output.sum(), x)
    result = net(x)
    loss = result.output.sum()
    result.ponder.steps.add_(1000)
    result.output.relu_()
    for leaf in (*result.state, result.ponder.rho):
        leaf.add_(1)
    for leaf in net(x).state:
        leaf.detach_()
    assert_same(torch.autograd.grad(loss, x), expected, torch.float64)


def test_a_halted_relu_row_does_not_overflow(path: str) -> None:
    cell = nn.RNNCell(2, 1, bias=False, nonlinearity="relu")
    net = pt.ACT(cell, None, halt_bias=-3.0, backend=path)
    with torch.no_grad():
        cell.weight_ih.copy_(torch.tensor([[1.0, 0.0]]))
        cell.weight_hh.fill_(500)
        net.halt.weight.fill_(10)
    result = net(torch.tensor([1.0] + [0.0] * 9).view(1, 10, 1))
    assert result.ponder.steps.tolist() == [[1] + [21] * 9]
    result.output.sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)


def test_types_are_not_mixed(path: str) -> None:
    net = pt.ACT(nn.LSTMCell(4, 5), None, backend=path)
    x, h = torch.randn(2, 3, 3), torch.zeros(3, 5)
    with pytest.raises(ValueError, match="state: expected the cell's type"):
        net(x, (h, h.double()))
    net.halt.double()
    with pytest.raises(RuntimeError, match="one type"):
        net(torch.zeros(2, 3, dtype=torch.int64))


def test_another_read_out_is_taken_of_every_update() -> None:
    net = make("gru")
    net.output = nn.Sequential(nn.Linear(4, 2, dtype=torch.float64), nn.Softmax(-1))
    x = torch.randn(3, 4, 3, dtype=torch.float64)
    assert net.resolve("cpu") == "compact"
    expected = net(x).output
    net.backend = "reference"
    assert_same(net(x).output, expected, torch.float64)


def test_nan_is_an_error(path: str) -> None:
    net = make("gru", backend=path)
    x = torch.randn(3, 2, 3, dtype=torch.float64)
    x[1, 1, 0] = float("nan")
    with pytest.raises(RuntimeError, match="NaN at input step 1, update 1"):
        net(x)


def test_auto_chooses_by_what_can_serve() -> None:
    lstm = pt.ACT(nn.LSTMCell(4, 5), 1)
    assert lstm.resolve("cpu") == "fused"
    assert lstm.to(torch.bfloat16).resolve("cpu") == "compact"
    assert lstm.to(torch.float32).resolve("meta") == "reference"
    with torch.autocast("cpu"):
        assert lstm.resolve("cpu") == "compact"
    lstm.cell.register_forward_hook(lambda *_: None)
    assert lstm.resolve("cpu") == "compact"
    lstm.backend = "fused"
    with pytest.raises(RuntimeError, match="'fused' cannot serve this call: it calls neither the hooks"):
        lstm(torch.randn(2, 2, 3))


@pytest.mark.parametrize("missing", ["compiler", "home"])
def test_falls_back_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    """Without a compiler, or a place for what it builds, the fused path is made of plain calls."""

    def no_home() -> None:
        raise RuntimeError("Could not determine home directory.")

    net = make("lstm", backend="fused")
    x = torch.randn(2, 2, 3, dtype=torch.float64)
    expected = net(x).output
    native.library.cache_clear()
    if missing == "compiler":
        monkeypatch.setattr(native.shutil, "which", lambda _: None)
    else:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(native.Path, "home", no_home)
    try:
        assert_same(net(x).output, expected, torch.float64)
        assert ("no C compiler here" if missing == "compiler" else "Could not determine home") in caplog.text
    finally:
        native.library.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_no_features_and_other_layouts(kind: str, path: str) -> None:
    """Nothing but the flag as input; lengths and weights that do not lie row after row."""
    net = make(kind, 0, 5)
    assert_equals_reference(net, path, torch.randn(3, 4, 0, dtype=torch.float64), random_state(kind, 4, 5), None)
    net = make(kind, 3, 5)
    for p in net.parameters():
        p.data = p.data.t().contiguous().t() if p.dim() == 2 else p.data
    x, pairs = torch.randn(3, 4, 3, dtype=torch.float64), torch.tensor([[3, 1], [1, 1], [2, 1], [3, 1]])
    for lengths in (pairs[:, 0], torch.tensor([2]).expand(4)):
        assert_equals_reference(net, path, x.transpose(0, 1).contiguous().transpose(0, 1), None, lengths)
