"""Training updates of one network or of several, stacked, on a GPU, recorded."""

from typing import Any

import torch
from torch import Tensor

from pondertime.fused.common import Grads, Inputs, Outputs
from pondertime.fused.function import make_run
from pondertime.tasks import Batch


def by_weights(d: Inputs) -> list[Tensor]:
    """The derivatives by the weights that there are, in the order of the parameters."""
    there = (d.weight_ih, d.weight_hh, d.bias_ih, d.bias_hh, d.halt, d.halt_bias, d.weight_y, d.bias_y)
    return [g for g in there if g is not None]


class Stepper:
    """Makes the updates of a learner by recordings, which read a batch, a price and a rate that stay where they are.

    The host starts some fifteen of them instead of two hundred calls.
    """

    def __init__(self, learner: Any, batch: Batch, run: Any) -> None:
        self.batch, self.run = batch, run
        run.out = None  # of the first batch
        self.price, self.rate = (torch.zeros(size, device=batch.input.device) for size in ((learner.members,), ()))
        # Filled part by part: one pass less than to put copies together, and recorded calls cost the host nothing.
        self.gradient = torch.empty_like(learner.weights.all)
        self.parts = list(learner.weights.views(self.gradient).values())

    @staticmethod
    def make(learner: Any, batch: Batch) -> "Stepper | None":
        """A stepper for batches of this shape; None where their runs cannot be recorded."""
        copies: Any = (None if a is None else a.clone(memory_format=torch.contiguous_format) for a in batch)
        batch = Batch(*copies)
        with torch.no_grad():
            run = make_run(*learner.prepare(batch), plain=False, keep=True, again=True)
        return Stepper(learner, batch, run) if hasattr(run, "step") else None

    @torch.no_grad()
    def step(self, learner: Any, i: int, batch: Batch, price: Any, rate: float) -> Any:
        """Update i; what it shows is overwritten by the next."""
        for mine, a in zip(self.batch, batch, strict=True):
            if mine is not None and a is not None:
                mine.copy_(a)
        self.price.copy_(price) if isinstance(price, Tensor) else self.price.fill_(price)
        self.rate.fill_(rate)

        def judge(out: Outputs) -> tuple[Any, Grads]:
            return learner.judge(out, self.batch, self.price, stacked=self.run.rules.stacked)

        def apply(seen: Any, d: Inputs) -> None:
            for to, made in zip(self.parts, by_weights(d), strict=True):
                to.copy_(made.view(to.shape))
            learner.apply(i, seen.task_loss, self.gradient, self.rate)

        return self.run.step(judge, apply, tuple(learner.failed))
