"""Reductions of blocks: lanes of accumulators, how they are combined, and how they are joined."""

from __future__ import annotations

from collections.abc import Sequence

from perfuse.codegen.triton.spelling import COMPUTE_TYPE, bare, literal, start
from perfuse.ir.dtype import DType
from perfuse.ir.program import LoopKind
from perfuse.schedule.plan import Member, static_product

# Beyond every position: lanes outside lose against any that is inside.
_NOWHERE = {DType.I32: 2**31 - 1, DType.I64: 2**63 - 1}
_SIGNS = {LoopKind.SUM: "+", LoopKind.PROD: "*", LoopKind.ANY: "|", LoopKind.ALL: "&"}


def position_dtype(member: Member) -> DType:
    """Positions of a row that is known to be short enough have half the bits."""
    count = static_product([a.size for a in member.loop.axes if a.reduced])
    return DType.I32 if count is not None and count < _NOWHERE[DType.I32] else DType.I64


def kind_dtype(member: Member) -> DType:
    """The dtype that a reduction accumulates in."""
    return DType.BOOL if member.loop.kind.is_truth else member.loop.value.dtype


def part_dtypes(member: Member) -> tuple[DType, ...]:
    """The dtypes of an accumulator's parts: the value, then the position where one is kept."""
    own = kind_dtype(member)
    return (own, position_dtype(member)) if member.loop.kind.is_position else (own,)


def result_dtype(member: Member) -> DType:
    return part_dtypes(member)[-1]


def storage_dtypes(member: Member) -> tuple[DType, ...]:
    """The dtypes in which a block stores its partial results for others."""
    return tuple(DType.U8 if d is DType.BOOL else d for d in part_dtypes(member))


def part_types(member: Member) -> tuple[str, ...]:
    return tuple(COMPUTE_TYPE[dtype] for dtype in part_dtypes(member))


def starts(member: Member) -> tuple[str, ...]:
    """Where each part of an accumulator begins."""
    dtype = kind_dtype(member)
    first = literal(start(member.loop.kind, dtype), dtype)
    return (first, *(literal(_NOWHERE[kind], kind) for kind in part_dtypes(member)[1:]))


def declarations(member: Member, names: Sequence[str], shape: str) -> list[str]:
    """The statements that make an accumulator of a shape."""
    dtype = kind_dtype(member)
    numbers = [bare(start(member.loop.kind, dtype), dtype), str(_NOWHERE[position_dtype(member)])]
    return [
        f"{name} = tl.full({shape}, {number}, {kind})"
        for name, number, kind in zip(names, numbers, part_types(member), strict=False)
    ]


def kept(member: Member, text: str) -> str:
    """A result as it is stored in scratch memory."""
    return f"({text}).to(tl.uint8)" if kind_dtype(member) is DType.BOOL else text


def read_back(member: Member, text: str) -> str:
    return f"({text} != 0)" if kind_dtype(member) is DType.BOOL else text


def combined(member: Member, a: Sequence[str], b: Sequence[str]) -> str:
    """Two accumulators in one, as the right side of an assignment to all parts."""
    kind, dtype = member.loop.kind, kind_dtype(member)
    if kind.is_position:
        return f"pf_{kind}({a[0]}, {a[1]}, {b[0]}, {b[1]})"
    x, y = a[0], b[0]
    if kind in _SIGNS:
        return f"{x} {_SIGNS[kind]} {y}"
    if dtype.is_float:
        return f"pf_{kind}({x}, {y})"
    return f"tl.{'maximum' if kind is LoopKind.MAX else 'minimum'}({x}, {y})"


def joined(member: Member, parts: Sequence[str], axis: int, *, keep: bool = True) -> str:
    """The lanes along an axis in one."""
    kind, dtype = member.loop.kind, kind_dtype(member)
    dims = ", keep_dims=True" if keep else ""
    if kind.is_position and dtype.is_float and keep:
        nowhere = _NOWHERE[position_dtype(member)]
        return f"pf_first_{kind}({parts[0]}, {parts[1]}, {nowhere}, {axis})"
    if kind.is_position:
        return f"tl.reduce(({parts[0]}, {parts[1]}), {axis}, pf_{kind}{dims})"
    x = parts[0]
    if kind.is_truth:
        extremum = "max" if kind is LoopKind.ANY else "min"
        return f"(tl.{extremum}({x}.to(tl.int32), {axis}{dims}) != 0)"
    if kind is LoopKind.PROD:
        return f"tl.reduce({x}, {axis}, pf_mul{dims})"
    if dtype.is_float and kind is not LoopKind.SUM:
        return f"tl.reduce({x}, {axis}, pf_{kind}{dims})"
    return f"tl.{kind}({x}, {axis}{dims})"
