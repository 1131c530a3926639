"""A matmul as an op of our own: one that is written into unaligned rows with aligned stores.

`perfuse::aligned_product(a, b)` is `a @ b`. `pad_matmuls` uses it where the result has to be
as eager lays it; its lowering, in `lower/families/matmul.py`, says how it is written. What is
here runs where a graph runs eagerly.
"""

from typing import Any

import torch
from torch import Tensor

_open_library: Any = torch.library.Library  # untyped in torch
_library = _open_library("perfuse", "FRAGMENT")
_library.define("aligned_product(Tensor a, Tensor b) -> Tensor")
_library.impl("aligned_product", torch.mm, "CompositeExplicitAutograd")

aligned_product = torch.ops.perfuse.aligned_product.default


def _fake_product(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


_library.impl("aligned_product", _fake_product, "Meta")
