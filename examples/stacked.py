"""Two adaptive layers: the second reads the first one's mean state and thinks for itself."""

import torch
from torch import nn

import pondertime as pt

torch.manual_seed(0)
lower = pt.ACT(nn.GRUCell(8 + 1, 32), None)
upper = pt.ACT(nn.LSTMCell(32 + 1, 32), 4)

x = torch.randn(10, 5, 8)
hidden, _, ponder_low = lower(x)
y, _, ponder_high = upper(hidden)
loss = y.pow(2).mean() + 0.01 * (ponder_low.cost + ponder_high.cost).mean()
loss.backward()
print(f"output {tuple(y.shape)}, updates per step: {ponder_low.steps.float().mean():.2f} below, ", end="")
print(f"{ponder_high.steps.float().mean():.2f} above")
