"""The table of ops that look at storage, held against the operators PyTorch registers."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from perfuse.graph.storage_ops import (
    SEEING,
    TREATMENTS,
    Treatment,
    storage_treatment,
    treatment_of,
)
from perfuse.lower import families
from perfuse.lower.registry import LOWERINGS

assert families  # importing the op families fills the registry

# Words in the names of ops that say something of memory, beyond elements.
FAMILY = re.compile(
    r"strid|storage|resize|^_?set_|shallow_copy|contiguous|alias|reshape|view|unfold|clone|to_copy|pin_mem|nested"
    r"|^is_|^_is_|^__is__|dense_dim|(strided|slice|select|diagonal)_scatter$|slice_inverse"
)


def schemas() -> Iterator[tuple[str, torch.FunctionSchema]]:
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::"):
            yield schema.name.removeprefix("aten::"), schema


def returns_view(schema: torch.FunctionSchema) -> bool:
    """A result shares memory with an argument that the op does not write to."""
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    return not writes and any(r.alias_info is not None for r in schema.returns)


def has_memory_format(schema: torch.FunctionSchema) -> bool:
    return any(a.name == "memory_format" for a in schema.arguments)


def looks_at_storage(name: str, schema: torch.FunctionSchema) -> bool:
    return returns_view(schema) or has_memory_format(schema) or bool(FAMILY.search(name))


def test_every_op_that_may_look_at_storage_has_a_treatment() -> None:
    found = {name for name, schema in schemas() if looks_at_storage(name, schema)}
    assert {"as_strided", "set_", "view", "unfold", "clone", "_nested_view_from_buffer"} <= found
    unknown = sorted(name for name in found if treatment_of(name) is None)
    assert not unknown, f"say in graph/storage_ops.py how these are kept right: {unknown}"


def test_the_table_names_ops() -> None:
    """Of this or another supported version of PyTorch: a misspelled row would protect nothing."""
    known = {name for name, _ in schemas()}
    seeing = {n.partition(".")[0] for n, (t, _) in TREATMENTS.items() if t in SEEING}
    assert seeing <= known


@pytest.mark.parametrize("name", [n for n, (t, _) in TREATMENTS.items() if t is Treatment.LOWERED])
def test_lowered_ops_have_lowerings(name: str) -> None:
    assert getattr(torch.ops.aten, name).default in LOWERINGS


@pytest.mark.parametrize("name", [n for n, (t, _) in TREATMENTS.items() if t is Treatment.VIEW])
def test_views_share_memory_by_their_schema(name: str) -> None:
    ours = [schema for known, schema in schemas() if known == name]
    assert any(map(returns_view, ours))


def test_overloads_may_differ() -> None:
    assert storage_treatment(torch.ops.aten.view.dtype) is Treatment.OWNED
    assert storage_treatment(torch.ops.aten.view.default) is Treatment.VIEW
    assert storage_treatment(torch.ops.aten.add.Tensor) is None
