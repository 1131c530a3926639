"""`changing_linear`: a linear layer whose sizes change from call to call, by the CPU's libraries.

oneDNN generates code for each combination of sizes that it meets, and keeps it: 0.65 MB each on one
core of Zen 5 with PyTorch 2.13, whatever the sizes, for up to two thousand of them. So only some
are its own; MKL, which computes any size with the same code, has all others.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

# Lengths in a few buckets are oneDNN's, for some layers of a model and their gradients.
MOST_OF_A_LAYER, MOST = 16, 128
# Sizes stay where they are, so that equal calls have equal results.
_sizes_of_onednn: set[tuple[Any, ...]] = set()
_num_of_a_layer: Counter[tuple[str, int, int]] = Counter()


def changing_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, name: str, scalars: Any, algorithm: str
) -> Tensor:
    """x @ weight.T + bias, with the arguments of oneDNN's call."""
    sizes = (x.shape, weight.shape, bias is None)
    if sizes not in _sizes_of_onednn and not _admit(sizes):
        return torch.nn.functional.linear(x, weight, bias)
    call: Any = torch.ops.mkldnn._linear_pointwise.default
    made: Tensor = call(x, weight, bias, name, scalars, algorithm)
    return made


def _admit(sizes: tuple[Any, ...]) -> bool:
    """Whether oneDNN may take more sizes of this layer: its rows change, or for gradients K."""
    (rows, depth), (columns, _), _ = sizes
    layers = [("rows change", depth, columns), ("K changes", rows, columns)]
    if len(_sizes_of_onednn) >= MOST:
        return False
    if any(_num_of_a_layer[layer] >= MOST_OF_A_LAYER for layer in layers):
        return False
    _sizes_of_onednn.add(sizes)
    _num_of_a_layer.update(layers)
    return True
