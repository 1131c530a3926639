"""Matmuls of a value that is computed in chunks of its rows, as custom ops.

`perfuse::matmul_after(a, b, bias, after)` is `a @ b + bias`, computed when the values of `after`
are: chunk follows chunk, so that the memory of one is free before the next is computed.
`perfuse::copy_after(x, after)` is a copy of `x`, for what a chunk computes without its logits.
`perfuse::add_matmul(total, a, b)` is `total + a @ b`, summed in the type of the total. A caller
reads that total nowhere else: its lowering, in `lower/families/chunks.py`, adds in place. The
code here is for graphs that run eagerly.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_open_library: Any = torch.library.Library  # untyped in torch
_library = _open_library("perfuse", "FRAGMENT")
_library.define("matmul_after(Tensor a, Tensor b, Tensor? bias, Tensor[] after) -> Tensor")
_library.define("copy_after(Tensor x, Tensor[] after) -> Tensor")
_library.define("add_matmul(Tensor total, Tensor a, Tensor b) -> Tensor")


def _matmul_after(a: Tensor, b: Tensor, bias: Tensor | None, _: Sequence[Tensor]) -> Tensor:
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def _copy_after(x: Tensor, _: Sequence[Tensor]) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _add_matmul(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(total, a.to(total.dtype), b.to(total.dtype))


def _fake_matmul(a: Tensor, b: Tensor, bias: Tensor | None, _: Sequence[Tensor]) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


def _fake_copy(x: Tensor, _: Sequence[Tensor]) -> Tensor:
    return x.new_empty(x.shape)


def _fake_sum(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return total.new_empty(total.shape)


_library.impl("matmul_after", _matmul_after, "CompositeExplicitAutograd")
_library.impl("copy_after", _copy_after, "CompositeExplicitAutograd")
_library.impl("add_matmul", _add_matmul, "CompositeExplicitAutograd")
_library.impl("matmul_after", _fake_matmul, "Meta")
_library.impl("copy_after", _fake_copy, "Meta")
_library.impl("add_matmul", _fake_sum, "Meta")

matmul_after = torch.ops.perfuse.matmul_after.default
copy_after = torch.ops.perfuse.copy_after.default
add_matmul = torch.ops.perfuse.add_matmul.default
