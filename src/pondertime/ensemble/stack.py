"""E networks of one shape with their weights stacked, run at once."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pondertime.act import ACT
from pondertime.backends import why_not_fused
from pondertime.fused.common import Inputs, Rules, kind_of
from pondertime.fused.function import fused_networks
from pondertime.halting import Ponder


class Ensemble(nn.Module):
    """E ACT networks around a cell of ``torch.nn``, independent of each other, as one module.

    Parameters have the names of one network's and an axis E in front; every result has E before
    its batch axis. The gradient of a sum of losses is each network's own.
    """

    def __init__(self, networks: list[ACT], *, plain: bool = False) -> None:
        super().__init__()
        first = networks[0]
        reason = why_not_fused(first, first.halt.weight.device)
        if reason is not None:
            raise ValueError(f"these networks cannot be stacked: {reason}")
        self.template = [first]  # in a list: its weights are not ours
        self.plain = plain
        states = [network.state_dict() for network in networks]
        if any({k: v.shape for k, v in s.items()} != {k: v.shape for k, v in states[0].items()} for s in states):
            raise ValueError("networks of an ensemble must have the same shape")
        if len({rules_of(network) for network in networks}) > 1:
            raise ValueError("networks of an ensemble must halt by the same rules")
        # A container for each module, so that the names are those of one network.
        for name in states[0]:
            owner, _, leaf = name.rpartition(".")
            if not hasattr(self, owner):
                self.add_module(owner, nn.Module())
            self.get_submodule(owner).register_parameter(leaf, nn.Parameter(torch.stack([s[name] for s in states])))

    def weights(self, name: str) -> Tensor:
        return self.get_parameter(name)

    def resolve(self, device: torch.device | str) -> str:
        """The name of the backend that serves calls on ``device``."""
        reason = why_not_fused(self.template[0], torch.device(device))
        if reason is not None:
            raise RuntimeError(f"these networks cannot be stacked: {reason}")
        return "fused-calls" if self.plain else "fused"

    def __len__(self) -> int:
        return len(self.weights("halt.bias"))

    def member(self, e: int) -> ACT:
        """Network e by itself, with a copy of its weights."""
        network = copy.deepcopy(self.template[0])
        network.load_state_dict({name: self.weights(name)[e].detach().cpu() for name in network.state_dict()})
        return network

    def prepare(self, x: Tensor, lengths: Tensor | None = None) -> tuple[Inputs, Rules]:
        """The tensors and the rules of a call."""
        net: Any = self.template[0]
        kind = kind_of(net.cell)
        weights = dict(self.named_parameters())
        zeros = weights["halt.weight"].new_zeros(len(self), x.shape[2], net.cell.hidden_size)
        inputs = Inputs(
            x.transpose(0, 1),
            weights["cell.weight_ih"],
            weights["cell.weight_hh"],
            weights.get("cell.bias_ih"),
            weights.get("cell.bias_hh"),
            weights["halt.weight"],
            weights["halt.bias"],
            zeros,
            zeros if kind.leaves == 2 else None,
            weights.get("output.weight"),
            weights.get("output.bias"),
        )
        lengths = None if lengths is None else lengths.long().contiguous()
        return inputs, Rules(kind, net.epsilon, net.max_steps, net.force_steps, lengths, stacked=True, fresh=True)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Ponder]:
        """Inputs ``[T, E, B, I]`` (or int ``[T, E, B]``), lengths ``[E, B]``; outputs ``[T, E, B, O]``."""
        if lengths is not None and int(lengths.min()) == len(x):
            lengths = None
        out = fused_networks(*self.prepare(x, lengths), plain=self.plain)
        steps, remainder, rho = (a.transpose(0, 1) for a in (out.steps, out.remainder, out.rho))
        return out.y.transpose(0, 1), Ponder(steps, remainder, rho, out.cost)


def rules_of(network: ACT) -> tuple[object, ...]:
    """What networks that run at once must have in common besides their shape."""
    return network.epsilon, network.max_steps, network.force_steps


def stacks(networks: Mapping[int, ACT], most: int) -> Iterator[tuple[list[int], ACT | Ensemble]]:
    """Networks that halt by the same rules at once, at most so many, with their places; one alone as it is."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for e, network in networks.items():
        alike.setdefault(rules_of(network), []).append(e)
    for places in alike.values():
        for first in range(0, len(places), most):
            here = places[first : first + most]
            yield here, networks[here[0]] if len(here) == 1 else Ensemble([networks[e] for e in here])
