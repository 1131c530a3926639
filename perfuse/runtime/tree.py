"""Arguments and results as JSON: nested lists, tuples and dictionaries, tensors at the leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from perfuse.errors import ArtefactError

PLAIN = (type(None), bool, int, float, str)

Place = Callable[[torch.Tensor], int]  # the number under which a tensor is known


class NumberResult(int):
    """A number that a graph returned, such as a size: other calls return others."""

    place: int  # the number of the result

    @staticmethod
    def of(value: int, place: int) -> NumberResult:
        made = NumberResult(value)
        made.place = place
        return made


def describe(value: Any, place: Place) -> list[Any]:
    """The shape of a nested value; each tensor or number of a graph is replaced by its number."""
    if isinstance(value, torch.Tensor):
        return ["tensor", place(value)]
    if isinstance(value, NumberResult):
        return ["tensor", value.place]
    if isinstance(value, PLAIN):
        return ["value", value]
    if isinstance(value, Mapping):
        _check_keys(value)
        return ["dict", {str(key): describe(item, place) for key, item in value.items()}]
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, [describe(item, place) for item in value]]
    raise ArtefactError(
        f"an argument or result of type {type(value).__name__} cannot be saved in an artefact",
        hint="use tensors, plain values, lists, tuples and dictionaries.",
    )


def _check_keys(value: Mapping[Any, Any]) -> None:
    other = next((key for key in value if not isinstance(key, str)), None)
    if other is not None:
        raise ArtefactError(
            f"a dictionary with the key {other!r} cannot be saved in an artefact",
            hint="use strings as keys.",
        )


def rebuild(tree: list[Any], tensors: list[Any]) -> Any:
    """The nested value that `describe` saw, with these tensors."""
    kind, inner = tree
    if kind == "tensor":
        return tensors[inner]
    if kind == "value":
        return inner
    if kind == "dict":
        return {key: rebuild(item, tensors) for key, item in inner.items()}
    items = [rebuild(item, tensors) for item in inner]
    return tuple(items) if kind == "tuple" else items


def collect(tree: list[Any], value: Any, found: dict[int, torch.Tensor], where: str) -> None:
    """Collect the tensors of `value` by number; ArtefactError if its structure differs."""
    kind, inner = tree
    if kind == "tensor":
        _expect(isinstance(value, torch.Tensor), where, "a tensor", value)
        found[inner] = value
    elif kind == "value":
        _expect(type(value) is type(inner) and value == inner, where, repr(inner), value)
    elif kind == "dict":
        _expect(isinstance(value, Mapping), where, "a dictionary", value)
        _expect(list(value) == list(inner), where, f"the keys {list(inner)}", Keys(value))
        for key, item in inner.items():
            collect(item, value[key], found, f"{where}[{key!r}]")
    else:
        _expect(isinstance(value, tuple | list), where, f"a {kind}", value)
        _expect(len(value) == len(inner), where, f"{len(inner)} items", len(value))
        for number, (item, part) in enumerate(zip(inner, value, strict=True)):
            collect(item, part, found, f"{where}[{number}]")


class Keys(list[Any]):
    """Keys of a dictionary argument; their order matters, as it does for iteration."""


def _expect(holds: bool, where: str, wanted: str, got: Any) -> None:
    if not holds:
        given = repr(got) if isinstance(got, (*PLAIN, Keys)) else f"a {type(got).__name__}"
        raise ArtefactError(
            f"{where}: the artefact was compiled for {wanted}, got {given}",
            hint="pass arguments like those it was compiled with, or compile another artefact.",
        )
