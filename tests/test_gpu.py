"""The fused path on a GPU against the reference in float64."""

from typing import Any

import pytest
import torch
from torch import nn

import pondertime as pt
from compare import TOLERANCE, Precision, assert_same
from gpu_cases import (
    KINDS,
    compare,
    compare_calls,
    compare_half,
    compare_networks_that_differ,
    compare_stacked,
    compare_steps,
    poison,
    products,
    serve_by,
)
from zoo import make_cell

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # torch says so when the first thing that its backward thread does is a product.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


@pytest.mark.parametrize("way", ["as it chooses", "loop", "ticks", "recorded"])
@pytest.mark.parametrize(
    ("B", "H", "precision"),
    [
        *((B, H, torch.float32) for B, H in ((1, 1), (5, 3), (33, 17), (5, 100), (16, 128), (33, 130))),
        *((B, H, "tf32") for B, H in ((33, 17), (5, 100), (33, 130))),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_reference(
    kind: str, B: int, H: int, precision: Precision, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_by(monkeypatch, way)
    lengths = None if B == 1 else [1 + 7 * b % 3 for b in range(B)]
    compare(kind, (3, B, 5, H), "cuda", lengths=lengths, integers=B == 5, precision=precision)


@pytest.mark.parametrize(
    ("B", "H", "precision"),
    [*((B, H, torch.float32) for B, H in ((40, 300), (20, 512), (4, 700), (300, 128))), (20, 512, "tf32")],
)
def test_equals_reference_at_the_limits_of_the_loop(B: int, H: int, precision: Precision) -> None:
    compare("lstm", (2, B, 3, H), "cuda", precision=precision)


@pytest.mark.parametrize("kind", KINDS)
def test_force_steps_and_no_bias(kind: str) -> None:
    compare(kind, (3, 4, 3, 20), "cuda", force_steps=3)
    compare(kind if kind != "rnn_relu" else "rnn_tanh", (3, 4, 3, 20), "cuda", bias=False)


@pytest.mark.parametrize("way", ["loop", "ticks", "recorded"])
@pytest.mark.parametrize("kind", KINDS)
def test_stacked_networks(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way != "loop":
        serve_by(monkeypatch, way)
    compare_stacked(kind, "cuda")
    compare_stacked(kind, "cuda", T=1)
    if kind != "rnn_relu":
        for precision in ("tf32", torch.bfloat16):
            compare_stacked(kind, "cuda", precision=precision)


@pytest.mark.parametrize("outputs", [2, 40])
def test_backward_inside_autocast_of_what_was_computed_outside(outputs: int) -> None:
    """And the first backward pass of a shape through the cost alone."""
    torch.manual_seed(0)
    net: Any = pt.ACT(nn.LSTMCell(4, 20), outputs, force_steps=2).cuda()
    x = torch.randn(3, 5, 3, device="cuda")
    for first in (False, True):
        gradients = []
        for inside in (False, True):
            result = net(x)
            loss = result.ponder.cost.sum() if first else result.output.square().sum()
            with torch.autocast("cuda", torch.bfloat16, enabled=inside):
                gradients.append(torch.autograd.grad(loss, list(net.parameters())))
        assert_same(gradients[1], gradients[0], torch.float32)

    def squares() -> Any:
        return 8 * net(x).output.float().square().sum()  # so that no gradient is small beside 1

    with torch.autocast("cuda", torch.bfloat16):
        net(x).ponder.cost.sum().backward()
        net.zero_grad()
        squares().backward()
    expected = torch.autograd.grad(squares(), list(net.parameters()))
    assert_same([p.grad for p in net.parameters()], list(expected), torch.bfloat16)


@pytest.mark.parametrize(("inputs", "outputs"), [(200, None), (40, 17), (129, 2), (100, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_kernels_project_and_read_out(kind: str, inputs: int, outputs: int | None) -> None:
    compare(kind, (2, 20, inputs, 150), "cuda", outputs=outputs, lengths=[1 + b % 2 for b in range(20)])


@pytest.mark.parametrize("kind", KINDS)
def test_networks_that_differ(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_by(monkeypatch, "recorded")
    compare_networks_that_differ(kind, "cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_are_played(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pondertime.fused import triton_run

    serve_by(monkeypatch, "recorded")
    compare_calls(kind, "cuda", (3, 5, 4, 20))
    monkeypatch.setattr(triton_run, "SMALL_TAPE", 0)
    serve_by(monkeypatch, "recorded")
    compare_calls(kind, "cuda", (5, 33, 3, 130))


@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_are_played(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_by(monkeypatch, "recorded")
    compare_steps(kind, "cuda")
    compare_steps(kind, "cuda", T=1, half=True)
    compare_steps(kind, "cuda", sizes=(11, 5, 20), T=2, rounds=4)


def test_the_tape_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    from pondertime.fused import triton_plan, triton_run

    monkeypatch.setattr(triton_run, "SMALL_TAPE", 0)
    monkeypatch.setattr(triton_plan, "_plans", {})
    for way in ("loop", "ticks", "recorded"):
        serve_by(monkeypatch, way)
        assert compare("lstm", (2, 5, 3, 8), "cuda", halt_bias=-6, max_steps=40).max() == 40
    steps = compare_steps("lstm", "cuda", max_steps=40, orders=((3.0,) * 3, (3.0,) * 3, (-4.0,) * 3), rounds=6)
    assert steps.capacity >= 80


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.LSTMCell])
def test_a_training_step_can_be_recorded(cell: Any) -> None:
    """The host is not asked how long a small network thought, whose gradients are laid out like its weights."""
    torch.manual_seed(0)
    net: Any = pt.ACT(cell(9, 40), 3, halt_bias=-1.0).cuda()
    parameters = list(net.parameters())
    inputs = [torch.randn(2, 21, 8, device="cuda") * scale for scale in (1, 3, 0.1)]

    def gradients(x: Any) -> list[Any]:
        output, _, ponder = net(x)
        return list(torch.autograd.grad(output.square().sum() + ponder.cost.sum(), parameters))

    expected = [gradients(x) for x in inputs]
    assert all(g.stride() == p.stride() for g, p in zip(expected[0], parameters, strict=True))
    x, aside = torch.randn_like(inputs[0]), torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        gradients(x)
    torch.cuda.current_stream().wait_stream(aside)
    recordings = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    found = []
    for recording in recordings:
        with torch.cuda.graph(recording):
            found.append(gradients(x))
    # Neither needs the other to have run.
    for k in (1, 0):
        for given, wanted in zip(inputs, expected, strict=True):
            x.copy_(given)
            recordings[k].replay()
            assert_same(found[k], wanted, torch.float32)


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.LSTMCell])
def test_sums_over_many_updates(cell: Any) -> None:
    """All of one sign, so that no rounding cancels another."""
    torch.manual_seed(0)
    net: Any = pt.ACT(cell(4, 8), 1, force_steps=12).double()
    with torch.no_grad():
        for p in net.parameters():
            p.abs_()
    x = torch.rand(16, 64, 3).double()
    net.backend = "reference"
    expected = torch.autograd.grad(net(x).output.sum(), list(net.parameters()), allow_unused=True)
    net = net.float().cuda()
    net.backend = "fused"
    found = torch.autograd.grad(net(x.float().cuda()).output.sum(), list(net.parameters()), allow_unused=True)
    for a, b in zip(found, expected, strict=True):
        if b is not None:
            assert (a.cpu() - b).norm() <= TOLERANCE[torch.float32] * b.norm() + 1e-9


def test_flips_are_rare() -> None:
    """Without a margin rounding may flip N in a few of a thousand steps, never in many."""
    torch.manual_seed(1)
    net: Any = pt.ACT(nn.LSTMCell(9, 128), None, halt_bias=-1.5)
    x = torch.randn(20, 64, 8)
    net.backend = "reference"
    expected = net(x).ponder.steps
    net = net.cuda()
    net.backend = "fused"
    assert (net(x.cuda()).ponder.steps.cpu() != expected).sum() <= 2


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("kind", ["rnn_tanh", "gru", "lstm"])
def test_tf32_where_torch_allows_it(kind: str, keep: bool) -> None:
    """And nowhere else."""
    torch.manual_seed(0)
    net: Any = pt.ACT(make_cell(kind, 8, 128), None, force_steps=3)
    x = torch.randn(5, 16, 8)
    expected = net.double()(x.double()).output
    net, found = net.float().cuda(), {}
    for precision in ("tf32", torch.float32):
        with torch.set_grad_enabled(keep), products(precision):
            found[precision] = net(x.cuda()).output.cpu()
        assert_same(found[precision], expected, precision)
    assert float((found["tf32"] - expected).detach().norm() / expected.detach().norm()) > TOLERANCE[torch.float32]


@pytest.mark.parametrize("way", ["loop", "ticks", "recorded"])
@pytest.mark.parametrize(("B", "H", "integers"), [(5, 20, False), (33, 130, True), (16, 512, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_under_autocast(
    kind: str, B: int, H: int, integers: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way != "loop":
        serve_by(monkeypatch, way)
    by_x = not integers and kind == "lstm"
    compare_half(kind, (3, B, 5, H), "cuda", lengths=[1 + 7 * b % 3 for b in range(B)], integers=integers, by_x=by_x)


def test_auto_chooses_it() -> None:
    net = pt.ACT(nn.LSTMCell(4, 5), 1).cuda()
    assert net.resolve("cuda") == "fused"
    with torch.autocast("cuda", torch.bfloat16):
        assert net.resolve("cuda") == "fused"
    with torch.autocast("cuda", torch.float16):
        assert net.resolve("cuda") == "compact"
    assert net.double().resolve("cuda") == "compact"


def test_nan_ends_the_loop_and_shows() -> None:
    net: Any = pt.ACT(nn.GRUCell(4, 5), 1).cuda()
    x = torch.randn(3, 2, 3, device="cuda")
    x[1, 1, 0] = float("nan")
    result = net(x)
    assert result.output[1:, 1].isnan().all() and result.output[:, 0].isfinite().all()


@pytest.mark.parametrize(
    ("T", "B", "H", "precision"),
    [
        *(
            (*sizes, torch.float32)
            for sizes in ((1, 1, 9), (4, 20, 32), (3, 16, 40), (5, 33, 64), (2, 64, 65), (10, 16, 128))
        ),
        *((*sizes, "tf32") for sizes in ((1, 1, 9), (5, 33, 64), (2, 64, 65), (10, 16, 128))),
    ],
)
def test_clusters(T: int, B: int, H: int, precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    """An LSTM without a way back: rows that halt at other times and end at other steps, twice on the same memory."""
    from pondertime.fused import triton_cluster_run, triton_plan

    if not triton_cluster_run.has_clusters(torch.device("cuda", 0)):
        pytest.skip("needs thread block clusters (compute capability 9.0)")
    monkeypatch.setattr(triton_plan, "_plans", {})
    ways: Any = ({}, {"lengths": [1 + 5 * b % T for b in range(B)]}, {"force_steps": 4}, {"integers": True})
    for options in ways:
        for _ in range(2):
            compare("lstm", (T, B, 5, H), "cuda", precision=precision, **options)
    assert any(plan.run is triton_cluster_run.serve for plan in triton_plan._plans.values())


def test_inference_can_be_recorded_and_run_on_several_streams() -> None:
    torch.manual_seed(0)
    net: Any = pt.ACT(nn.LSTMCell(6, 128), 3, halt_bias=-1.0).eval().requires_grad_(False)
    x = torch.randn(3, 4, 16, 5)
    expected = [net.double()(a.double()).output for a in x]
    net, given = net.float().cuda(), x[0].cuda()
    net(given)  # builds the kernel
    recording = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recording):
        made = net(given).output
    for a, y in zip(x, expected, strict=True):
        given.copy_(a)
        recording.replay()
        assert_same(made.cpu(), y, torch.float32)
    streams, found = [torch.cuda.Stream() for _ in x], []
    for _ in range(20):
        for a, stream in zip(x, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(net(a.cuda()).output)
    torch.cuda.synchronize()
    for k, y in enumerate(found):
        assert_same(y.cpu(), expected[k % len(x)], torch.float32)


def test_without_room_for_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    from pondertime.fused import triton_cluster_run, triton_loop_run, triton_plan

    def full(*args: Any, **options: Any) -> Any:
        raise triton_cluster_run.NoRoom

    monkeypatch.setattr(triton_cluster_run, "as_cluster", full)
    monkeypatch.setattr(triton_cluster_run, "_full", set())
    monkeypatch.setattr(triton_plan, "_plans", {})
    compare("lstm", (2, 5, 3, 20), "cuda")
    assert all(plan.run is triton_loop_run.LoopRun for plan in triton_plan._plans.values())
