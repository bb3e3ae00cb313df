"""The fused path as one differentiable function, and as a backend of ACT."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pondertime.cells import Network
from pondertime.fused import calls, native
from pondertime.fused.common import GRU, Inputs, Outputs, Rules, each, kind_of
from pondertime.halting import State
from pondertime.reference import Recorder, Result, read_out_after

# Rows of tape that calls of a shape needed last time.
_rows: dict[tuple[int, ...], int] = {}


def make_run(inputs: Inputs, rules: Rules, *, plain: bool, keep: bool, seen: bool = False) -> native.Run | calls.Run:
    """Run E networks forward with the C loop, or with plain calls where there is none."""
    lib = native.library()
    if plain or isinstance(lib, str):
        return calls.Run(inputs, rules, keep=keep, seen=seen)
    shape = (*inputs.xw.shape, rules.kind.slots)
    guess = _rows.get(shape, 2 * inputs.xw.shape[1] * inputs.xw.shape[2])
    run = native.Run(lib, inputs, rules, rows=guess, keep=keep, seen=seen)
    if keep:
        _rows[shape] = int(1.1 * run.rows) + 2 * inputs.xw.shape[2]
    return run


class Fused(torch.autograd.Function):
    """ACT of E networks with the closed-form backward pass; once differentiable."""

    @staticmethod
    def forward(ctx, rules: Rules, plain: bool, keep: bool, *tensors: Any):
        run = make_run(Inputs(*tensors), rules, plain=plain, keep=keep)
        ctx.run, ctx.options = run, (rules, plain)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(run.out.steps)
        return tuple(run.out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any):  # type: ignore[override]
        d_mean, d_h, d_c, _, d_remainder = grads
        tensors = ctx.saved_tensors
        if ctx.run is None:
            # The tape was used up by a backward pass that kept the graph: make it again.
            rules, plain = ctx.options
            ctx.run = make_run(Inputs(*tensors), rules, plain=plain, keep=True)
        run, ctx.run = ctx.run, None
        return None, None, None, *run.backward(d_mean, d_h, d_c, d_remainder)


def fused_networks(inputs: Inputs, rules: Rules, *, plain: bool = False) -> Outputs:
    """E networks at once; differentiable where any input asks for it."""
    keep = torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in inputs)
    return Outputs(*Fused.apply(rules, plain, keep, *inputs))


def project(cell, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """W_x x_t + b for all t, the flag's column, and the bias that stays inside a GRU."""
    weight, flag, bias, bias_n = cell.weight_ih[:, :-1], cell.weight_ih[:, -1], None, None
    if cell.bias:
        bias = cell.bias_ih + cell.bias_hh
        if kind_of(cell) is GRU:
            H = cell.hidden_size
            bias = torch.cat([bias[: 2 * H], cell.bias_ih[2 * H :]])
            bias_n = cell.bias_hh[2 * H :]
    elif kind_of(cell) is GRU:
        bias_n = flag.new_zeros(cell.hidden_size)
    if x.is_floating_point():
        return F.linear(x, weight, bias), flag, bias_n
    xw = F.embedding(x.long(), weight.t())
    return xw if bias is None else xw + bias, flag, bias_n


def fused(
    net: Network,
    x: Tensor,
    state: State,
    lengths: Tensor | None,
    record: Recorder | None = None,
    *,
    plain: bool = False,
) -> Result:
    """ACT on ``x [T, B, I]`` (or int ``[T, B]``) for the cells of torch.nn on a CPU."""
    kind = kind_of(net.cell)
    if lengths is not None:
        present = torch.arange(len(x)).unsqueeze(1) < lengths
        x = torch.where(present.unsqueeze(-1) if x.is_floating_point() else present, x, torch.zeros_like(x))
    xw, flag, bias_n = project(net.cell, x)
    h, c = state if kind.leaves == 2 else (state, None)
    parts = (xw, flag, net.cell.weight_hh, bias_n, net.halt.weight.squeeze(0), net.halt.bias.squeeze(0), h, c)
    inputs = each(lambda a: a.unsqueeze(0), parts)
    rules = Rules(kind, net.epsilon, net.max_steps, net.force_steps, None if lengths is None else lengths.unsqueeze(0))
    if record is None:
        out = fused_networks(inputs, rules, plain=plain)
    else:
        run = make_run(inputs, rules, plain=plain, keep=True, seen=True)
        out = run.out
        for u in run.trace():
            record(u.t, None)(u.n, u.rows, u.prob, u.p, u.visible)
    final = (out.h[0], out.c[0]) if out.c is not None else out.h[0]
    return read_out_after(net, Result(out.mean[0], final, out.steps[0], out.remainder[0]))


def fused_calls(
    net: Network, x: Tensor, state: State, lengths: Tensor | None, record: Recorder | None = None
) -> Result:
    """The fused path without the C loop."""
    return fused(net, x, state, lengths, record, plain=True)
