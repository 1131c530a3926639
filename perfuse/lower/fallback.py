"""What is not lowered runs as an ATen call inside the program, with its reason kept."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node as FxNode

from perfuse.ir import index as ix
from perfuse.ir.dtype import from_torch
from perfuse.ir.index import Index
from perfuse.ir.program import Extern, Opaque, View
from perfuse.lower.builder import Builder
from perfuse.lower.tensor import Tensor, as_view
from perfuse.torch_compat import is_view_op, op_name


def call_aten(
    builder: Builder, node: FxNode, args: list[Any], kwargs: dict[str, Any], reason: str
) -> Any:
    """Emit the call of a graph node; its results are buffers that ATen allocates."""
    expected = node.meta.get("val")
    several = isinstance(expected, list | tuple)
    results = [_result(builder, e) for e in (expected if several else [expected])]
    outs = tuple(_out_name(r) for r in results)
    metas = [a.meta.get("val") if isinstance(a, FxNode) else None for a in node.args]
    made = Extern(
        op_name(node.target),
        outs,
        tuple(_argument(builder, a, m) for a, m in zip(args, metas, strict=True)),
        tuple((k, _argument(builder, v, _meta(node.kwargs[k]))) for k, v in kwargs.items()),
        reason,
        mutates=_mutated(node, args, kwargs),
        returns_list=several,
        returns_view=is_view_op(node.target),
        origin=builder.origin,
    )
    if ":" in made.op:
        builder.constants[made.op] = node.target
    builder.extern(made)
    return type(expected)(results) if isinstance(expected, tuple) else results if several else results[0]


def _meta(arg: Any) -> Any:
    return arg.meta.get("val") if isinstance(arg, FxNode) else None


def _result(builder: Builder, expected: Any) -> Any:
    if isinstance(expected, torch.Tensor):
        dtype = from_torch(expected.dtype)
        if dtype is None or expected.layout is not torch.strided or expected.device.type != "cpu":
            return Opaque(builder.new_name(), expected)
        shape = builder.symbols.dims(expected.shape)
        strides = builder.symbols.dims(expected.stride())
        return builder.tensor_of(builder.new_buffer(dtype, shape, strides, role="extern"))
    if isinstance(expected, torch.SymInt):
        return builder.symbols.dim(expected)
    if expected is None:
        return None
    return Opaque(builder.new_name(), expected)


def _out_name(result: Any) -> str | None:
    if isinstance(result, Tensor):
        return str(result.value.attr[0])
    if isinstance(result, Opaque):
        return result.name
    atom = ix.as_atom(result) if isinstance(result, Index) else None
    return str(atom.parts[0]) if atom is not None else None


def _argument(builder: Builder, value: Any, meta: Any) -> Any:
    """An argument for ATen: tensors become windows laid out as the traced call saw them."""
    if isinstance(value, Tensor):
        strides = None
        if isinstance(meta, torch.Tensor):
            wanted = builder.symbols.dims(meta.stride())
            dense = all(s != 0 for s, n in zip(wanted, value.shape, strict=True) if n != 1)
            strides = wanted if dense else None
        return builder.view_of(value, strides)
    if isinstance(value, list | tuple):
        return [_argument(builder, v, None) for v in value]
    return value


def _mutated(node: FxNode, args: list[Any], kwargs: dict[str, Any]) -> tuple[str, ...]:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    found = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if isinstance(value, Tensor):
                view = builder_view(value)
                found.append(view.buffer)
    return tuple(found)


def builder_view(value: Tensor) -> View:
    view = as_view(value)
    assert view is not None, "a mutated argument is a window on memory"
    return view
