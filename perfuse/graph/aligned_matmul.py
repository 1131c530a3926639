"""A matmul as a custom op: one that is written into unaligned rows with aligned stores.

`perfuse::aligned_matmul(a, b)` is `a @ b`. `pad_matmuls` uses it where the result has to have
eager's strides; its lowering, in `lower/families/matmul.py`, says how it is written. The code here
is for graphs that run eagerly.
"""

from typing import Any

import torch
from torch import Tensor

_open_library: Any = torch.library.Library  # untyped in torch
_library = _open_library("perfuse", "FRAGMENT")
_library.define("aligned_matmul(Tensor a, Tensor b) -> Tensor")
_library.impl("aligned_matmul", torch.mm, "CompositeExplicitAutograd")

aligned_matmul = torch.ops.perfuse.aligned_matmul.default


def _fake_result(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


_library.impl("aligned_matmul", _fake_result, "Meta")
