"""Weights to and from the plain recurrent layers of ``torch.nn``."""

from typing import Any

import torch
from torch import nn

LAYER_OF: dict[type[nn.Module], type[nn.RNNBase]] = {
    nn.RNNCell: nn.RNN,
    nn.GRUCell: nn.GRU,
    nn.LSTMCell: nn.LSTM,
}
CELL_OF = {layer: cell for cell, layer in LAYER_OF.items()}


def cell_from_plain(rnn: nn.RNNBase) -> nn.Module:
    """A cell with the weights of a plain layer and a flag column of 0."""
    if type(rnn) not in CELL_OF:
        raise TypeError(f"expected an nn.RNN, nn.GRU or nn.LSTM, got {type(rnn).__name__}")
    if rnn.num_layers != 1 or rnn.bidirectional or rnn.proj_size:
        raise ValueError(
            "expected one layer in one direction without projection, got "
            f"num_layers={rnn.num_layers}, bidirectional={rnn.bidirectional}, proj_size={rnn.proj_size}"
        )
    weight = rnn.weight_ih_l0
    options: dict[str, Any] = {"bias": rnn.bias, "device": weight.device, "dtype": weight.dtype}
    if isinstance(rnn, nn.RNN):
        options["nonlinearity"] = rnn.nonlinearity
    cell: Any = CELL_OF[type(rnn)](rnn.input_size + 1, rnn.hidden_size, **options)
    with torch.no_grad():
        cell.weight_ih[:, :-1] = weight
        cell.weight_ih[:, -1] = 0
        cell.weight_hh.copy_(rnn.weight_hh_l0)
        if rnn.bias:
            cell.bias_ih.copy_(rnn.bias_ih_l0)
            cell.bias_hh.copy_(rnn.bias_hh_l0)
    return cell


def plain_from_cell(cell: Any, batch_first: bool) -> nn.RNNBase:
    """A plain layer that computes one update a step; the flag is part of its bias."""
    if type(cell) not in LAYER_OF:
        raise TypeError(f"expected an nn.RNNCell, nn.GRUCell or nn.LSTMCell, got {type(cell).__name__}")
    weight, flag = cell.weight_ih[:, :-1], cell.weight_ih[:, -1]
    options: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype, "batch_first": batch_first}
    if isinstance(cell, nn.RNNCell):
        options["nonlinearity"] = cell.nonlinearity
    bias = cell.bias or bool(flag.any())
    rnn: Any = LAYER_OF[type(cell)](cell.input_size - 1, cell.hidden_size, bias=bias, **options)
    with torch.no_grad():
        rnn.weight_ih_l0.copy_(weight)
        rnn.weight_hh_l0.copy_(cell.weight_hh)
        if bias:
            rnn.bias_ih_l0.copy_(flag + cell.bias_ih if cell.bias else flag)
            rnn.bias_hh_l0.copy_(cell.bias_hh if cell.bias else torch.zeros_like(flag))
    return rnn
