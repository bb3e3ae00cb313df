"""The fused path as one differentiable function, and as a backend of ACT."""

import functools
from typing import Any

import torch
from torch import Tensor

from pondertime.cells import Network, hooked, modules_of, parameter
from pondertime.fused import calls, native
from pondertime.fused.common import Grads, Inputs, Outputs, Rules, capturing, check_inputs, kind_of, stream_of
from pondertime.halting import State
from pondertime.reference import Recorder, Result, read_out_after

# Rows of tape that calls of a shape needed last time.
_rows: dict[tuple[int, ...], int] = {}


def make_run(inputs: Inputs, rules: Rules, *, plain: bool, keep: bool, seen: bool = False, again: bool = False) -> Any:
    """Run E networks forward: on a GPU with Triton, else with the C loop, or with plain calls where there is none.

    ``again``: many steps are made with the run, where it has a ``step``.
    """
    if torch.is_autocast_enabled(inputs.h.device.type):
        # The rules say which products are made in bfloat16.
        with torch.autocast(inputs.h.device.type, enabled=False):
            return make_run(inputs, rules, plain=plain, keep=keep, seen=seen, again=again)
    if inputs.h.is_cuda:
        from pondertime.fused import triton_run

        return triton_run.make(inputs, rules, keep=keep, seen=seen, again=again)
    check_inputs(inputs, rules.kind)
    lib = native.library()
    if plain or isinstance(lib, str):
        return calls.make(inputs, rules, keep=keep, seen=seen)
    T, B = inputs.x.shape[inputs.h.dim() - 2], inputs.h.shape[-2]
    shape = (T, *inputs.h.shape, rules.kind.slots)
    run = native.Run(lib, inputs, rules, rows=_rows.get(shape, 2 * T * B), keep=keep, seen=seen)
    if keep:
        _rows[shape] = int(1.05 * run.rows) + B
    return run


class Fused(torch.autograd.Function):
    """ACT of E networks with the closed-form backward pass; once differentiable.

    Unless the rules say stacked, the tensors are those of one network and have no axis E.
    """

    @staticmethod
    def forward(ctx, rules: Rules, plain: bool, *tensors: Any):
        run = make_run(Inputs(*tensors), rules, plain=plain, keep=True)
        # A result must not be held by what it holds: that would never be freed.
        outputs, run.out = tuple(run.out.whole()), None
        ctx.run, ctx.options, ctx.device = run, (rules, plain), outputs[1].device.type
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(outputs[3])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any):  # type: ignore[override]
        if torch.is_autocast_enabled(ctx.device):
            with torch.autocast(ctx.device, enabled=False):
                return Fused.backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return None, None, *Fused.once(ctx, *grads)
        with torch.no_grad():
            made = Fused.once(ctx, *grads)
        there = iter(Twice.apply(*(a.requires_grad_() for a in made if a is not None)))
        return None, None, *(None if a is None else next(there) for a in made)

    @staticmethod
    def once(ctx: Any, d_y: Any, d_h: Any, d_c: Any, _: Any, *d_ponder: Any) -> Inputs:
        rules, plain = ctx.options
        inputs = Inputs(*ctx.saved_tensors)
        run, ctx.run = ctx.run, None
        if run is None:
            # The tape was used up by a backward pass that kept the graph: make it again.
            run = make_run(inputs, rules, plain=plain, keep=True)
        return run.backward(Grads.by_outputs(d_y, d_h, d_c, *d_ponder, T=run.T), x=ctx.needs_input_grad[2])


class Twice(torch.autograd.Function):
    """Hands gradients on, and says so when somebody differentiates them again."""

    @staticmethod
    def forward(ctx, *grads: Any):
        return tuple(a.view_as(a) for a in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Any):  # type: ignore[override]
        raise RuntimeError("the fused path is once differentiable; backend='reference' has second derivatives")


def fused_networks(inputs: Inputs, rules: Rules, *, plain: bool = False) -> Outputs:
    """E networks at once; differentiable where any input asks for it."""
    keep = torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in inputs)
    if not keep:
        return make_run(inputs, rules, plain=plain, keep=False).out.whole()
    return Outputs(*Fused.apply(rules, plain, *inputs))


def first_state(weight: Tensor, B: int, H: int) -> Tensor:
    """Zeros, which nobody writes to; on a GPU, where a call costs more than the numbers, the same ones each time."""
    stream = stream_of(weight.device)
    if not weight.is_cuda or torch._C._len_torch_dispatch_stack() or capturing(stream):
        return weight.detach().new_zeros(B, H)
    return kept_zeros(B, H, weight.device, stream)


@functools.lru_cache(maxsize=16)
def kept_zeros(B: int, H: int, device: torch.device, stream: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(B, H, device=device, dtype=torch.float32)


def prepare(net: Network, x: Tensor, state: Any, lengths: Tensor | None) -> tuple[Inputs, Rules]:
    """The tensors and the rules of a call on ``x [T, B, I]`` (or int ``[T, B]``); no state is one of zeros."""
    cell, halt, output = modules_of(net)
    kind, weight = kind_of(cell), parameter(cell, "weight_hh")
    if lengths is not None:
        lengths = lengths.to(x.device)
        present = torch.arange(len(x), device=x.device).unsqueeze(1) < lengths
        x = torch.where(present.unsqueeze(-1) if x.is_floating_point() else present, x, torch.zeros_like(x))
        lengths = lengths.unsqueeze(0).long().contiguous()
    biases = (parameter(cell, "bias_ih"), parameter(cell, "bias_hh")) if cell.bias else (None, None)
    fresh = state is None
    if fresh:
        state = first_state(weight, x.shape[1], cell.hidden_size)
        state = (state, state) if kind.leaves == 2 else state
    h, c = state if kind.leaves == 2 else (state, None)
    half = torch.is_autocast_enabled(x.device.type)
    if half:
        # States, sums and the tape stay float32.
        x, h, c = (x.float() if x.is_floating_point() else x), h.float(), None if c is None else c.float()
    # A read-out that is watched, or of another type, is called; any other is one more product of the loop.
    weight_y = bias_y = None
    if output is not None and not hooked(output):
        weight_y, bias_y = parameter(output, "weight"), parameter(output, "bias")
    if weight_y is not None and (weight_y.dtype != h.dtype or len(weight_y) == 0):
        weight_y = bias_y = None
    halting = parameter(halt, "weight"), parameter(halt, "bias")
    inputs = Inputs(x, parameter(cell, "weight_ih"), weight, *biases, *halting, h, c, weight_y, bias_y)
    return inputs, Rules(kind, net.epsilon, net.max_steps, net.force_steps, lengths, half=half, fresh=fresh)


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
    inputs, rules = prepare(net, x, state, lengths)
    if record is None:
        out = fused_networks(inputs, rules, plain=plain)
    else:
        with torch.no_grad():
            run = make_run(inputs, rules, plain=plain, keep=True, seen=True)
        out = run.out.whole()
        for u in run.trace():
            record(u.t, None)(u.n, u.rows, u.prob, u.p, u.visible)
    final = (out.h, out.c) if out.c is not None else out.h
    result = Result(out.y, final, out.steps, out.remainder, out.rho, out.cost)
    return result if inputs.weight_y is not None else read_out_after(net, result, padded=lengths is not None)


def fused_calls(
    net: Network, x: Tensor, state: State, lengths: Tensor | None, record: Recorder | None = None
) -> Result:
    """The fused path without the C loop."""
    return fused(net, x, state, lengths, record, plain=True)
