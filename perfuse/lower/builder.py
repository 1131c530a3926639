"""`Builder`: collects the buffers and nodes of one Program while its graph is lowered."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.atoms import Division, Variable
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.program import (
    NOWHERE,
    Axis,
    Buffer,
    BufferKind,
    LibraryCall,
    Loop,
    LoopKind,
    Node,
    Origin,
    View,
    contiguous_strides,
)
from perfuse.lower.layout import memory_order
from perfuse.lower.one_hot import sum_of_one_hot
from perfuse.lower.symbols import Symbols
from perfuse.lower.tensor import Tensor, as_view, expand, permuted, positions, reindex

# From this cost on (see ir.expr.SCALAR_OPS) a value is not recomputed per repetition.
_DEAR_COST = 4


class Builder:
    """The one mutable object of this room; lowerings see it, later rooms do not."""

    def __init__(self, settings: Any, device: torch.device, isa: str) -> None:
        self.settings = settings
        self.isa = isa  # of the CPU
        self.device = device  # of the tensors that loops compute on
        # Decisions made for a GPU apply to its interpreter too.
        self.is_gpu = device.type != "cpu" or settings.gpu.interpret
        self.buffers: dict[str, Buffer] = {}
        self.nodes: list[Node] = []
        self.constants: dict[str, Any] = {}
        self.symbols = Symbols()
        self.origin = NOWHERE  # of the op at hand
        self.formula_origins: dict[Expr, Origin] = {}  # of values that are not in memory yet
        self.feeds_calls = False  # every user of the node at hand is a library call
        self.is_exact = False  # the result of the node at hand must have eager's bits
        self.arguments: tuple[Any, ...] = ()  # what the op at hand was traced with
        self.overwritable: str | None = None  # what the op at hand may update in place
        self.overwritten: str | None = None  # what it did
        # Formulas that calls needed in memory, by their buffer: none is computed twice.
        self._passed: dict[tuple[tuple[Dim, ...], DType, Expr], Buffer] = {}
        self._num_names = 0

    def new_name(self) -> str:
        self._num_names += 1
        return f"v{self._num_names}"

    # -- buffers ---------------------------------------------------------------------------

    def new_buffer(
        self,
        dtype: DType,
        shape: Sequence[Dim],
        strides: Sequence[Dim] | None = None,
        *,
        kind: BufferKind = BufferKind.TEMP,
        name: str | None = None,
        is_aligned: bool = True,
    ) -> Buffer:
        shape = tuple(shape)
        steps = contiguous_strides(shape) if strides is None else tuple(strides)
        name = name or f"b{len(self.buffers)}"
        self.buffers[name] = Buffer(name, dtype, shape, steps, kind, is_aligned)
        return self.buffers[name]

    def tensor_of(self, buffer: Buffer) -> Tensor:
        index = buffer.index(positions(buffer.shape))
        return Tensor(buffer.shape, buffer.dtype, ex.load(buffer.name, index, buffer.dtype))

    def tensor_of_view(self, view: View) -> Tensor:
        buffer = self.buffers[view.buffer]
        index = ix.add(view.offset, ix.dot(positions(view.shape), view.strides))
        return Tensor(view.shape, buffer.dtype, ex.load(buffer.name, index, buffer.dtype))

    def seed(self) -> Expr:
        """The seed of one random op: an element of a buffer that the host fills for each call."""
        return ex.load("seeds", self.first_of_seeds(1), DType.I64)

    def first_of_seeds(self, count: int) -> Dim:
        """Where `count` new seeds start in that buffer."""
        known = self.buffers.get("seeds")
        start: Dim = known.num_elements if known is not None else 0
        kind = BufferKind.SEEDS
        self.new_buffer(DType.I64, (ix.add(start, count),), kind=kind, name=kind)
        return start

    # -- nodes -----------------------------------------------------------------------------

    def emit(self, loop: Loop) -> None:
        """Append a loop, unless it has no iterations."""
        if not any(axis.size == 0 for axis in loop.kept):
            self.nodes.append(loop)

    def store(self, tensor: Tensor, buffer: Buffer, index: Dim | None = None) -> None:
        """Emit the loop that writes every element of a tensor into a buffer."""
        axes = axes_over(tensor.shape)
        where = buffer.index(positions(tensor.shape)) if index is None else index
        if index is not None:
            self._passed.clear()  # formulas refer to the previous contents of memory
        # A formula belongs to the op that computes it, not to the call that needs it in memory.
        origin = self.formula_origins.get(tensor.value, self.origin)
        self.emit(Loop(buffer.name, axes, LoopKind.MAP, tensor.value, where, origin))

    def may_overwrite(self, name: str | None) -> None:
        """Let the next op update a buffer where it would update a copy of it."""
        self.overwritable, self.overwritten = name, None

    def overwrite(self, loops: Sequence[Loop]) -> None:
        """Emit loops that write to the buffer that the op in hand may update."""
        if not loops:
            return
        self.overwritten = self.overwritable
        self._passed.clear()  # formulas refer to the previous contents of memory
        self.nodes += loops

    def window_on(self, tensor: Tensor) -> View | None:
        """The tensor as a strided window on one of the buffers, if its formula is just that."""
        load = tensor.value
        known = self.buffers.get(load.buffer) if load.op == "load" else None
        return as_view(tensor, known.strides if known is not None else ())

    def realize(self, tensor: Tensor, strides: Sequence[Dim] | None = None) -> Tensor:
        """The tensor in memory: itself if it is a window on a buffer already, else computed."""
        is_stored = self._stored_view(tensor, strides) is not None
        return tensor if is_stored else self.realize_copy(tensor, strides)

    def _stored_view(self, tensor: Tensor, strides: Sequence[Dim] | None) -> View | None:
        """The window that a tensor is already, with its own dtype and these strides."""
        view = self.window_on(tensor)
        if view is None or self.buffers[view.buffer].dtype is not tensor.dtype:
            return None
        return view if strides is None or same_layout(view, strides) else None

    def realize_copy(self, tensor: Tensor, strides: Sequence[Dim] | None = None) -> Tensor:
        """The tensor in memory of its own, even if it is a window on a buffer already."""
        buffer = self.new_buffer(tensor.dtype, tensor.shape, strides)
        self.store(tensor, buffer)
        return self.tensor_of(buffer)

    def broadcast(self, tensor: Tensor, shape: Sequence[Dim]) -> Tensor:
        """Expand, computing an expensive value once before it is repeated.

        On a CPU, so is a value that is indexed by a quotient, which lanes would gather.
        """
        is_dear = tensor.value.cost >= _DEAR_COST or (not self.is_gpu and _has_quotients(tensor))
        if is_dear and tensor.numel != ix.product(tuple(shape)):
            tensor = (
                self.realize_copy(tensor) if tensor.value.op == "load" else self.realize(tensor)
            )
        return expand(tensor, shape)

    def view_of(self, tensor: Tensor, strides: Sequence[Dim] | None = None) -> View:
        """A window for an ATen call, computed into memory first if necessary. What two calls need
        is computed once, even if one of them reads it transposed.
        """
        view = self._stored_view(tensor, strides)
        if view is not None:
            return view
        order = range(tensor.ndim) if strides is None else memory_order(tensor.shape, strides)
        if order is None:
            return self.memory_of(self.realize(tensor, strides))
        return self.memory_of(self._passed_once(tensor, list(order)))

    def memory_of(self, tensor: Tensor) -> View:
        """The window that a tensor in memory is."""
        view = self.window_on(tensor)
        assert view is not None
        return view

    def _passed_once(self, tensor: Tensor, order: Sequence[int]) -> Tensor:
        """The tensor in memory without gaps, with this order of dimensions."""
        lying = permuted(tensor, order)
        key = (lying.shape, lying.dtype, lying.value)
        buffer = self._passed.get(key)
        if buffer is None or self.buffers.get(buffer.name) is not buffer:
            buffer = self._passed[key] = self.new_buffer(lying.dtype, lying.shape)
            self.store(lying, buffer)
        mine = positions(tensor.shape)
        return reindex(self.tensor_of(buffer), tensor.shape, [mine[d] for d in order])

    def reduce(
        self, kind: LoopKind, x: Tensor, dims: Sequence[int], dtype: DType, keepdim: bool = False
    ) -> Tensor:
        """A reduction over dimensions, accumulated in the compute type of `dtype`."""
        reduced = {d % x.ndim for d in dims} if x.ndim else set()
        at = positions(x.shape)
        axes = axes_over(x.shape, reduced)
        kept = [i for i in range(x.ndim) if i not in reduced]
        shape = [x.shape[i] for i in kept]
        picked = self._picked(kind, x.value, axes)
        if picked is not None:
            new = iter(positions(shape))
            source = [0 if i in reduced else next(new) for i in range(x.ndim)]
            result = reindex(Tensor(x.shape, dtype, picked), shape, source)
        else:
            buffer = self.new_buffer(dtype, shape)
            index = buffer.index(tuple(at[i] for i in kept))
            is_reduction = any(a.reduced for a in axes)
            value = x.value if is_reduction else _of_single(kind, x.value)
            kind = kind if is_reduction else LoopKind.MAP
            self.emit(Loop(buffer.name, axes, kind, value, index, self.origin))
            result = self.tensor_of(buffer)
        return unsqueeze_dims(result, sorted(reduced)) if keepdim and x.ndim else result

    def _picked(self, kind: LoopKind, value: Expr, axes: tuple[Axis, ...]) -> Expr | None:
        """The sum of a row of which all but one element is zero."""
        reduced = [a for a in axes if a.reduced]
        if kind is not LoopKind.SUM or len(reduced) != 1:
            return None
        maker = self._maker(value)
        return sum_of_one_hot(value if maker is None else maker.value, reduced[0])

    def _maker(self, value: Expr) -> Loop | None:
        """The map that stored the value read here, if its operands are unchanged."""
        if value.op != "load" or value.args:
            return None
        written: set[str] = set()
        for node in reversed(self.nodes):
            if isinstance(node, Loop):
                if node.out == value.buffer:
                    is_same = node.is_map and node.index is value.index
                    is_kept = is_same and not written & {r.buffer for r in node.reads()}
                    return node if is_kept else None
                written.add(node.out)
            elif node.mutates:
                return None
        return None

    def call(self, node: LibraryCall) -> None:
        if node.mutates:
            self._passed.clear()
        self.nodes.append(node)


def _has_quotients(tensor: Tensor) -> bool:
    """Whether an element is read at a quotient or remainder of its position."""
    indices = [read.index for read in ex.loads_of(tensor.value)]
    return any(_varies(d) for index in indices for d in ix.divisions_of(index))


def _varies(division: Division) -> bool:
    return any(isinstance(atom, Variable) for atom in ix.atoms_of(division.numerator))


def axes_over(shape: Sequence[Dim], reduced: Collection[int] = ()) -> tuple[Axis, ...]:
    """The loops over a shape: none for a size of one."""
    return tuple(Axis(f"d{i}", size, i in reduced) for i, size in enumerate(shape) if size != 1)


def _of_single(kind: LoopKind, value: Expr) -> Expr:
    """A reduction over sizes of one only."""
    if kind.is_position:
        return ex.const(0, DType.I64)
    return ex.cast(value, DType.BOOL) if kind.is_truth else value


def unsqueeze_dims(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    """Insert sizes of one so that they end up at `dims` (ascending, of the result)."""
    shape: list[Dim] = list(tensor.shape)
    for d in dims:
        shape.insert(d, 1)
    at = positions(shape)
    return reindex(tensor, shape, [at[i] for i in range(len(shape)) if i not in set(dims)])


def same_layout(view: View, strides: Sequence[Dim]) -> bool:
    """Whether a window has these strides in every dimension larger than one."""
    pairs = zip(view.shape, view.strides, strides, strict=True)
    return all(size == 1 or have == want for size, have, want in pairs)
