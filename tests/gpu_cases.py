"""The kernels of the fused path against the reference in float64: values, state, N, R, the trace, every gradient.

Run as a script under Triton's interpreter it does so on the CPU, for small networks.
"""

import copy
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import pondertime as pt
from compare import TOLERANCE, Precision, assert_same
from pondertime import backends
from pondertime.ensemble.stack import Ensemble
from pondertime.fused import function
from pondertime.fused.common import Grads
from zoo import differentiate, make, random_state, weighted

# Whether a recording is being emulated: on a GPU nothing is computed meanwhile.
recording: list[bool] = []
KINDS = ["rnn_tanh", "rnn_relu", "gru", "lstm"]


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is full of NaN, so that a number left unwritten shows."""

    def filling(empty: Any) -> Any:
        def filled(*shape: Any, **options: Any) -> Tensor:
            a = empty(*shape, **options)
            return a.fill_(float("nan")) if a.is_floating_point() else a.fill_(-(2**30))

        return filled

    monkeypatch.setattr(torch, "empty", filling(torch.empty))
    monkeypatch.setattr(torch, "empty_like", filling(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", filling(Tensor.new_empty))


def serve_by(monkeypatch: pytest.MonkeyPatch, way: str, blocks: tuple[int, ...] | None = None) -> None:
    """Let Triton serve the fused path on any device: by the "loop" with these blocks, by "ticks", by "recorded" ones,
    or as it chooses."""
    from pondertime.fused import triton_cluster_run, triton_loop_run, triton_plan, triton_recorded, triton_run

    def run(inputs: Any, rules: Any, *, plain: bool, keep: bool, seen: bool = False) -> Any:
        return triton_run.make(inputs, rules, keep=keep, seen=seen)

    monkeypatch.setattr(function, "make_run", run)
    monkeypatch.setattr(triton_plan, "_plans", {})
    triton_recorded._held.clear()
    monkeypatch.setattr(triton_recorded, "CALLS", 1 if way == "recorded" else 10)
    if way in ("ticks", "recorded") or blocks is not None:
        cut = None if blocks is None else triton_loop_run.Blocks(*blocks)
        monkeypatch.setattr(triton_loop_run, "blocks_for", lambda *sizes: cut)
    if way in ("loop", "ticks", "recorded"):
        monkeypatch.setattr(triton_cluster_run, "cluster_for", lambda plan: None)


def emulate_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU: a recording is the call that was recorded, made again with the tensors that it had then; what it
    returns is written to where it was the first time."""
    from pondertime.fused.triton_recorded import Space

    def record(space: Any, call: Callable[[], Any], *, ticks: bool = False) -> tuple[Any, Any]:
        recording.append(True)
        made = None if ticks else call()
        recording.clear()

        def replay() -> None:
            for to, a in zip(tree_leaves(made), tree_leaves(call()), strict=True):
                if isinstance(to, Tensor):
                    to.copy_(a)

        return SimpleNamespace(replay=replay), made

    def begin(space: Any, capacity: int, device: torch.device) -> None:
        make_space(space, capacity, device)
        space.cuda = True

    make_space = Space.__init__
    monkeypatch.setattr(Space, "__init__", begin)
    monkeypatch.setattr(Space, "record", record)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


def cut_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter: products on tensor cores see 10 bits after the point of their factors, as on a GPU."""
    import numpy as np
    from triton._C.libtriton import ir
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply: Any = InterpreterBuilder.create_dot

    def cut(a: Any) -> Any:
        seen = (a.data.view(np.int32) & -8192).view(np.float32) if a.data.dtype == np.float32 else a.data
        return TensorHandle(seen, a.dtype)

    def create_dot(builder: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        if precision == ir.INPUT_PRECISION.TF32:
            a, b = cut(a), cut(b)
        return multiply(builder, a, b, d, precision, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@contextmanager
def products(precision: Precision) -> Iterator[None]:
    """Torch's products in TF32, where that is the precision, or in float32; the fused path follows."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def in_single(tree: Any, device: str) -> Any:
    """Numbers that float32 holds, on the device."""
    return tree_map(lambda a: a.to(device, torch.float32) if a.is_floating_point() else a.to(device), tree)


def distances(net: Any, x: Tensor, state: Any, lengths: Any = None) -> Tensor:
    """How near each row's halting sums come to the threshold, ``[B]``."""
    h = net.trace(x, state, lengths).h
    return (h.cumsum(0) - (1 - net.epsilon)).abs().masked_fill(h == 0, 1).amin((0, 1))


def compare(kind: str, sizes: tuple[int, int, int, int], device: str, *, lengths: Any = None, integers: bool = False,
            bias: bool = True, precision: Precision = torch.float32, **options: Any) -> Any:  # fmt: skip
    """Assert equality for a network of sizes T, B, I, H in float32 or TF32; returns N.

    In TF32 the rows are those of four times as many whose halting sums stay clear of the threshold, so that no rounding
    flips N. A relu's derivative jumps where rounding changes a sign, so its gradients are not compared.
    """
    T, B, inputs, H = sizes
    exact, drawn = precision == torch.float32, B if precision == torch.float32 else 4 * B
    torch.manual_seed(0)
    net = make(kind, inputs, H, **{"max_steps": 9, **options}).float().double()
    if not bias:
        cell = nn.LSTMCell if kind == "lstm" else nn.GRUCell if kind == "gru" else nn.RNNCell
        net = pt.ACT(cell(inputs + 1, H, bias=False), 2, halt_bias=-1.0).double()
    x = torch.randint(0, inputs, (T, drawn)) if integers else torch.randn(T, drawn, inputs).double()
    state, net.backend = random_state(kind, drawn, H), "reference"
    if not exact:
        rows = distances(net, x, state).topk(B).indices
        x, state = x[:, rows], tree_map(lambda a: a[rows], state)
    # Laid out as nobody expects.
    state = tree_map(lambda a: a.float().double().t().contiguous().t(), state)
    lengths = None if lengths is None else torch.tensor(lengths)
    expected, gradients = differentiate(net, x, state, lengths)
    trace = net.trace(x, state, lengths)
    clear = 1e-5 if exact else 2 * TOLERANCE[precision]
    assert options.get("force_steps") or distances(net, x, state, lengths).min() > clear

    net = net.to(device, torch.float32)
    net.backend = "fused"
    x, state = in_single(x, device), in_single(state, device)
    sources = [a.requires_grad_() for a in ([] if integers else [x]) + tree_leaves(state)] + list(net.parameters())
    with products(precision):
        result = net(x, state, lengths)
        assert_same(tree_map(to_cpu, tuple(result)), tuple(expected), precision)
        for more in (True, False):
            found = torch.autograd.grad(weighted(tree_map(to_cpu, result)), sources, retain_graph=more)
            if exact or kind != "rnn_relu":
                assert_same([a.cpu() for a in found], list(gradients.values()), precision)
        with torch.no_grad():
            assert_same(tree_map(to_cpu, tuple(net(x, state, lengths))), tuple(expected), precision)
        assert_same(tree_map(to_cpu, tuple(net.trace(x, state, lengths))), tuple(trace), precision)
    return expected.ponder.steps


def compare_half(
    kind: str, sizes: tuple[int, int, int, int], device: str, *, lengths: list[int], integers: bool, by_x: bool = False
) -> None:
    """Assert that bfloat16 products under autocast stay near the reference in float64.

    The halting unit hardly sees the state, so that no rounding can flip N. A relu's derivative jumps where rounding
    changes a sign, so its gradients are not compared.
    """
    T, B, inputs, H = sizes
    torch.manual_seed(0)
    net = make(kind, inputs, H, max_steps=9).float()
    with torch.no_grad():
        net.halt.weight.mul_(0.02)
        net.halt.bias.fill_(-0.8)
    x = torch.randint(0, inputs, (T, B)) if integers else torch.randn(T, B, inputs)
    state, rows = in_single(random_state(kind, B, H), "cpu"), torch.tensor(lengths)

    def run(net: Any, x: Any, state: Any) -> Any:
        net.zero_grad()
        if by_x:
            x = x.requires_grad_()
        result = net(x, state, rows)
        total = weighted(tree_map(lambda a: a.cpu().double() if a.is_floating_point() else a.cpu(), tuple(result)))
        total.backward()
        sources = [*net.named_parameters(), *([("x", x)] if by_x else [])]
        return result, {k: p.grad.cpu().double().clone() for k, p in sources}

    net.backend = "reference"
    wide = [a.double() if a.is_floating_point() else a for a in (x, *tree_leaves(state))]
    expected, gradients = run(net.double(), wide[0], tuple(wide[1:]) if len(wide) > 2 else wide[1])
    net = net.float().to(device)
    net.backend = "fused"
    with torch.autocast(device, torch.bfloat16):
        result, found = run(net, x.to(device), in_single(state, device))
    assert result.output.dtype == torch.bfloat16
    assert result.ponder.remainder.dtype == result.ponder.cost.dtype == torch.float32
    assert all(a.dtype == torch.float32 for a in tree_leaves(result.state))
    assert torch.equal(result.ponder.steps.cpu(), expected.ponder.steps)
    assert_same(tree_map(to_cpu, tuple(result)), tuple(expected), torch.bfloat16)
    if kind != "rnn_relu":
        assert_same(found, gradients, "bfloat16 gradients")


class Stack:
    """Stacked networks, each with its own input and lengths, and what they computed.

    ``precision``: of the products. In others than float32, and with halting biases of each network, the halting unit
    hardly sees the state.
    """

    def __init__(
        self, kind: str, device: str, T: int = 3, *, sizes: tuple[int, int, int] = (3, 5, 17), max_steps: int = 6,
        precision: Precision = torch.float32, biases: Sequence[float] | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        E, B, H = sizes
        coarse = precision != torch.float32
        torch.manual_seed(seed)
        self.networks = [make(kind, 3, H, max_steps=max_steps).float() for _ in range(E)]
        for net, bias in zip(self.networks, biases or (-0.8,) * E, strict=True) if coarse or biases else []:
            with torch.no_grad():
                net.halt.weight.mul_(0.02)
                net.halt.bias.fill_(bias)
        self.x, self.lengths = torch.randn(T, E, B, 3), torch.randint(1, T + 1, (E, B))
        self.stack, self.precision = Ensemble(self.networks).to(device), precision
        inputs, rules = self.stack.prepare(self.x.to(device), self.lengths if T > 1 else None)
        with products(precision):
            self.out = function.fused_networks(inputs, rules._replace(half=precision == torch.bfloat16))

    def compare(self) -> None:
        """Assert that they compute what each does alone: outputs, N and every gradient."""
        out, precision = self.out, self.precision
        assert out.y.dtype == torch.float32
        y, rho, cost = out.y.transpose(0, 1), out.rho.transpose(0, 1), out.cost
        with products(precision):
            weighted((y.cpu(), rho.cpu(), cost.cpu())).backward()
        parts = weighted_parts((y, rho, cost))
        for e, net in enumerate(self.networks):
            net = net.double()
            net.backend = "reference"
            output, _, alone = net(self.x[:, e].double(), None, self.lengths[e])
            assert_same((y[:, e].cpu(), out.steps[e].cpu()), (output, alone.steps), precision)
            loss = (output * parts[0][:, e]).sum() + (alone.rho * parts[1][:, e]).sum()
            (loss + (alone.cost * parts[2][e]).sum()).backward()
            for name, p in net.named_parameters():
                made: Any = self.stack.weights(name).grad
                assert_same(made[e].cpu(), p.grad, precision, name)


def compare_stacked(kind: str, device: str, T: int = 3, **options: Any) -> None:
    Stack(kind, device, T, **options).compare()


def compare_networks_that_differ(kind: str, device: str) -> None:
    """Stacked networks of which one needs ten times the updates of another; then they change places."""
    for half in (False, True):
        for biases in ((-2.5, -0.8, 3.0), (-2.5, -0.8, 3.0), (3.0, 3.0, -2.5), (-0.8, -2.5, 3.0)):
            # In bfloat16 not as many updates, since their rounding adds up.
            precision = torch.bfloat16 if half else torch.float32
            compare_stacked(kind, device, T=1 if half else 3, precision=precision, biases=biases, max_steps=12)


def compare_steps(
    kind: str, device: str, *, sizes: tuple[int, int, int] = (3, 5, 17), T: int = 3, half: bool = False,
    rounds: int = 8, max_steps: int = 12, orders: Sequence[Sequence[float]] = ((-2.5, -0.8, 3.0), (3.0, -0.8, -2.5)),
) -> Any:  # fmt: skip
    """Training steps made by one run, at least half of them played from recordings: each has other weights,
    inputs and lengths, and is what every network does alone. ``orders``: halting biases, each for two rounds."""
    from pondertime.ensemble.stepper import by_weights
    from pondertime.fused import triton_run

    E, B, H = sizes
    torch.manual_seed(1)
    # In bfloat16 not as many updates, since their rounding adds up.
    stack = Ensemble([make(kind, 3, H, max_steps=5 if half else max_steps).float() for _ in range(E)]).to(device)
    x, lengths = torch.zeros(T, E, B, 3, device=device), torch.ones(E, B, dtype=torch.int64, device=device)
    inputs, rules = stack.prepare(x, lengths if T > 1 else None)
    precision = torch.bfloat16 if half else torch.float32
    scale, price = torch.rand(E, T, B, 1, device=device), torch.zeros(E, T, B, device=device)
    gradients = [torch.zeros_like(p) for p in stack.parameters()]
    with torch.no_grad():
        run: Any = triton_run.make(inputs, rules._replace(half=half), keep=True, again=True)

    def judge(out: Any) -> tuple[Any, Grads]:
        return out, Grads(scale * out.y, remainder=price)

    def apply(seen: Any, d: Any) -> None:
        assert seen.y.shape[-1] == 2
        for to, made in zip(gradients, by_weights(d), strict=True):
            if not recording:
                to.copy_(made.reshape(to.shape))

    for r in range(rounds):
        with torch.no_grad():
            for p in stack.parameters():
                p.normal_(0, H**-0.5)
            stack.weights("halt.weight").mul_(0.02)
            order = orders[r // 2 % len(orders)]
            stack.weights("halt.bias").copy_(torch.tensor([order[e % 3] for e in range(E)]).unsqueeze(1))
            x.normal_()
            price.uniform_()
            lengths.random_(1, T + 1)[:, 0] = T  # so that the numbers of ticks come again
            seen = run.step(judge, apply)
        for e in range(E):
            net = stack.member(e).double()
            net.backend = "reference"
            output, _, alone = net(x[:, e].cpu().double(), None, lengths[e].cpu())
            made = seen.y[e].cpu(), seen.steps[e].cpu(), seen.remainder[e].cpu()
            assert_same(made, (output, alone.steps, alone.remainder), precision, f"round {r}")
            loss = (scale[e].cpu() * output.square()).sum() / 2 + (price[e].cpu() * alone.remainder).sum()
            expected = torch.autograd.grad(loss, list(net.parameters()))
            for (name, _), to, known in zip(net.named_parameters(), gradients, expected, strict=True):
                assert_same(to[e].cpu(), known, precision, f"round {r}, {name}")
    assert run.space.begun is not None and 0 < len(run.space.steps) <= rounds // 2
    return run


def compare_calls(kind: str, device: str, sizes: tuple[int, int, int, int]) -> None:
    """Plain calls of one shape one after the other, which share a recording: each has other weights and
    thinks for longer, two wait for their way back, one is never asked for it, one is in inference mode."""
    from pondertime.fused import triton_recorded

    triton_recorded._held.clear()
    T, B, inputs, H = sizes
    torch.manual_seed(2)
    net = make(kind, inputs, H, max_steps=15).float().to(device)
    net.backend, parameters = "fused", list(net.parameters())
    for bias in (0.0, -1.0, -4.0, 0.0):
        with torch.no_grad():
            for p in parameters:
                p.normal_(0, H**-0.5)
            net.halt.weight.mul_(0.02)
            net.halt.bias.fill_(bias)
        truth = copy.deepcopy(net).cpu().double()
        truth.backend = "reference"
        x = [torch.randn(T, B, inputs) for _ in range(3)]
        found = [net(a.to(device)) for a in x]
        with torch.inference_mode():
            unasked = [net(a.to(device)) for a in x]
        for way, a in zip(found[:2], x, strict=False):
            gradients = torch.autograd.grad(weighted(tree_map(to_cpu, tuple(way))), parameters)
            known = torch.autograd.grad(weighted(tuple(truth(a.double()))), list(truth.parameters()))
            assert_same([g.cpu() for g in gradients], list(known), torch.float32)
        for way, other, a in zip(found, unasked, x, strict=True):
            expected = tuple(truth(a.double()))
            assert_same(tree_map(to_cpu, (*way, *other)), (*expected, *expected), torch.float32)
        del found, way
        # Nobody asked for the way back of the last one.
        assert not [run for run in gc.get_objects() if issubclass(type(run), triton_recorded.TickRun)]
    spaces = [space for plan in triton_recorded._held for space in plan.spaces]
    assert len(spaces) == 2 and all(space.ticks for space in spaces)


def weighted_parts(tree: tuple[Tensor, ...]) -> list[Tensor]:
    """The weights that ``weighted`` gives to the tensors of a tree."""
    leaves = [torch.zeros(a.shape, dtype=torch.float64, requires_grad=True) for a in tree]
    return list(torch.autograd.grad(weighted(tuple(leaves)), leaves))


def to_cpu(a: Any) -> Any:
    return a.cpu() if isinstance(a, Tensor) else a


def main(kinds: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        poison(patch)
        cut_factors(patch)
        patch.setattr(backends, "autocast_served", lambda where: True)
        emulate_recordings(patch)
        for kind in kinds:
            serve_by(patch, "loop", (16, 32, 2, 16, 1))
            for precision in (torch.float32, "tf32"):
                compare(kind, (2, 3, 3, 17), "cpu", lengths=[2, 1, 2], max_steps=4, precision=precision)
            if kind == "rnn_tanh":
                # Two row groups, of which one has fewer updates.
                compare(kind, (2, 18, 3, 17), "cpu", lengths=[2] * 16 + [1] * 2, max_steps=4)
            if kind == "lstm":
                compare_stacked(kind, "cpu")
                compare_stacked(kind, "cpu", T=1, precision="tf32")
            serve_by(patch, "ticks")
            if kind == "gru":
                compare_stacked(kind, "cpu", T=1)
            if kind in ("gru", "lstm"):
                compare_stacked(kind, "cpu", precision=torch.bfloat16)
            compare(kind, (2, 3, 3, 5), "cpu", lengths=[1, 2, 2], integers=kind == "gru", max_steps=5)
            compare(kind, (2, 2, 3, 5), "cpu", force_steps=2)
            serve_by(patch, "recorded")
            compare(kind, (2, 3, 3, 5), "cpu", lengths=[1, 2, 2], max_steps=5)
            compare(kind, (2, 3, 3, 5), "cpu", integers=True, max_steps=5)
            if kind in ("gru", "lstm"):
                compare_calls(kind, "cpu", (2, 2, 3, 5))
            if kind == "lstm":
                compare_steps(kind, "cpu", sizes=(2, 2, 5), T=2, rounds=4)
            # The interpreter's own products do not know bfloat16: the loop is compared on a GPU.
            compare_half(kind, (2, 3, 3, 5), "cpu", lengths=[1, 2, 2], integers=kind == "gru", by_x=kind == "lstm")
            if kind == "lstm":
                compare_half(kind, (2, 3, 3, 5), "cpu", lengths=[1, 2, 2], integers=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
