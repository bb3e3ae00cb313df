"""One step at a time, state in and state out: the same numbers as the whole sequence at once."""

import torch
from torch import nn

import pondertime as pt

torch.manual_seed(0)
rnn = pt.ACT(nn.LSTMCell(8 + 1, 32), 4, halt_bias=-1.0).eval()
x = torch.randn(12, 1, 8)

with torch.no_grad():
    whole = rnn(x)
    state, outputs = None, []
    for step in x.split(1):
        y, state, ponder = rnn(step, state)
        outputs.append(y)
        print(f"{ponder.steps.item()} updates", end="  ")
print()
difference = (torch.cat(outputs) - whole.output).abs().max().item()
print(f"largest difference to the whole sequence: {difference:.1e}")
assert difference < 1e-6
