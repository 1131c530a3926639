"""The Program: buffers and the nodes that fill them, as frozen data that prints itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from perfuse.decision import Choice
from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom, Indirect, Symbol
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr, loads_of, value_atoms
from perfuse.ir.index import Dim
from perfuse.ir.matmul import Arguments, Operands, call_arguments, matmul_call


@dataclass(frozen=True, slots=True)
class Origin:
    """Where in the user's program something comes from: for reports, never compared."""

    line: str = ""  # file:line
    module: str = ""  # layers.3.mlp
    ops: tuple[str, ...] = ()  # what was computed there, the first few: layer_norm, gelu

    def __bool__(self) -> bool:
        return bool(self.line or self.module)

    def __str__(self) -> str:
        return self.line


NOWHERE = Origin()


class BufferKind(StrEnum):
    """Where a buffer's memory comes from."""

    INPUT = "input"
    CONSTANT = "constant"  # a tensor that the graph module holds
    TEMP = "temp"  # made by the program
    EXTERN = "extern"  # the result of a library call, in memory of its own
    SEEDS = "seeds"  # one for each random op, drawn at every call


class LoopKind(StrEnum):
    """The way a loop combines its values: stores, reduces, scans or accumulates them."""

    MAP = "map"
    SUM, PROD, MAX, MIN, ANY, ALL = "sum", "prod", "max", "min", "any", "all"
    ARGMAX, ARGMIN = "argmax", "argmin"
    CUMSUM, CUMPROD = "cumsum", "cumprod"  # along the last axis
    SCATTER_ADD = "scatter_add"  # a map whose stores accumulate

    @property
    def is_position(self) -> bool:
        return self in (LoopKind.ARGMAX, LoopKind.ARGMIN)

    @property
    def is_truth(self) -> bool:
        return self in (LoopKind.ANY, LoopKind.ALL)

    @property
    def is_scan(self) -> bool:
        return self in (LoopKind.CUMSUM, LoopKind.CUMPROD)


# Kinds that the caller or the graph module owns.
ARGUMENTS = (BufferKind.INPUT, BufferKind.CONSTANT)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A strided piece of memory."""

    name: str
    dtype: DType
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    kind: BufferKind = BufferKind.TEMP
    is_aligned: bool = True  # its address is a multiple of 16

    def index(self, position: tuple[Dim, ...]) -> Dim:
        return ix.dot(position, self.strides)

    @property
    def num_elements(self) -> Dim:
        """Elements of storage spanned, so that gaps between strides are counted."""
        last = ix.dot((ix.add(size, -1) for size in self.shape), self.strides)
        return 0 if 0 in self.shape else ix.add(last, 1)

    def __str__(self) -> str:
        dims = ", ".join(map(repr, self.shape))
        return f"{self.name}: {self.dtype}[{dims}]"


@dataclass(frozen=True, slots=True)
class Axis:
    """One loop: its variable, its size, and whether the node reduces over it."""

    name: str
    size: Dim
    reduced: bool = False

    @property
    def atom(self) -> Atom | None:
        return ix.as_atom(ix.var(self.name, self.size))


# Cached properties of frozen artefacts: derived from the other fields.
KEPT: Any = field(default=None, init=False, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Loop:
    """out[index] = value for every step of the axes, reduced over the axes marked so.

    Axes are in the natural order of the tensor that is read, reduced ones among the others.
    """

    out: str
    axes: tuple[Axis, ...]
    kind: LoopKind
    value: Expr
    index: Dim
    origin: Origin = field(default=NOWHERE, compare=False)
    _reads: tuple[Expr, ...] | None = KEPT

    @property
    def is_map(self) -> bool:
        return self.kind is LoopKind.MAP

    @property
    def is_scatter(self) -> bool:
        is_indirect = any(isinstance(atom, Indirect) for atom in ix.atoms_of(self.index))
        return is_indirect or self.kind is LoopKind.SCATTER_ADD

    @property
    def is_reduction(self) -> bool:
        return any(a.reduced for a in self.axes)

    @property
    def kept(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if not a.reduced)

    def reads(self) -> tuple[Expr, ...]:
        if self._reads is None:
            values = (self.value, *(atom.value for atom in value_atoms(self.index)))
            object.__setattr__(self, "_reads", tuple(r for v in values for r in loads_of(v)))
        assert self._reads is not None
        return self._reads

    def __str__(self) -> str:
        loops = ", ".join(f"{a.name}<{a.size!r}{' reduced' * a.reduced}" for a in self.axes)
        return f"{self.out}[{self.index!r}] = {self.kind}({self.value.text()}) for {loops}"


@dataclass(frozen=True, slots=True)
class View:
    """A tensor argument or result: a buffer seen through sizes, strides and an offset."""

    buffer: str
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    offset: Dim = 0

    @property
    def T(self) -> View:  # noqa: N802 (as tensors have it)
        return View(self.buffer, self.shape[::-1], self.strides[::-1], self.offset)

    def __str__(self) -> str:
        return f"{self.buffer}.as({list(self.shape)}, {list(self.strides)}, {self.offset!r})"


@dataclass(frozen=True, slots=True)
class Opaque:
    """An opaque value that the program only passes on: a complex tensor, a sub-module."""

    name: str
    meta: Any = field(default=None, compare=False)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class SizeFromData:
    """A size that depends on data: `symbol` is the size of a call's result along an axis."""

    symbol: str
    out: str
    axis: int

    @property
    def text(self) -> str:
        return f"{self.out}.size({self.axis})"


@dataclass(frozen=True, slots=True)
class SizeFormula:
    """A size that the host computes from others; `inputs` are those that depend on data."""

    symbol: str
    text: str
    inputs: tuple[str, ...] = ()


NewSize = SizeFromData | SizeFormula


class LibraryCall:
    """A node that a library runs, an `Extern` or a `Matmul`: later rooms treat both alike."""

    __slots__ = ()
    mutates: tuple[str, ...] = ()
    returns_list: bool = False
    returns_view: bool = False
    new_sizes: tuple[NewSize, ...] = ()
    window: View | None = None
    after: tuple[str, ...] = ()  # not read, but complete before the call
    if TYPE_CHECKING:
        reason: str
        origin: Origin
        _reads: tuple[str, ...] | None

        @property
        def op(self) -> str: ...
        @property
        def outs(self) -> tuple[str | None, ...]: ...
        @property
        def args(self) -> tuple[Any, ...]: ...
        @property
        def kwargs(self) -> tuple[tuple[str, Any], ...]: ...

    @property
    def into_out(self) -> bool:
        """Whether it writes into the program's memory: all of its one buffer, or the `window`."""
        return False

    def leaves(self) -> list[Any]:
        """Every argument, those in lists and keywords too, in order."""
        found: list[Any] = []

        def visit(value: Any) -> None:
            if isinstance(value, tuple | list | dict):
                for item in value.values() if isinstance(value, dict) else value:
                    visit(item)
            else:
                found.append(value)

        visit(self.args)
        visit([v for _, v in self.kwargs])
        return found

    def makes(self) -> list[str]:
        """Buffers, carried values and sizes that are there after the call."""
        return [o for o in self.outs if o is not None] + [m.symbol for m in self.new_sizes]

    def views(self) -> tuple[View, ...]:
        return tuple(v for v in self.leaves() if isinstance(v, View))

    def reads(self) -> tuple[str, ...]:
        """Buffers, carried values and sizes the call depends on."""
        if self._reads is None:
            object.__setattr__(self, "_reads", tuple(self._names_read()))
        assert self._reads is not None
        return self._reads

    def _names_read(self) -> list[str]:
        names = list(self.after)
        for leaf in self.leaves():
            if isinstance(leaf, View):
                names.append(leaf.buffer)
                names += sizes_from_data([*leaf.shape, *leaf.strides, leaf.offset])
            elif isinstance(leaf, Opaque):
                names.append(leaf.name)
            elif isinstance(leaf, ix.Index):
                names += sizes_from_data([leaf])
        return names

    def __str__(self) -> str:
        inner = ", ".join([*map(str, self.args), *(f"{k}={v}" for k, v in self.kwargs)])
        made = ", ".join(str(o) for o in self.outs) if self.window is None else str(self.window)
        return f"{made} = {self.op}({inner})  # {self.reason}"


@dataclass(frozen=True, slots=True)
class Extern(LibraryCall):
    """An ATen call inside the program. Arguments are views, dims, plain values or lists of these.

    `outs` are the buffers that receive its results (None where a result is not used or not a
    tensor).
    """

    op: str
    outs: tuple[str | None, ...]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    reason: str
    mutates: tuple[str, ...] = ()
    returns_list: bool = False
    returns_view: bool = False  # the result aliases an argument and must be copied
    new_sizes: tuple[NewSize, ...] = ()  # sizes that are known after the call
    after: tuple[str, ...] = ()
    takes_out: bool = False  # it writes its one result into memory we own
    origin: Origin = field(default=NOWHERE, compare=False)
    _reads: tuple[str, ...] | None = KEPT

    @property
    def into_out(self) -> bool:
        return self.takes_out


@dataclass(frozen=True, slots=True)
class Matmul(LibraryCall):
    """out = beta * bias + alpha * (a @ b) * scales, computed as `choice` says.

    An implementation that takes `out=` writes into memory we own: all of the buffer `out`, or the
    `window` on it. Others return new memory, which becomes the buffer.
    """

    operands: Operands[View]
    out: str
    choice: Choice
    accumulate: DType  # the type that products are summed in
    reason: str
    alpha: Any = 1
    beta: Any = 1
    window: View | None = None
    rest: Arguments = ()  # what the library's call takes besides the operands
    after: tuple[str, ...] = ()
    origin: Origin = field(default=NOWHERE, compare=False)
    _reads: tuple[str, ...] | None = KEPT

    @property
    def op(self) -> str:
        return self.choice.name

    @property
    def has_fast_sums(self) -> bool:
        """Whether the caller allows partial sums of fewer bits than `accumulate` has."""
        row = matmul_call(self.op)
        return row is not None and any(value for k, value in self.rest if k == row.fast_sums)

    @property
    def outs(self) -> tuple[str | None, ...]:
        return (self.out,)

    @property
    def args(self) -> tuple[Any, ...]:
        return call_arguments(self.op, self.operands, self.rest)

    @property
    def kwargs(self) -> tuple[tuple[str, Any], ...]:
        return tuple((k, v) for k, v in (("beta", self.beta), ("alpha", self.alpha)) if v != 1)

    @property
    def into_out(self) -> bool:
        return self.op.endswith(".out")


Node = Loop | LibraryCall


@dataclass(frozen=True, slots=True)
class Program:
    """A whole graph as loops and calls over named buffers.

    `inputs` name one entry per graph argument (a buffer name, or a symbol name for an int);
    `outputs` hold a View, an Opaque value, a Dim, or None per graph result.
    """

    inputs: tuple[str, ...]
    buffers: Mapping[str, Buffer]
    nodes: tuple[Node, ...]
    outputs: tuple[View | Opaque | Dim | float | bool | None, ...]
    symbols: tuple[tuple[str, str], ...] = ()  # name, and how the host computes it
    constants: Mapping[str, Any] = field(default_factory=dict)  # tensors held by the graph module
    donated: tuple[str, ...] = ()  # donated inputs: saved for this program alone
    hints: Mapping[str, int] = field(default_factory=dict, compare=False)  # likely sizes, by symbol

    def __post_init__(self) -> None:
        # An immutable artefact must not contain a mutable table.
        for name in ("buffers", "constants", "hints"):
            table = getattr(self, name)
            if not isinstance(table, MappingProxyType):
                object.__setattr__(self, name, MappingProxyType(table))

    def __str__(self) -> str:
        lines = [f"program({', '.join(str(self.buffers.get(i, i)) for i in self.inputs)}):"]
        for name, how in self.symbols:
            lines.append(f"  {name} = {how}")
        for node in self.nodes:
            names = [node.out] if isinstance(node, Loop) else [o for o in node.outs if o]
            types = ", ".join(str(self.buffers.get(n, n)) for n in names)  # no buffer: opaque
            lines.append(f"  {node}  # {types}")
        lines.append(f"  return ({', '.join(map(str, self.outputs))})")
        return "\n".join(lines)


def sizes_from_data(dims: Iterable[Dim]) -> list[str]:
    """The size symbols among these that an earlier call of the program computes."""
    found = {a for dim in dims for a in ix.atoms_of(dim) if isinstance(a, Symbol)}
    return sorted({a.name for a in found if a.is_from_data})


def contiguous_strides(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Row-major strides; sizes of zero count as one, as in PyTorch."""
    strides: list[Dim] = []
    step: Dim = 1
    for size in reversed(shape):
        strides.append(step)
        step = ix.mul(step, 1 if size == 0 else size)
    return tuple(reversed(strides))
