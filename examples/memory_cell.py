"""A cell with a memory matrix in its state: ACT takes the mean of all of it, however nested."""

import torch
from torch import Tensor, nn

import pondertime as pt

State = dict[str, Tensor]


class MemoryCell(nn.Module):
    """A GRU that reads one slot of its memory by content and writes to it at every update."""

    def __init__(self, input_size: int, hidden_size: int, slots: int, width: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.slots, self.width = input_size, hidden_size, slots, width
        self.controller = nn.GRUCell(input_size + width, hidden_size)
        self.key = nn.Linear(hidden_size, width)
        self.value = nn.Linear(hidden_size, width)

    def forward(self, x: Tensor, state: State) -> State:
        hidden, memory = state["hidden"], state["memory"]  # [B, H], [B, slots, width]
        weight = torch.softmax((memory @ self.key(hidden).unsqueeze(2)).squeeze(2), 1)  # [B, slots]
        read = (weight.unsqueeze(1) @ memory).squeeze(1)
        hidden = self.controller(torch.cat([x, read], 1), hidden)
        written = weight.unsqueeze(2) * torch.tanh(self.value(hidden)).unsqueeze(1)
        return {"hidden": hidden, "memory": memory * (1 - weight.unsqueeze(2)) + written}


def initial_state(cell: MemoryCell, batch_size: int) -> State:
    """Slots must differ for the first read to choose one."""
    like = cell.key.weight
    memory = torch.eye(cell.slots, cell.width, dtype=like.dtype, device=like.device)
    return {"hidden": like.new_zeros(batch_size, cell.hidden_size), "memory": memory.expand(batch_size, -1, -1)}


SPEC = pt.CellSpec(visible=lambda state: state["hidden"], initial_state=initial_state)


def main() -> None:
    torch.manual_seed(0)
    rnn = pt.ACT(MemoryCell(8 + 1, 16, slots=6, width=4), 3, spec=SPEC)
    y, state, ponder = rnn(torch.randn(5, 2, 8))
    (y.pow(2).sum() + 0.01 * ponder.cost.sum()).backward()
    print(f"output {tuple(y.shape)}, memory {tuple(state['memory'].shape)}, steps {ponder.steps.tolist()}")


if __name__ == "__main__":
    main()
