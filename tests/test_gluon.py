"""The kernel for clusters, run on a CPU thread by thread, against the reference."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import pondertime as pt
from compare import assert_same
from gluon_cpu import launch, load_kernels
from gpu_cases import in_single, poison
from pondertime.fused import function
from zoo import make, random_state

pytest.importorskip("triton", reason="needs Triton's interpreter")


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls without a way back go to the kernel."""
    from pondertime.fused import triton_cluster_run, triton_plan, triton_run

    kernels = load_kernels()

    class Kernel:
        def run(self, *args: Any, grid: Any, warmup: bool, num_warps: int, **meta: Any) -> Any:
            assert warmup and num_warps == 4
            return meta

    def as_cluster(meta: dict[str, Any], size: int, shared: int) -> tuple[Any, Any, Any]:
        def run(x: int, y: int, z: int, stream: Any, f: Any, metadata: Any, a: Any, b: Any, c: Any, *args: Any) -> None:
            assert x == z == 1 and size == meta["CG"] and args[-len(meta) :] == tuple(meta.values())
            launch(kernels, y, shared, args[: -len(meta)], meta)

        return run, None, None

    monkeypatch.setattr(triton_cluster_run, "lstm_kernel", Kernel())
    monkeypatch.setattr(triton_cluster_run, "as_cluster", as_cluster)
    monkeypatch.setattr(triton_cluster_run, "has_clusters", lambda device: True)
    monkeypatch.setattr(triton_plan, "_plans", {})

    def run(inputs: Any, rules: Any, *, plain: bool, keep: bool, seen: bool = False) -> Any:
        made = triton_run.make(inputs, rules, keep=keep, seen=seen)
        assert isinstance(made, triton_cluster_run.ClusterRun)
        return made

    monkeypatch.setattr(function, "make_run", run)
    poison(monkeypatch)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 1, 3, 9), {}),
        ((4, 5, 3, 32), {"lengths": [4, 1, 2, 4, 3]}),
        ((2, 18, 3, 40), {}),
        ((3, 4, 3, 64), {"force_steps": 3}),
        ((2, 16, 5, 128), {}),
        ((2, 3, 4, 100), {"integers": True, "lengths": [1, 2, 2]}),
        ((2, 3, 40, 20), {"max_steps": 1, "outputs": None}),
        ((2, 3, 100, 20), {"outputs": 3, "lengths": [2, 1, 2]}),
        ((2, 3, 130, 20), {"outputs": 20, "lengths": [2, 1, 2]}),
        ((2, 3, 4, 20), {"bias": False}),
    ],
)
def test_equals_reference(sizes: tuple[int, int, int, int], options: dict[str, Any]) -> None:
    T, B, inputs, H = sizes
    torch.manual_seed(0)
    lengths, integers = options.get("lengths"), options.get("integers", False)
    rules = {"max_steps": options.get("max_steps", 6), "force_steps": options.get("force_steps")}
    net = make("lstm", inputs, H, options.get("outputs", 2), **rules)
    if "bias" in options:
        net = pt.ACT(nn.LSTMCell(inputs + 1, H, bias=False), 2, halt_bias=-1.0)
    net = net.float().double()
    x = torch.randint(0, inputs, (T, B)) if integers else torch.randn(T, B, inputs).double()
    state = tree_map(lambda a: a.float().double(), random_state("lstm", B, H))
    lengths = None if lengths is None else torch.tensor(lengths)
    net.backend = "reference"
    with torch.no_grad():
        expected = net(x, state, lengths)
        net = net.float()
        net.backend = "fused"
        found = net(*in_single((x, state), "cpu"), lengths)
    assert_same(tuple(found), tuple(expected), torch.float32)


def test_a_row_that_is_not_a_number_is_alone() -> None:
    torch.manual_seed(0)
    net: Any = pt.ACT(nn.LSTMCell(4, 20), 2, halt_bias=-1.0).requires_grad_(False)
    x = torch.randn(3, 4, 3)
    expected = net(x)
    x[1, 2] = torch.nan
    found = net(x)
    others = [0, 1, 3]
    assert_same(found.output[:, others], expected.output[:, others], torch.float32)
    assert torch.equal(found.ponder.steps[:, others], expected.ponder.steps[:, others])
    assert found.output[1:, 2].isnan().all() and found.output[0].isfinite().all()
