"""LSTM layers, on Dynamo's graph, computed by the library that eager would call.

PyTorch decomposes an LSTM while it is traced, unlike eager: under autocast its results have other
dtypes, dropout between layers is left out, and a layer whose input needs no gradient cannot be
trained. Where eager calls oneDNN, layer by layer, so does the traced graph, in training as well:
its size does not depend on the length of the sequence.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from perfuse.graph.copying import GraphCopy, copy_but_for

aten = torch.ops.aten
LSTM_MODE = 2  # among oneDNN's kinds of recurrent networks
_NUM_ARGUMENTS = 9  # of a padded sequence; a packed one has its batch sizes second


def call_recurrent_layers(gm: GraphModule) -> GraphModule:
    """The pass: a new module where there is an LSTM over a padded sequence."""
    calls = {node for node in gm.graph.nodes if _is_padded_lstm(node)}
    if not calls:
        return gm

    def made(node: Node, new: GraphCopy) -> Node:
        copied = new.copy(node)
        if node in calls:
            copied.target = lstm
        return copied

    return copy_but_for(gm, made)


def _is_padded_lstm(node: Node) -> bool:
    is_lstm = node.op == "call_function" and node.target is torch.lstm
    has_form = is_lstm and len(node.args) == _NUM_ARGUMENTS and not node.kwargs
    return has_form and isinstance(node.args[1], tuple | list)


class Options(NamedTuple):
    """The arguments of `torch.lstm` that are not tensors."""

    has_biases: bool
    num_layers: int
    dropout: float
    trains: bool
    is_bidirectional: bool
    is_batch_first: bool


def lstm(
    x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], *given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `torch.lstm` does, with its arguments."""
    if not _is_library_call(x, states, weights):
        return torch.lstm(x, list(states), list(weights), *given)
    options = Options(*given)
    y = (x.transpose(0, 1) if options.is_batch_first else x).contiguous()
    num_directions = 1 + options.is_bidirectional
    num_weights = 4 if options.has_biases else 2
    finals: list[tuple[Tensor, Tensor]] = []
    for layer in range(options.num_layers):
        directions = []
        for is_reverse in (False, True)[:num_directions]:
            i = len(finals)
            own = weights[i * num_weights :][:num_weights]
            result, *final = _layer(y, own, states[0][i], states[1][i], is_reverse)
            directions.append(result)
            finals.append((final[0], final[1]))
        y = directions[0] if num_directions == 1 else torch.cat(directions, -1)
        if options.dropout and options.trains and layer < options.num_layers - 1:
            y = torch.dropout(y, options.dropout, True)
    hidden, cell = (torch.stack(parts) for parts in zip(*finals, strict=True))
    return y.transpose(0, 1) if options.is_batch_first else y, hidden, cell


def _is_library_call(x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> bool:
    """Whether eager calls oneDNN (use_mkldnn in ATen/native/RNN.cpp)."""
    if not torch.backends.mkldnn.enabled or states[0].shape[2] != states[1].shape[2]:
        return False
    if any(t.device.type != "cpu" for t in (x, *states, *weights)) or x.numel() == 0:
        return False
    if x.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if x.dtype is torch.float16:
        is_supported = bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
        return is_supported and not torch.is_grad_enabled()
    return x.dtype is torch.float32


def _layer(
    x: Tensor,
    weights: Sequence[Tensor],
    hidden: Tensor,
    cell: Tensor,
    is_reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One direction of one layer: its results, and the last states."""
    has_biases = len(weights) == 4
    biases = () if has_biases else [w.new_zeros(w.shape) for w in weights]
    result, last_hidden, last_cell, _ = aten.mkldnn_rnn_layer.default(
        x,
        *weights,
        *biases,
        hidden,
        cell,
        reverse=is_reverse,
        batch_sizes=[],
        mode=LSTM_MODE,
        hidden_size=hidden.shape[-1],
        num_layers=1,
        has_biases=has_biases,
        bidirectional=False,
        batch_first=False,
        train=torch.is_grad_enabled(),  # eager's choice of kernel, in evaluation mode too
    )
    return result, last_hidden, last_cell
