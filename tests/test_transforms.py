"""What else of PyTorch a network goes through: torch.func, copies, compilers, types, processes, pieces of time."""

import copy
import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

import oracle
import pondertime as pt
from compare import assert_same
from pondertime import backends
from pondertime.fused import function
from zoo import KINDS, gradients, make, random_state, weighted


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_functional_call_and_grad() -> None:
    net, x = make("lstm"), randn(3, 2, 3)
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return weighted(functional_call(net, parameters, (x,)))

    by_parameters, by_x = grad(loss, argnums=(0, 1))(parameters, x)
    x.requires_grad_()
    expected = torch.autograd.grad(weighted(net(x)), [*net.parameters(), x])
    assert_same([*by_parameters.values(), by_x], expected)


@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("kind", ["rnn_tanh", "gru", "lstm"])
def test_vmap_over_networks(kind: str, integer: bool) -> None:
    nets = [make(kind, max_steps=8, halt_bias=bias) for bias in (-2.0, 0.0, 3.0)]
    x = torch.randint(3, (4, 2)) if integer else randn(4, 2, 3)
    parameters, buffers = stack_module_state(nets)

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> tuple[Tensor, Any]:
        result = functional_call(nets[0], (parameters, buffers), (x, None, [4, 2]))
        return weighted(result), tuple(result)

    stacked, results = vmap(grad(loss, has_aux=True), randomness="error")(parameters, buffers)
    assert len({int(steps.max()) for steps in results[2].steps}) > 1
    for i, net in enumerate(nets):
        result = net(x, None, [4, 2])
        assert_same(tree_map(lambda a: a[i], results), tuple(result))  # noqa: B023
        assert_same([stacked[name][i] for name, _ in net.named_parameters()], gradients(net, result))


def test_per_example_gradients() -> None:
    net, x = make("gru", max_steps=6), randn(3, 4, 3)
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        result = functional_call(net, parameters, (x,))
        return result.output.sum() + result.ponder.cost

    per_example = vmap(grad(loss), in_dims=(None, 1))(parameters, x)
    for b in range(4):
        result = net(x[:, b])
        expected = torch.autograd.grad(result.output.sum() + result.ponder.cost, list(net.parameters()))
        assert_same([g[b] for g in per_example.values()], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_copies(kind: str) -> None:
    net, x = make(kind), randn(3, 2, 3)
    expected = tuple(net(x))
    twin = copy.deepcopy(net)
    assert_same(tuple(twin(x)), expected)
    file = io.BytesIO()
    pickle.dump(net.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    assert_same(tuple(twin(x)), expected)
    net.load_state_dict(pickle.load(file))
    assert_same(tuple(net(x)), expected)


def test_a_whole_module_can_be_saved() -> None:
    net, x = make("lstm", epsilon=0.2), randn(3, 2, 3)
    assert_same(tuple(pickle.loads(pickle.dumps(net))(x)), tuple(net(x)))


# Dynamo itself looks at .grad of tensors that have none where a graph breaks.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compile(backend: str) -> None:
    torch._dynamo.reset()
    net, x = make("lstm", max_steps=3, backend=backend), randn(2, 3, 3)
    compiled: Any = torch.compile(net, backend="eager")
    result, expected = compiled(x), net(x)
    assert_same(tuple(result), tuple(expected))
    assert_same(gradients(net, result), gradients(net, expected))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs g++")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf", "ignore::DeprecationWarning")
def test_compile_by_default() -> None:
    """With torch's own compiler, which compiles what is around the network and leaves it on its fast path."""
    torch._dynamo.reset()
    net = make("gru", 4)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.net = nn.Linear(3, 4, dtype=torch.float64), net

        def forward(self, x: Tensor) -> Tensor:
            output, _, ponder = self.net(self.inner(x).tanh())
            return output.square().sum() + ponder.cost.sum()

    model, x, served = Model(), randn(5, 2, 3), []
    compiled: Any = torch.compile(model)
    for steps in (None, 2):
        net.force_steps = steps
        expected = torch.autograd.grad(model(x), list(model.parameters()))
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(backends.BACKENDS, "fused", lambda *args: served.append(args[0]) or function.fused(*args))
            assert_same(torch.autograd.grad(compiled(x), list(model.parameters())), expected)
    assert served == [net, net]


@pytest.mark.parametrize("kind", ["rnn_tanh", "gru", "lstm"])
def test_bfloat16_module(kind: str, backend: str) -> None:
    """The oracle with the same, rounded weights: states and outputs in bfloat16, halting in float32."""
    net = make(kind, dtype=torch.bfloat16, halt_bias=-0.5, backend=backend)
    x = torch.randn(3, 4, 3).bfloat16()
    result = net(x)
    assert result.output.dtype == torch.bfloat16 and result.ponder.remainder.dtype == torch.float32
    assert_same(result, wide_answer(kind, net, x), torch.bfloat16)
    weighted(result).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("kind", ["rnn_tanh", "gru", "lstm"])
def test_autocast(kind: str, backend: str) -> None:
    net = make(kind, dtype=torch.float32, halt_bias=-0.3, backend=backend)
    x = torch.randn(3, 4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        result = net(x, None, [3, 3, 3, 3])
        ragged = net(x, None, [1, 3, 2, 3])
    assert result.ponder.remainder.dtype == result.ponder.cost.dtype == torch.float32
    assert_same(result, wide_answer(kind, net, x), torch.bfloat16)
    assert_same(ragged.output[:, 1], result.output[:, 1], torch.bfloat16)
    weighted(result).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def wide_answer(kind: str, net: pt.ACT, x: Tensor) -> Any:
    """The oracle's answer in float64, as ``ACT`` lays it out."""
    w = {name: p.detach().double() for name, p in net.named_parameters()}
    zeros = tree_map(torch.zeros_like, random_state(kind, x.shape[1], 4))
    lengths = [len(x)] * x.shape[1]
    answer = oracle.act(kind, w, x.double(), zeros, lengths, epsilon=net.epsilon, max_steps=net.max_steps)
    return answer.output, answer.state, tuple(answer[2:])


def rank_net_and_data(rank: int) -> tuple[pt.ACT, Tensor]:
    """The same network on both ranks; the data of rank 0 halt at once, those of rank 1 do not."""
    torch.manual_seed(0)
    net: Any = pt.ACT(nn.LSTMCell(4, 5), 2, dtype=torch.float64)
    with torch.no_grad():
        net.halt.weight.fill_(10.0)
        net.halt.bias.fill_(3.0)
        net.cell.weight_ih.copy_(0.3 * torch.rand(20, 4))
    generator = torch.Generator().manual_seed(rank)
    x = 2 * torch.rand(3, 2, 3, generator=generator, dtype=torch.float64) + 1
    return net, x if rank == 0 else -x


def loss_of(result: Any) -> Tensor:
    return result.output.pow(2).sum() + 0.1 * result.ponder.cost.mean()


def train_one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    net, x = rank_net_and_data(rank)
    parallel = DistributedDataParallel(net)
    result = parallel(x)
    loss_of(result).backward()
    by_name = {name: p.grad for name, p in net.named_parameters()}
    torch.save({"gradients": by_name, "steps": result.ponder.steps}, f"{folder}/{rank}.pt")
    # Not by way of destroy_process_group: gloo's thread may wait for the interpreter, which waits for it to end.
    os._exit(0)


def test_data_parallel_ranks_that_ponder_differently(tmp_path: Path) -> None:
    processes: Any = torch.multiprocessing.spawn(train_one_rank, (str(tmp_path),), nprocs=2, join=False, daemon=True)
    ended = [processes.join(timeout=60) for _ in range(2)]
    assert any(ended), "the two processes wait for each other"
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert (ranks[0]["steps"] == 1).all() and (ranks[1]["steps"] > 1).all()
    alone = []
    for rank in range(2):
        net, x = rank_net_and_data(rank)
        alone.append(torch.autograd.grad(loss_of(net(x)), list(net.parameters())))
    mean = [(a + b) / 2 for a, b in zip(*alone, strict=True)]
    for rank in ranks:
        assert_same(list(rank["gradients"].values()), mean)


@pytest.mark.parametrize("kind", KINDS)
def test_state_in_and_out_is_one_long_run(kind: str, backend: str) -> None:
    """Pieces of a sequence, the graph kept: values and gradients of the whole."""
    net, x = make(kind, backend=backend), randn(6, 3, 3)
    whole = net(x)
    state, outputs, costs = None, [], []
    for piece in x.split([1, 3, 2]):
        output, state, ponder = net(piece, state)
        outputs.append(output)
        costs.append(ponder.cost)
    pieces = torch.cat(outputs), state, sum(costs)
    expected = whole.output, whole.state, whole.ponder.cost
    assert_same(pieces, expected)
    assert_same(gradients(net, pieces), gradients(net, expected))
