"""Calls of a frozen graph: what depends on parameters only is computed when they change.

A parameter has changed if it is another tensor, in other memory, or of another version, which every
write in place raises. One compiled graph may serve several modules, so prepared values are kept for
each.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, UntypedStorage

from perfuse.runtime.host_names import Call
from perfuse.torch_compat.tensors import versions_of

data_ptr = Tensor.data_ptr


@dataclass(frozen=True, slots=True)
class _Kept:
    """Prepared values, and the state of the parameters that they were computed from."""

    versions: list[int]
    addresses: list[int]
    values: tuple[Any, ...]
    memory: list[UntypedStorage]  # kept, so that a parameter's new memory has another address
    watched: list[weakref.ref[Tensor]]  # an identity says nothing once its tensor is gone


def prepared_call(
    prepare: Callable[[Sequence[Tensor]], Sequence[Any]],
    rest: Call,
    sources: Sequence[int],
    passed: Sequence[int],
) -> Call:
    """The call of the whole graph: inputs at `passed` go to `rest`, with the prepared values."""
    kept: dict[tuple[int, ...], _Kept] = {}  # by the identities of the sources

    def prepared(held: list[Tensor], names: tuple[int, ...]) -> tuple[Any, ...]:
        if any(tensor.is_inference() for tensor in held):  # those do not count their versions
            return tuple(prepare(held))
        # Read before: another thread may write to a parameter meanwhile.
        versions, addresses = versions_of(held), list(map(data_ptr, held))
        values = tuple(prepare(held))
        kept[names] = _Kept(
            versions,
            addresses,
            values,
            [tensor.untyped_storage() for tensor in held],
            [weakref.ref(tensor, lambda _: kept.pop(names, None)) for tensor in held],
        )
        return values

    def call(args: list[Any]) -> tuple[Any, ...]:
        held = [args[i] for i in sources]
        names = tuple(map(id, held))
        found = kept.get(names)
        if (
            found is None
            or found.versions != versions_of(held)
            or found.addresses != list(map(data_ptr, held))
        ):
            values = prepared(held, names)
        else:
            values = found.values
        inputs = [args[i] for i in passed]
        inputs += values
        args.clear()
        return rest(inputs)

    return call
