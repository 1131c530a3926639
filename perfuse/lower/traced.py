"""Traced shapes and dtypes of nodes, and the check that a lowering agrees with them."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node as FxNode

from perfuse.ir.dtype import from_torch
from perfuse.lower.registry import CannotLower
from perfuse.lower.symbols import Symbols
from perfuse.lower.tensor import Tensor


def value(arg: Any) -> Any:
    return arg.meta.get("val") if isinstance(arg, FxNode) else arg


def is_plain_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def has_tensor_input(node: FxNode) -> bool:
    return any(isinstance(n.meta.get("val"), torch.Tensor) for n in node.all_input_nodes)


def all_plain(node: FxNode, expected: Any, device: torch.device) -> bool:
    """Whether all operands and results are supported tensors, or CPU scalars that can be moved."""
    results = list(expected) if isinstance(expected, list | tuple) else [expected]
    if not all(is_computable(item, device) for item in _tensors(results)):
        return False
    read = _tensors([n.meta.get("val") for n in node.all_input_nodes])
    return all(is_computable(item, device) or is_movable(item, device) for item in read)


def _tensors(values: list[Any]) -> list[torch.Tensor]:
    flat = [item for v in values for item in (v if isinstance(v, list | tuple) else [v])]
    return [item for item in flat if isinstance(item, torch.Tensor)]


def is_computable(value: torch.Tensor, device: torch.device) -> bool:
    """A strided tensor on the device of the program, of a dtype we generate code for.

    Its memory holds its elements: that of a negative view (`z.conj().imag`) holds their negatives.
    """
    known = is_plain_tensor(value) and from_torch(value.dtype) is not None
    return known and value.device == device and not value.is_neg()


def is_movable(value: Any, device: torch.device) -> bool:
    """A CPU scalar, which PyTorch lets every GPU op read."""
    if not isinstance(value, torch.Tensor) or value.ndim or value.device.type != "cpu":
        return False
    return device.type != "cpu" and from_torch(value.dtype) is not None


def checked(result: Any, expected: Any, symbols: Symbols) -> Any:
    """Check a lowering's result: one that disagrees with PyTorch's shape or dtype is not used."""
    if isinstance(result, tuple | list):
        pairs = zip(result, expected, strict=False)
        return type(result)([checked(r, e, symbols) for r, e in pairs])
    if isinstance(result, Tensor) and isinstance(expected, torch.Tensor):
        want = symbols.dims(expected.shape)
        if symbols.unknown(want):
            raise CannotLower("its result has a data-dependent size")
        if result.dtype is not from_torch(expected.dtype) or len(want) != result.ndim:
            raise CannotLower(f"lowered to {result.dtype}{result.shape}, expected {expected}")
        if any(h != w for h, w in zip(result.shape, want, strict=True)):
            if all(isinstance(d, int) for d in (*result.shape, *want)):
                raise CannotLower(f"lowered to shape {result.shape}, expected {want}")
    return result
