"""Where views begin that start at an index from data: formulas of storage offsets.

PyTorch traces such an offset as a new symbol, since an index below zero counts from the end. No
call gives it: the view may have been lowered to a formula, or moved to other memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node as FxNode

from perfuse.lower.symbols import Symbols
from perfuse.lower.traced import is_plain_tensor, value
from perfuse.torch_compat.ops import schema_of

aten = torch.ops.aten
# From the offset of the source, its step along the axis, its size there, and the index.
_FORMULAS: dict[Any, str] = {
    aten.slice.Tensor: "({0} + {1} * min(max({3} + {2} * ({3} < 0), 0), {2}))",
    aten.select.int: "({0} + {1} * place_of({3}, {2}))",
}


def learn_offset(node: FxNode, symbols: Symbols) -> None:
    """Define the symbol that the storage offset of this node's value is, if it is a new one."""
    formula = _FORMULAS.get(node.target)
    made: Any = node.meta.get("val")
    if formula is None or not is_plain_tensor(made):
        return
    offset = made.storage_offset()
    if symbols.is_unknown_symbol(offset):
        names = [argument.name for argument in schema_of(node.target).arguments]
        given = dict(zip(names, map(value, node.args), strict=False))
        source, axis = given["self"], given.get("dim", 0)
        index = given["start" if "start" in names else "index"]
        place = source.storage_offset(), source.stride(axis), source.shape[axis]
        symbols.define(offset, formula, *place, index)
