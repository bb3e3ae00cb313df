"""The public face: ``ACT``, which wraps a recurrent cell, and ``ponder`` for one step of anything."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from pondertime import sequences
from pondertime.backends import BACKENDS, PONDERS, check_backend, resolve
from pondertime.cells import (
    CellSpec,
    check_same,
    check_state,
    check_update,
    describe,
    initial_state,
    is_torch_cell,
    like_of,
    modules_of,
    parameter,
    visible_size,
)
from pondertime.halting import Ponder, State, check_epsilon, check_probabilities
from pondertime.plain import cell_from_plain, plain_from_cell
from pondertime.reference import Record, Result, check_nan


class ACTOutput(NamedTuple):
    """What an ACT network returns."""

    output: Any  # [T, B, O] Tensor, or PackedSequence
    state: State
    ponder: Ponder


class Trace(NamedTuple):
    """Everything that happened, detached; the axis n counts updates, zeros where none was made."""

    output: Any  # [T, B, O] Tensor, or PackedSequence
    state: State
    ponder: Ponder
    h: Tensor  # [n, T, B]
    p: Tensor  # [n, T, B]
    visible: Tensor  # [n, T, B, V]


class PonderOutput(NamedTuple):
    """What :func:`ponder` returns."""

    state: State
    output: Any
    ponder: Ponder


class ACT(nn.Module):
    """Adaptive computation time around any recurrent cell.

    At each input step t the cell makes N(t) updates s^n = S(s^{n-1}, x^n), until the halting units
    h^n = sigma(W_h s^n + b_h) sum to 1 - epsilon or n is ``max_steps``; state and output are the means
    s_t = sum_n p^n s^n and y_t = sum_n p^n (W_y s^n + b_y), where p^n = h^n for n < N and the remainder
    R = 1 - sum_{n<N} h^n for n = N. Add ``tau * ponder.cost.mean()`` to the loss.

    Args:
        cell: a module called as ``state = cell(input, state)``. Its input is the user's with one more
            column at the end: 1 on the first update of an input step, 0 after it.
        output_size: size of the read-out; None returns the mean visible state itself.
        spec: how to use a cell with another protocol, see :class:`CellSpec`.
        epsilon: the halting sum is met at 1 - epsilon.
        max_steps: the paper's M, no more updates than this.
        halt_bias: initial bias of the halting unit, for few updates at the start of training.
        force_steps: exactly this many updates, no halting: 1 is the network without ACT.
        compact: drop halted rows from the batch. False keeps it whole, for cells that mix rows
            (batch norm); those see all rows that have an input at step t, halted or not.
        batch_first: input and output are ``[B, T, ...]``.
        backend: "auto", "reference" (the paper, line by line), "compact" (drops halted rows, any cell) or
            "fused" (the cells of torch.nn). "auto" takes the fastest that can serve a call.
        device, dtype: None for those of the cell; otherwise the whole module is moved there.

    Shapes: input ``[T, B, I]``, ``[T, I]``, integers ``[T, B]`` or ``[T]`` (one-hot), or a
    ``PackedSequence``; output ``[T, B, O]``, the state batch first.
    """

    def __init__(
        self,
        cell: nn.Module,
        output_size: int | None,
        *,
        spec: CellSpec | None = None,
        epsilon: float = 0.01,
        max_steps: int = 100,
        halt_bias: float = 1.0,
        force_steps: int | None = None,
        compact: bool = True,
        batch_first: bool = False,
        backend: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(cell, nn.Module):
            raise TypeError(f"cell: expected a torch.nn.Module, got {type(cell).__name__}")
        if isinstance(cell, nn.RNNBase) and (spec is None or spec.step is None):
            name = type(cell).__name__
            raise TypeError(f"cell: expected a cell such as nn.{name}Cell, got nn.{name}; see ACT.from_rnn")
        if output_size is not None and output_size < 1:
            raise ValueError(f"output_size: expected a positive number or None, got {output_size}")
        self.spec = spec if spec is not None else CellSpec()
        self.epsilon, self.max_steps, self.force_steps = epsilon, max_steps, force_steps
        self.halt_bias, self.compact, self.batch_first = halt_bias, compact, batch_first
        self.backend = backend

        like = like_of(cell)
        # The probe may draw random numbers (dropout); the caller's stay as they are.
        with torch.random.fork_rng([like.device] if like.is_cuda else []):
            size = visible_size(cell, self.spec)
        self.cell = cell
        self.halt = nn.Linear(size, 1, device=like.device, dtype=like.dtype)
        self.output = (
            None if output_size is None else nn.Linear(size, output_size, device=like.device, dtype=like.dtype)
        )
        nn.init.constant_(self.halt.bias, halt_bias)
        if device is not None or dtype is not None:
            self.to(device=device, dtype=dtype)

    @property
    def epsilon(self) -> float:
        return self._epsilon

    @epsilon.setter
    def epsilon(self, value: float) -> None:
        check_epsilon(value)
        self._epsilon = value

    @property
    def max_steps(self) -> int:
        return self._max_steps

    @max_steps.setter
    def max_steps(self, value: int) -> None:
        self._max_steps = positive("max_steps", value)

    @property
    def force_steps(self) -> int | None:
        return self._force_steps

    @force_steps.setter
    def force_steps(self, value: int | None) -> None:
        self._force_steps = None if value is None else positive("force_steps", value)

    @property
    def backend(self) -> str:
        return self._backend

    @backend.setter
    def backend(self, value: str) -> None:
        check_backend(value, self.compact)
        self._backend = value

    def reset_parameters(self) -> None:
        """Draw parameters anew: the cell's own way, else that of its parts, where they have one; halt_bias for b_h."""

        def reset(module: nn.Module) -> None:
            own = getattr(module, "reset_parameters", None)
            if callable(own):
                own()
            else:
                for part in module.children():
                    reset(part)

        for module in self.children():
            reset(module)
        if isinstance(getattr(self.halt, "bias", None), Tensor):
            nn.init.constant_(self.halt.bias, self.halt_bias)

    def extra_repr(self) -> str:
        words = [f"epsilon={self.epsilon}", f"max_steps={self.max_steps}"]
        words += [] if self.force_steps is None else [f"force_steps={self.force_steps}"]
        words += [] if self.compact else ["compact=False"]
        words += ["batch_first=True"] if self.batch_first else []
        words += [] if self.backend == "auto" else [f"backend={self.backend!r}"]
        return ", ".join(words)

    def forward(
        self,
        x: Tensor | PackedSequence,
        state: State | None = None,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> ACTOutput:
        """Run over sequences; ``lengths`` ``[B]`` where they differ."""
        if torch.compiler.is_compiling():
            from pondertime import untraced

            return untraced.serve(self, x, state, lengths)
        return self._serve(x, state, lengths)

    def _serve(self, x: Any, state: State | None, lengths: Any) -> ACTOutput:
        """A call that nobody traces."""
        seqs = self._read(x, state, lengths)
        return self._lay_out(seqs, self._run(seqs))

    @torch.no_grad()
    def trace(
        self,
        x: Tensor | PackedSequence,
        state: State | None = None,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> Trace:
        """Run over sequences and keep h, p and the visible state of every update, detached."""
        seqs = self._read(x, state, lengths)
        updates: list[tuple[int, int, Tensor, tuple[Tensor, Tensor, Tensor]]] = []

        def recorder(t: int, present: Tensor | None) -> Record:
            def record(n: int, rows: Tensor, h: Tensor, p: Tensor, visible: Tensor) -> None:
                updates.append((n, t, rows if present is None else present[rows], (h, p, visible)))

            return record

        result = self._run(seqs, recorder)
        shape = (max(n for n, *_ in updates), *seqs.x.shape[:2])
        filled = [a.new_zeros(*shape, *a.shape[1:]) for a in updates[0][3]]
        for n, t, rows, values in updates:
            for whole, a in zip(filled, values, strict=True):
                whole[n - 1, t].index_copy_(0, rows, a)
        h, p, visible = (seqs.per_step(a, time=1) for a in filled)
        return Trace(*self._lay_out(seqs, result), h, p, visible)

    def _read(self, x: Any, state: State | None, lengths: Any) -> sequences.Sequences:
        size = getattr(modules_of(self)[0], "input_size", None) if self.spec.step is None else None
        features = size - 1 if isinstance(size, int) else None
        seqs = sequences.read(x, state, lengths, batch_first=self.batch_first, features=features)
        if seqs.x.is_floating_point():
            self._check_type("input", seqs.x)
        return seqs

    def _check_type(self, name: str, a: Tensor) -> None:
        """Raise for a type that a cell of torch.nn does not take."""
        cell = modules_of(self)[0]
        if not is_torch_cell(cell):
            return
        expected = parameter(cell, "weight_hh").dtype
        if a.dtype != expected and not torch.is_autocast_enabled(a.device.type):
            raise ValueError(f"{name}: expected the cell's type {expected}, got {a.dtype}")

    def _run(self, seqs: sequences.Sequences, recorder: Any = None) -> Result:
        backend, state, B = self.resolve(seqs.x.device), seqs.state, seqs.x.shape[1]
        plain = state is None and self.spec.initial_state is None
        if state is None and not (plain and backend.startswith("fused")):  # which has zeros of its own
            state = initial_state(self.cell, self.spec, B)
        asked = not plain and (self.spec.step is None or seqs.state is not None)
        if asked and state is not None and is_torch_cell(self.cell):
            own = CellSpec() if self.spec.step is None else self.spec
            check_same(initial_state(self.cell, own, B), state, "state")
            for leaf in tree_leaves(state):
                self._check_type("state", leaf)
        return BACKENDS[backend](self, seqs.x, state, seqs.lengths, recorder)

    def resolve(self, device: torch.device | str) -> str:
        """The name of the backend that serves calls on ``device``."""
        return resolve(self, self.backend, self.compact, torch.device(device))

    def _lay_out(self, seqs: sequences.Sequences, result: Result) -> ACTOutput:
        rho, cost = result.rho, result.cost
        if rho is None:
            rho = result.steps + result.remainder
            cost = rho.sum(0)
        steps, remainder, rho = map(seqs.per_step, (result.steps, result.remainder, rho))
        ponder = Ponder(steps, remainder, rho, seqs.per_sequence(cost))
        return ACTOutput(seqs.output(result.output), seqs.per_sequence(result.state), ponder)

    @classmethod
    def from_rnn(cls, rnn: nn.RNNBase, output_size: int | None = None, **options: Any) -> "ACT":
        """An ACT network with the trained weights of an ``nn.RNN``, ``nn.GRU`` or ``nn.LSTM``.

        The flag's column is 0, so with ``force_steps=1`` it computes what ``rnn`` does; the hidden
        states are its output unless ``output_size`` adds a read-out. ``options`` as for ``ACT``.
        """
        cell = cell_from_plain(rnn)
        options.setdefault("batch_first", rnn.batch_first)
        return cls(cell, output_size, **options)

    from_lstm = from_gru = from_rnn

    def to_rnn(self) -> nn.RNNBase:
        """The plain ``nn.RNN``, ``nn.GRU`` or ``nn.LSTM`` that computes what ``force_steps=1`` does.

        The flag is 1 on every update then, so its column becomes part of the bias.
        """
        return plain_from_cell(self.cell, self.batch_first)


def ponder(
    step: Callable[[Any, State, bool], tuple[State, Any, Tensor]],
    x: Any,
    state: State,
    *,
    epsilon: float = 0.01,
    max_steps: int = 100,
    compact: bool = False,
) -> PonderOutput:
    """Adaptive computation time for one input step and any function.

    ``step(x, state, first) -> (state, output, h)`` makes one update; ``first`` is True on the first, and
    ``h`` ``[B]`` is the probability of halting after it. ``x``, ``state`` and ``output`` may be nested.
    Returns the means of state and output, and the ponder record of this step. With ``compact=True``
    halted rows drop out: then every tensor in ``x`` and ``state`` has the batch first.
    """
    check_epsilon(epsilon)
    positive("max_steps", max_steps)

    def checked(x: Any, state: State, n: int) -> tuple[State, Any, Tensor]:
        new, output, h = step(x, state, n == 1)
        if h.dim() != 1 or len(h) == 0 or not h.is_floating_point():
            raise ValueError(f"h: expected halting probabilities [B] with B >= 1, got {h.dtype} {list(h.shape)}")
        check_nan(h, f"update {n}")
        check_probabilities(h)
        if tree_leaves(new):
            check_state(new, len(h))
        if state is not None:
            check_update(state, new, n)
        if compact and n == 1:
            check_rows(x, len(h))
        if output is None:
            return new, (), h
        if tree_leaves(output):
            check_state(output, len(h), "output")
        return new, output, h

    run = PONDERS["compact" if compact else "reference"]
    s, y, steps, remainder = run(checked, x, state, epsilon, max_steps)  # y is () where there is no output
    rho = steps + remainder
    return PonderOutput(s, None if y == () else y, Ponder(steps, remainder, rho, rho))


def check_rows(x: Any, batch_size: int) -> None:
    """Raise unless every tensor of an input has the batch first: rows will be dropped."""
    if any(a.dim() == 0 or len(a) != batch_size for a in tree_leaves(x) if isinstance(a, Tensor)):
        raise ValueError(
            f"x: with compact=True expected tensors [B, ...] with batch size B = {batch_size}, got {describe(x)}; "
            "what all rows share belongs into step itself"
        )


def positive(name: str, value: int) -> int:
    """A number of updates, at least 1."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < 1:
        raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")
    return operator.index(value)
