"""The fused path as one differentiable function, and as a backend of ACT."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pondertime.cells import Network
from pondertime.fused import calls, native
from pondertime.fused.common import Inputs, Outputs, Rules, by_inputs, each, kind_of
from pondertime.halting import State
from pondertime.reference import Recorder, Result, read_out_after

# Rows of tape that calls of a shape needed last time.
_rows: dict[tuple[int, ...], int] = {}


def make_run(inputs: Inputs, rules: Rules, *, plain: bool, keep: bool, seen: bool = False) -> Any:
    """Run E networks forward: on a GPU with Triton, else with the C loop, or with plain calls where there is none."""
    if inputs.h.is_cuda:
        from pondertime.fused import triton_run

        return triton_run.make(inputs, rules, keep=keep, seen=seen)
    inputs = with_front(inputs, rules)
    lib = native.library()
    if plain or isinstance(lib, str):
        return calls.Run(inputs, rules, keep=keep, seen=seen)
    T, B = inputs.x.shape[1:3]
    shape = (T, *inputs.h.shape, rules.kind.slots)
    run = native.Run(lib, inputs, rules, rows=_rows.get(shape, 2 * T * B), keep=keep, seen=seen)
    if keep:
        _rows[shape] = int(1.1 * run.rows) + 2 * B
    return run


class Fused(torch.autograd.Function):
    """ACT of E networks with the closed-form backward pass; once differentiable.

    Unless the rules say stacked, the tensors are those of one network and have no axis E.
    """

    @staticmethod
    def forward(ctx, rules: Rules, plain: bool, keep: bool, *tensors: Any):
        run = make_run(Inputs(*tensors), rules, plain=plain, keep=keep)
        # A result must not be held by what it holds: that would never be freed.
        outputs, run.out = tuple(run.out), None
        ctx.run, ctx.options = run, (rules, plain)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(outputs[3])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any):  # type: ignore[override]
        rules, plain = ctx.options
        tensors = ctx.saved_tensors
        run, ctx.run = ctx.run, None
        if run is None:
            # The tape was used up by a backward pass that kept the graph: make it again.
            run = make_run(Inputs(*tensors), rules, plain=plain, keep=True)
        if hasattr(run, "gradients"):  # on a GPU
            return None, None, None, *run.gradients(grads, x=ctx.needs_input_grad[3])
        E, T, B, H = run.E, run.T, run.B, run.H
        shapes = ((E, T, B, H), (E, B, H), (E, B, H) if rules.kind.leaves == 2 else None, None, (E, T, B))
        d_mean, d_h, d_c, _, d_remainder = (
            None if shape is None else run.inputs.h.new_zeros(shape) if g is None else g.reshape(shape)
            for g, shape in zip(grads, shapes, strict=True)
        )
        made = by_inputs(run.inputs, run.backward(d_mean, d_h, d_c, d_remainder), x=ctx.needs_input_grad[3])
        return None, None, None, *(made if rules.stacked else (None if a is None else a[0] for a in made))


def with_front(tensors: Iterable[Tensor | None], rules: Rules) -> Inputs:
    """The tensors with an axis E in front."""
    return each((lambda a: a) if rules.stacked else front, tensors)


def front(a: Tensor) -> Tensor:
    """A tensor of one network with an axis E in front."""
    return a.unsqueeze(0)


def fused_networks(inputs: Inputs, rules: Rules, *, plain: bool = False) -> Outputs:
    """E networks at once; differentiable where any input asks for it."""
    keep = torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in inputs)
    if not keep and inputs.h.is_cuda:
        return make_run(inputs, rules, plain=plain, keep=False).out
    return Outputs(*Fused.apply(rules, plain, keep, *inputs))


def fused(
    net: Network,
    x: Tensor,
    state: State,
    lengths: Tensor | None,
    record: Recorder | None = None,
    *,
    plain: bool = False,
) -> Result:
    """ACT on ``x [T, B, I]`` (or int ``[T, B]``) for the cells of torch.nn, on a CPU or a GPU."""
    kind, cell = kind_of(net.cell), net.cell
    if lengths is not None:
        lengths = lengths.to(x.device)
        present = torch.arange(len(x), device=x.device).unsqueeze(1) < lengths
        x = torch.where(present.unsqueeze(-1) if x.is_floating_point() else present, x, torch.zeros_like(x))
        lengths = lengths.unsqueeze(0)
    biases = (cell.bias_ih, cell.bias_hh) if cell.bias else (None, None)
    h, c = state if kind.leaves == 2 else (state, None)
    inputs = Inputs(x, cell.weight_ih, cell.weight_hh, *biases, net.halt.weight, net.halt.bias, h, c)
    rules = Rules(kind, net.epsilon, net.max_steps, net.force_steps, lengths)
    if record is None:
        out = fused_networks(inputs, rules, plain=plain)
    else:
        with torch.no_grad():
            run = make_run(inputs, rules, plain=plain, keep=True, seen=True)
        out = run.out
        for u in run.trace():
            record(u.t, None)(u.n, u.rows, u.prob, u.p, u.visible)
    final = (out.h, out.c) if out.c is not None else out.h
    return read_out_after(net, Result(out.mean, final, out.steps, out.remainder), padded=lengths is not None)


def fused_calls(
    net: Network, x: Tensor, state: State, lengths: Tensor | None, record: Recorder | None = None
) -> Result:
    """The fused path without the C loop."""
    return fused(net, x, state, lengths, record, plain=True)
