"""Faults that a compiler could have, each put into one function of Perfuse.

Every fault leaves memory safe: what it breaks is a value, a layout or a build, not the process.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from perfuse.capture import capture_cache
from perfuse.codegen.cpp import emit, kernel, partials, unit
from perfuse.codegen.host import program as host
from perfuse.ir import index as ix
from perfuse.schedule import arena, in_place
from perfuse.torch_compat.guards import SymbolTable

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


def offset_forgotten_in_a_kernel(patch: Patch) -> None:
    def without(self: Any, index: Any) -> str:
        return ix.render(ix.add(index, -getattr(index, "const", 0)), self.atom)

    patch.setattr(emit.Emitter, "index", without)


def offset_forgotten_by_the_host(patch: Patch) -> None:
    for name in ("_strided", "_window"):
        real = getattr(host.HostWriter, name)

        def without(self: Any, *args: Any, real: Any = real) -> Any:
            at_zero = (replace(a, offset=0) if hasattr(a, "offset") else a for a in args)
            return real(self, *at_zero)

        patch.setattr(host.HostWriter, name, without)


def stride_swapped(patch: Patch) -> None:
    """Results of two dimensions and more, in memory that is large enough for either order."""
    real = host.HostWriter._empty

    def swapped(self: Any, buffer: Any) -> str:
        if len(buffer.shape) < 2 or not all(isinstance(n, int) for n in buffer.shape):
            return real(self, buffer)
        (*first, a, b), size = buffer.strides, ix.product(buffer.shape)
        room = replace(buffer, shape=(size * max(buffer.shape),), strides=(1,))
        dims = f"{self._dims(buffer.shape)}, {self._dims((*first, b, a))}"
        return f"as_strided({real(self, room)}, {dims})"

    patch.setattr(host.HostWriter, "_empty", swapped)


def const_too_many(patch: Patch) -> None:
    real = kernel.parameters_of

    def declared(frame: Any) -> str:
        return re.sub(r"(^|, )(?!const )(\w+\* __restrict)", r"\1const \2", real(frame))

    patch.setattr(kernel, "parameters_of", declared)


def kernel_not_called(patch: Patch) -> None:
    real = unit._Sources._call

    def call(self: Any, name: str, *rest: Any) -> str:
        text = real(self, name, *rest)
        return "(void)p;" if name == "kernel0" else text

    patch.setattr(unit._Sources, "_call", call)


def result_not_written(patch: Patch) -> None:
    def store(self: Any, buffer: str, *rest: Any, **options: Any) -> None:
        self.names.target(buffer)

    patch.setattr(emit.Emitter, "store", store)


def last_item_forgotten(patch: Patch) -> None:
    real = kernel._num_items

    def fewer(frame: Any) -> str:
        return f"({real(frame)} - ({real(frame)} > 1))"

    patch.setattr(kernel, "_num_items", fewer)


def sum_starts_at_one(patch: Patch) -> None:
    real = partials.identity

    def first(kind: str, dtype: Any) -> str:
        return real("prod" if kind == "sum" else kind, dtype)

    patch.setattr(partials, "identity", first)


def life_ends_too_early(patch: Patch) -> None:
    real = arena.first_and_last

    def shortened(groups: Any) -> tuple[dict[str, int], dict[str, int]]:
        first, last = real(groups)
        return first, {name: max(first[name], end - 1) for name, end in last.items()}

    patch.setattr(arena, "first_and_last", shortened)


def written_over_while_read(patch: Patch) -> None:
    """A result takes the memory of an operand that is read elsewhere than where it is written."""

    def fits(kernel: Any, new: str, old: str, program: Any) -> bool:
        a, b = program.buffers[old], program.buffers[new]
        return bool(b.kind == "temp" and (a.dtype, a.shape) == (b.dtype, b.shape))

    patch.setattr(in_place, "_fits", fits)


def key_lacks_a_value(patch: Patch) -> None:
    def place(key: Any, context: Any) -> Any:
        return None if key is None else capture_cache.Place(key.general, [])

    patch.setattr(capture_cache, "place_of", place)


def guard_dropped(patch: Patch) -> None:
    patch.setattr(SymbolTable, "set_guards", lambda self, spelled: True)
