"""Fallbacks: ops without a lowering run as ATen calls in the program, with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.fx import Node as FxNode

from perfuse.decision import library
from perfuse.errors import UnsupportedOp
from perfuse.graph.facts import op_facts
from perfuse.ir import index as ix
from perfuse.ir.atoms import Symbol
from perfuse.ir.dtype import DType, from_torch
from perfuse.ir.index import Index
from perfuse.ir.matmul import Operands, matmul_call, matmul_op
from perfuse.ir.program import (
    BufferKind,
    Extern,
    LibraryCall,
    Matmul,
    NewSize,
    Opaque,
    SizeFromData,
    View,
)
from perfuse.lower.builder import Builder
from perfuse.lower.layout import dense_order
from perfuse.lower.tensor import Tensor, as_view, permuted, positions
from perfuse.lower.traced import is_computable
from perfuse.torch_compat.ops import OpOverload, is_view_op, op_name, schema_of

# The pseudo-buffer that calls with side effects write to, so that they keep their order.
_WORLD = "world"


@dataclass(frozen=True, slots=True)
class AtenCall:
    """A call as the graph has it: arguments are its nodes and plain values."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    expected: Any  # what it was traced to return
    is_alias: bool = False  # the result may alias an input, which is never written to

    @staticmethod
    def of(node: FxNode, is_alias: bool = False) -> AtenCall:
        return AtenCall(node.target, node.args, node.kwargs, node.meta.get("val"), is_alias)

    @staticmethod
    def inside(effect: FxNode) -> AtenCall:
        """The call that `with_effects(token, op, ...)` wraps; it returns the token first."""
        op: Any = effect.args[1]
        rest = effect.meta["val"][1:]
        returned = len(schema_of(op).returns)
        expected = None if returned == 0 else rest[0] if returned == 1 else tuple(rest)
        return AtenCall(op, effect.args[2:], effect.kwargs, expected)


def call_aten(
    builder: Builder, call: AtenCall, args: list[Any], kwargs: dict[str, Any], reason: str
) -> Any:
    """Emit the call of a graph node; its results are buffers that ATen allocates."""
    expected = call.expected
    several = isinstance(expected, list | tuple)
    results = [_result(builder, e) for e in (expected if several else [expected])]
    outs = tuple(_out_name(r) for r in results)
    new_sizes = _new_sizes(builder, outs, expected if several else [expected])
    argument = partial(_argument, builder, is_exact=not isinstance(call.target, OpOverload))
    made = Extern(
        op_name(call.target),
        outs,
        tuple(argument(a, _meta(n)) for a, n in zip(args, call.args, strict=True)),
        tuple((k, argument(v, _meta(call.kwargs[k]))) for k, v in kwargs.items()),
        reason,
        mutates=_mutated(call, args, kwargs, builder.settings.fallback_random),
        returns_list=several,
        returns_view=is_view_op(call.target) and not call.is_alias,
        new_sizes=new_sizes,
        origin=builder.origin,
    )
    if ":" in made.op:
        builder.constants[made.op] = call.target
    builder.call(_as_node(made, call, builder))
    if isinstance(expected, tuple):
        return type(expected)(results)
    return results if several else results[0]


def _as_node(made: Extern, call: AtenCall, builder: Builder) -> LibraryCall:
    """The call, as a matmul node if it is one."""
    plain = _as_matmul(made, builder)
    if plain is not None:
        return plain
    made = _with_eager_steps(made, call, builder)
    return _as_scaled_matmul(made, builder) or made


def _as_matmul(call: Extern, builder: Builder) -> Matmul | None:
    """The call as a matmul node; None if it is something else."""
    row, numbers = matmul_op(call.op), dict(call.kwargs)
    if row is None or numbers.keys() - {"alpha", "beta"}:
        return None
    (out,) = call.outs
    if out not in builder.buffers or not all(isinstance(a, View) for a in call.args):
        return None
    assert out is not None
    wide = builder.buffers[out].dtype.compute
    operands = row.operands(call.args)
    return Matmul(operands, out, library(call.op), wide, call.reason, **numbers, origin=call.origin)


def _as_scaled_matmul(call: Extern, builder: Builder) -> Matmul | None:
    """The call as a matmul node with scales; None if it is something else, or has other scales."""
    row = matmul_call(call.op)
    if row is None or not row.scales or call.kwargs or len(call.args) <= max(row.scales):
        return None
    (out,) = call.outs
    operands, rest = row.operands(call.args), row.rest(call.args)
    views = (operands.a, operands.b, *operands.scales)
    given = views if operands.bias is None else (*views, operands.bias)
    if out not in builder.buffers or not all(isinstance(view, View) for view in given):
        return None
    assert out is not None
    if row.arguments(operands, rest) != call.args or any(isinstance(v, View) for _, v in rest):
        return None  # a scale of the result, which is narrow then
    kinds = [builder.buffers[view.buffer].dtype for view in views]
    if not all(kind.is_float8 for kind in kinds[:2]) or builder.buffers[out].dtype.is_float8:
        return None
    if set(kinds[2:]) != {DType.F32} or not _are_of_rows(operands):
        return None
    wide, reason = builder.buffers[out].dtype.compute, call.reason
    return Matmul(operands, out, library(call.op), wide, reason, rest=rest, origin=call.origin)


def _are_of_rows(operands: Operands[View]) -> bool:
    """Whether scales are numbers, or one for each row of `a` and each column of `b`."""
    of_a, of_b = operands.scales
    rows, columns = (operands.a.shape[0], 1), (1, operands.b.shape[1])
    is_number = [all(size == 1 for size in view.shape) for view in operands.scales]
    return (is_number[0] or of_a.shape == rows) and (is_number[1] or of_b.shape == columns)


def move(builder: Builder, value: Any, traced: torch.Tensor) -> Tensor:
    """A CPU scalar, copied to where loops can read it."""
    dtype = from_torch(traced.dtype)
    assert dtype is not None
    buffer = builder.new_buffer(dtype, (), kind=BufferKind.EXTERN)
    kwargs = (("device", builder.device), ("non_blocking", True))
    op, reason = op_name(torch.ops.aten._to_copy.default), "a CPU scalar that a GPU kernel reads"
    builder.call(Extern(op, (buffer.name,), (value,), kwargs, reason, origin=builder.origin))
    return builder.tensor_of(buffer)


def owned(builder: Builder, value: Tensor, traced: torch.Tensor) -> Tensor:
    """A copy in storage of its own, at the offset and with the strides that were traced."""
    strides = builder.symbols.strides(traced.stride())
    order = dense_order(value.shape, strides)
    if order is None:
        raise UnsupportedOp("it accesses the storage of a tensor with gaps")
    start = builder.symbols.dim(traced.storage_offset())
    lying = permuted(value, order)
    memory = builder.new_buffer(value.dtype, (ix.add(start, value.numel),))
    place = ix.flat(lying.shape, positions(lying.shape))
    builder.store(lying, memory, ix.add(start, place))
    copied = builder.new_buffer(value.dtype, memory.shape, kind=BufferKind.EXTERN)
    whole = View(memory.name, memory.shape, memory.strides, 0)
    op, reason = op_name(torch.ops.aten.clone.default), "an op accesses the storage of the copy"
    builder.call(Extern(op, (copied.name,), (whole,), (), reason, origin=builder.origin))
    return builder.tensor_of_view(View(copied.name, value.shape, strides, start))


def _meta(arg: Any) -> Any:
    """The value that was traced for an argument, or a list of those in one."""
    if isinstance(arg, list | tuple):
        return [_meta(each) for each in arg]
    return arg.meta.get("val") if isinstance(arg, FxNode) else None


def _result(builder: Builder, expected: Any) -> Any:
    if isinstance(expected, torch.Tensor):
        dtype = from_torch(expected.dtype)
        if dtype is None or not is_computable(expected, builder.device):
            return Opaque(builder.new_name(), expected)
        shape = builder.symbols.dims(expected.shape)
        strides = builder.symbols.strides(expected.stride())
        return builder.tensor_of(builder.new_buffer(dtype, shape, strides, kind=BufferKind.EXTERN))
    if isinstance(expected, torch.SymInt):
        return builder.symbols.dim(expected)
    if expected is None:
        return None
    opaque = Opaque(builder.new_name(), expected)
    if isinstance(expected, torch.SymFloat):
        builder.symbols.give(expected, opaque.name)
    return opaque


def _out_name(result: Any) -> str | None:
    if isinstance(result, Tensor):
        return str(result.value.buffer)
    if isinstance(result, Opaque):
        return result.name
    atom = ix.as_atom(result) if isinstance(result, Index) else None
    return atom.name if isinstance(atom, Symbol) else None


def _new_sizes(
    builder: Builder, outs: Sequence[str | None], expected: Sequence[Any]
) -> tuple[NewSize, ...]:
    """Sizes that are unknown before the call: the number of nonzero elements, for example."""
    found: list[NewSize] = []
    for out, value in zip(outs, expected, strict=True):
        shape = value.shape if out is not None and isinstance(value, torch.Tensor) else ()
        for axis, size in enumerate(builder.symbols.dims(shape)):
            for symbol in builder.symbols.newly_known(size):
                assert out is not None
                found.append(SizeFromData(symbol, out, axis))
    return tuple(found)


def _argument(builder: Builder, value: Any, meta: Any, is_exact: bool) -> Any:
    """An argument for ATen: tensors become views with the layout that was traced.

    Higher-order ops (attention with a function inside) distinguish tuples from lists.
    """
    if isinstance(value, Tensor):
        strides = None
        if isinstance(meta, torch.Tensor):
            wanted = builder.symbols.strides(meta.stride())
            dense = all(s != 0 for s, n in zip(wanted, value.shape, strict=True) if n != 1)
            strides = wanted if dense else None
        return builder.view_of(value, strides)
    if not isinstance(value, list | tuple):
        return value
    metas = meta if isinstance(meta, list) and len(meta) == len(value) else [None] * len(value)
    made = [_argument(builder, v, m, is_exact) for v, m in zip(value, metas, strict=True)]
    return tuple(made) if isinstance(value, tuple) and is_exact else made


def _with_eager_steps(made: Extern, call: AtenCall, builder: Builder) -> Extern:
    """The call with eager's strides even for sizes of one: convolutions choose layouts by them.

    Matmuls take the strides that suit their library.
    """
    pairs = zip(made.args, map(_meta, call.args), strict=True)
    return replace(made, args=tuple(_with_steps(a, meta, builder) for a, meta in pairs))


def _with_steps(argument: Any, meta: Any, builder: Builder) -> Any:
    if not isinstance(argument, View) or not isinstance(meta, torch.Tensor):
        return argument
    wanted = builder.symbols.strides(meta.stride())
    triples = zip(argument.shape, argument.strides, wanted, strict=True)
    return replace(argument, strides=tuple(w if n == 1 else have for n, have, w in triples))


def call_effect(builder: Builder, node: FxNode, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A call with effects; the token that keeps its place in the graph is passed on."""
    result = call_aten(builder, AtenCall.inside(node), args[2:], kwargs, "it has side effects")
    return (args[0], *result) if isinstance(result, list | tuple) else (args[0], result)


def _mutated(
    call: AtenCall, args: list[Any], kwargs: dict[str, Any], draws_in_order: bool
) -> tuple[str, ...]:
    """The names that the call writes: arguments, or the outside world if it returns nothing. With
    fallback_random, a draw from PyTorch's generator writes the outside world too.
    """
    schema = schema_of(call.target)
    acts = schema is None or not schema.returns
    found = [_WORLD] if acts or (draws_in_order and op_facts(call.target).is_random) else []
    for i, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            several = value if isinstance(value, list | tuple) else [value]
            found += [_window(v).buffer for v in several if isinstance(v, Tensor)]
    return tuple(found)


def _window(value: Tensor) -> View:
    view = as_view(value)
    assert view is not None, "a mutated argument is a window on memory"
    return view
