"""Truncated back-propagation: a long sequence in pieces, the state handed on without its graph."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

import pondertime as pt

torch.manual_seed(0)
rnn = pt.ACT(nn.LSTMCell(26 + 1, 64), 26)
optimiser = torch.optim.Adam(rnn.parameters(), 1e-2)
# The alphabet again and again, eight sequences that start at different letters.
text = (torch.arange(2001).unsqueeze(1) + torch.arange(8)) % 26

state = None
for start in range(0, 2000, 50):
    x, target = text[start : start + 50], text[start + 1 : start + 51]
    y, state, ponder = rnn(x, state)
    state = tree_map(torch.Tensor.detach, state)
    loss = F.cross_entropy(y.flatten(0, 1), target.flatten()) + 1e-3 * ponder.cost.mean() / len(x)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    if start % 250 == 0:
        print(f"{start:4d}  loss {loss.item():.3f}  updates per letter {ponder.steps.float().mean().item():.2f}")
