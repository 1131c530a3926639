"""One setting: declared in a tree of dataclasses by `key` or `plain`; the type of its values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints


def key(default: Any, sentence: str, *, part: Callable[[Any], Any] = lambda value: value) -> Any:
    """A setting that changes the generated code, so it is part of cache keys.

    `part` takes from a value what changes the code, where not every difference does.
    """
    return field(default=default, metadata={"part": part, "sentence": sentence})


def plain(default: Any, sentence: str) -> Any:
    """A setting that leaves the generated code alone, so cache keys must not contain it."""
    return field(default=default, metadata={"part": None, "sentence": sentence})


class SettingRow(NamedTuple):
    """The description of one setting."""

    name: str
    type: str
    default: Any
    sentence: str
    changes_code: bool


@dataclass(frozen=True, slots=True)
class Option:
    """The type, default and description of one leaf of the tree."""

    kind: Any
    default: Any
    sentence: str
    part: Callable[[Any], Any] | None  # what of a value changes the generated code, if anything


def leaves(kind: type, prefix: str = "") -> Iterator[tuple[str, Option]]:
    """Every setting of a tree of dataclasses, by its dotted name."""
    hints = get_type_hints(kind)
    leaf: Field[Any]
    for leaf in fields(kind):
        hint = hints[leaf.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from leaves(hint, f"{prefix}{leaf.name}.")
        else:
            meta = leaf.metadata
            option = Option(hint, leaf.default, meta["sentence"], meta["part"])
            yield prefix + leaf.name, option


def kind_name(kind: Any) -> str:
    """A type as users read it."""
    if get_origin(kind) is Literal:
        return " | ".join(repr(choice) for choice in get_args(kind))
    if get_args(kind):
        return " | ".join(kind_name(choice) for choice in get_args(kind))
    return "None" if kind is NoneType else str(kind.__name__)


def is_valid(kind: Any, value: Any) -> bool:
    """Whether a value is of this type: numbers are not negative, and True is not one."""
    if get_origin(kind) is Literal:
        return type(value) is str and value in get_args(kind)
    if get_args(kind):
        return any(is_valid(choice, value) for choice in get_args(kind))
    # bool is a subclass of int, but True is not a number of threads.
    return type(value) is kind and (kind is not int or value >= 0)
