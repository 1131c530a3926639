"""Restoring what a call for compiling changed: tensors, attributes, random states."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from perfuse.torch_compat.tensors import num_writes

# What is brought back. A value that depends on another, such as the length of a cache, comes along.
PLAIN = (Tensor, type(None), bool, int, float, str)


@contextmanager
def left_as_they_were(tensors: Sequence[Tensor]) -> Iterator[None]:
    """A block after which these tensors, if it wrote to them, and the random state are restored."""
    distinct = [_without_repeats(tensor) for tensor in tensors]
    before = [(tensor, tensor.detach().clone(), num_writes(tensor)) for tensor in distinct]
    is_complete = False
    try:
        with torch.random.fork_rng():
            yield
        is_complete = True
    finally:
        for tensor, value, count in before:
            # A compiled graph counts its writes at its end: none, if it raises.
            is_counted = is_complete and count is not None
            is_written = num_writes(tensor) != count if is_counted else _differ(tensor, value)
            if is_written:
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.copy_(value)


def _differ(tensor: Tensor, value: Tensor) -> bool:
    """Whether they differ, or cannot be compared."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return not is_plain or tensor.is_meta or not torch.equal(tensor, value)


def _without_repeats(tensor: Tensor) -> Tensor:
    """The tensor, with one element where an expanded one repeats it: copies may write to these."""
    if tensor.layout is not torch.strided or tensor.is_nested or 0 not in tensor.stride():
        return tensor
    for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if step == 0 and size > 1:
            tensor = tensor.detach().narrow(dim, 0, 1)
    return tensor


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a function finds a value: an item of a dictionary or list, or a variable."""

    name: str
    owner: Any
    key: Any  # None for a variable of a surrounding function
    value: Any

    def put_back(self) -> bool:
        """Bring the value back; whether another was there."""
        now = _contents(self.owner) if self.key is None else _item(self.owner, self.key)
        if now is self.value:
            return False
        if self.key is None:
            self.owner.cell_contents = self.value
        elif isinstance(self.owner, dict) or self.key < len(self.owner):
            self.owner[self.key] = self.value
        return True


def slots_of(function: Callable[..., Any]) -> list[Slot]:
    """Where a function finds tensors and plain values: its modules, and variables outside of it."""
    slots: list[Slot] = []
    seen: set[int] = set()

    def visit(name: str, value: Any, owner: Any, key: Any) -> None:
        if isinstance(value, PLAIN):
            slots.append(Slot(name, owner, key, value))
        elif id(value) not in seen and isinstance(value, nn.Module | dict | list):
            seen.add(id(value))
            inner = _held(value) if isinstance(value, nn.Module) else value
            for key, item in _items(inner):
                visit(str(key), item, inner, key)

    for name, value, owner, key in _variables(function):
        visit(name, value, owner, key)
    return slots


def modules_of(function: Callable[..., Any]) -> list[nn.Module]:
    """The modules that a function is, is a method of, or refers to."""
    values = (value for _, value, _, _ in _variables(function))
    return [value for value in values if isinstance(value, nn.Module)]


def _variables(function: Any) -> list[tuple[str, Any, Any, Any]]:
    """Everything that a function refers to: name, value, and where that is found."""
    if isinstance(function, functools.partial):
        return _variables(function.func)
    if isinstance(function, MethodType):
        own = function.__self__
        is_module = isinstance(own, nn.Module)
        held = [("self", own if is_module else getattr(own, "__dict__", {}), None, None)]
        return [*held, *_variables(function.__func__)]
    if not isinstance(function, FunctionType):
        return [("self", function, None, None)]
    code, known = function.__code__, function.__globals__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    return [
        *((name, _contents(cell), cell, None) for name, cell in cells),
        *((name, known[name], known, name) for name in code.co_names if name in known),
    ]


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


def _held(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module; none of one whose first call sets its sizes, and its class."""
    return {} if isinstance(module, nn.modules.lazy.LazyModuleMixin) else vars(module)


def _items(values: dict[Any, Any] | list[Any]) -> list[tuple[Any, Any]]:
    return list(values.items()) if isinstance(values, dict) else list(enumerate(values))


def _item(values: dict[Any, Any] | list[Any], key: Any) -> Any:
    if isinstance(values, dict):
        return values.get(key)
    return values[key] if key < len(values) else None
