"""`Mutations`: writes into memory that holds something, and who still needs the old contents.

A graph is functional but for copies into mutated inputs at its end. A formula reads memory when it
is stored, which may be after such a write, so that what later nodes need of the old contents is
stored before. An update of some elements (index_put, scatter, slice_scatter) writes them where they
are, in place of a copy of them all, if no later node needs the old ones: in a temporary, or in an
input that a copy overwrites as a whole later on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph
from torch.fx import Node as FxNode

from perfuse.graph.storage_ops import Treatment, storage_treatment
from perfuse.ir import expr as ex
from perfuse.ir.index import Dim
from perfuse.ir.program import Buffer, BufferKind, LibraryCall, View
from perfuse.lower.builder import Builder
from perfuse.lower.layout import own_strides
from perfuse.lower.tensor import Tensor, cast_tensor, expand
from perfuse.torch_compat.ops import OpOverload, is_view_op, schema_of

aten = torch.ops.aten
_COPY = aten.copy_.default

# Updates by one formula of all elements, and those by stores into a copy.
_BY_FORMULA = {
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
}
_BY_STORES = {
    aten.index_put.default,
    aten._unsafe_index_put.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
}
_UPDATES = _BY_FORMULA | _BY_STORES

# Updates that replace all elements of a view.
_REPLACING = {
    (aten.slice.Tensor, aten.slice_scatter.default),
    (aten.select.int, aten.select_scatter.default),
    (aten.diagonal.default, aten.diagonal_scatter.default),
}

# A formula of all elements fuses with what reads them, a store into some is a kernel of its own. It
# pays from about this size on: a launch takes a GPU the time of some MiB.
_WORTHWHILE_BYTES, _WORTHWHILE_GPU_BYTES = 1 << 15, 1 << 22


class Mutations:
    """The formulas of a graph by the memory that they read, while the graph is lowered."""

    def __init__(self, graph: Graph, builder: Builder, values: dict[FxNode, Any]) -> None:
        self.builder = builder
        self.values = values
        self.readers: dict[str, list[FxNode]] = {}  # whose formulas read a buffer
        self.outdated: set[FxNode] = set()  # whose formulas read what was overwritten since
        self._inputs: dict[str, FxNode] = {}
        self._is_idle = not any(n.target is _COPY or n.target in _UPDATES for n in graph.nodes)

    def note(self, node: FxNode) -> None:
        """Take in a node that has its value."""
        if self._is_idle:
            return
        for tensor in _tensors(self.values.get(node)):
            for name in {read.buffer for read in ex.loads_of(tensor.value)}:
                if node.op == "placeholder":
                    self._inputs[name] = node
                else:
                    self.readers.setdefault(name, []).append(node)

    # -- copies into inputs ----------------------------------------------------------------

    def copy_into(self, node: FxNode, target: Tensor, source: Tensor) -> None:
        """Overwrite an input, after all reads of its old contents."""
        name, index = target.value.buffer, target.value.index
        source = expand(cast_tensor(source, target.dtype), target.shape)
        self.values[node] = target
        if source.value is target.value:
            return  # it was updated in place
        self._keep_old(node, name)
        for read in ex.loads_of(source.value):
            if read.buffer == name and read.index is not index:
                source = self.builder.realize_copy(source)
                break
        self.builder.store(source, self.builder.buffers[name], index)

    def _keep_old(self, copy: FxNode, name: str) -> None:
        """Formulas that still read the old contents and are needed later go to memory first."""
        for earlier in self.readers.pop(name, []):
            value = self.values[earlier]
            if not any(_reads(tensor, name) for tensor in _tensors(value)):
                continue
            if any(user is not copy for user in self._users_left(earlier)):
                self.values[earlier] = self._stored(value, name)
                self.note(earlier)
            else:
                self.outdated.add(earlier)

    def _stored(self, value: Any, name: str) -> Any:
        """The value, in memory of its own where it reads a buffer."""
        if isinstance(value, list | tuple):
            return type(value)([self._stored(item, name) for item in value])
        is_reader = isinstance(value, Tensor) and _reads(value, name)
        return self.builder.realize_copy(value) if is_reader else value

    def _users_left(self, node: FxNode) -> Iterator[FxNode]:
        """The users that are not lowered yet, the output among them."""
        return (user for user in node.users if user not in self.values)

    # -- updates in place ------------------------------------------------------------------

    def overwritable(self, node: FxNode) -> str | None:
        """The buffer that an update may write to, instead of to a copy of its first argument."""
        source = node.args[0] if node.target in _UPDATES else None
        value = self.values.get(source) if isinstance(source, FxNode) else None
        view = self.builder.window_on(value) if isinstance(value, Tensor) else None
        if view is None or value is None or not isinstance(source, FxNode):
            return None
        buffer = self.builder.buffers[view.buffer]
        if buffer.dtype is not value.dtype or not _is_apart(view, buffer):
            return None
        if not self._is_ours(node, buffer) or self._is_held(buffer.name):
            return None
        views = _views_above(source)
        readers = [*self.readers.get(buffer.name, ()), *self._input_of(buffer.name)]
        is_free = all(self._is_done_with(reader, node, views) for reader in readers)
        return buffer.name if is_free else None

    def _is_ours(self, node: FxNode, buffer: Buffer) -> bool:
        """Whether the memory may hold anything in the end, and writing a part of it pays."""
        if buffer.kind is BufferKind.TEMP:
            return node.target in _BY_STORES
        if buffer.kind is not BufferKind.INPUT:
            return False
        if node.target in _BY_FORMULA and not self._is_large(buffer):
            return False
        return any(
            user.target is _COPY and user.args[0] is given
            for given in self._input_of(buffer.name)
            for user in self._users_left(given)
        )

    def _is_large(self, buffer: Buffer) -> bool:
        least = _WORTHWHILE_GPU_BYTES if self.builder.is_gpu else _WORTHWHILE_BYTES
        count = buffer.num_elements
        return not isinstance(count, int) or count * buffer.dtype.num_bytes >= least

    def _input_of(self, name: str) -> list[FxNode]:
        given = self._inputs.get(name)
        return [] if given is None else [given]

    def _is_held(self, name: str) -> bool:
        """Whether a result keeps the memory, or a collective may still read it."""
        calls = [node for node in self.builder.nodes if isinstance(node, LibraryCall)]
        return any(
            view.buffer == name
            for call in calls
            if not call.op.startswith(("aten.", "perfuse."))
            or storage_treatment(call.op) is Treatment.HELD
            for view in call.views()
        )

    def _is_done_with(
        self, reader: FxNode, node: FxNode, views: dict[FxNode, FxNode], place: FxNode | None = None
    ) -> bool:
        """Whether no node after this one needs the old elements that a reader shows.

        A user may replace those in the view that leads to the update, or be an equal view. `place`
        is the value among the ones with such views that the reader equals, if not itself.
        """
        view = views.get(place or reader)
        for user in self._users_left(reader):
            if user is node:
                continue
            if user.target is _COPY and user.args[0] is reader and user.args[1] is not reader:
                continue
            if view is not None and _replaces(user, reader, view):
                continue
            is_equal = view is not None and _arguments_of(user) == _arguments_of(view)
            if is_equal and self._is_done_with(user, node, views, view):
                continue
            return False
        return True

    def overwrote(self, node: FxNode, name: str) -> None:
        """Record that an update has written to a buffer."""
        for reader in self.readers.pop(name, []):
            if any(user is not node for user in self._users_left(reader)):
                self.readers.setdefault(name, []).append(reader)
            else:
                self.outdated.add(reader)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _reads(tensor: Tensor, name: str) -> bool:
    return any(read.buffer == name for read in ex.loads_of(tensor.value))


def _is_apart(view: View, buffer: Buffer) -> bool:
    """Whether no two elements of a window share memory, as far as sizes show."""
    sides: list[tuple[tuple[Dim, ...], tuple[Dim, ...]]] = [
        (view.shape, view.strides),
        (buffer.shape, buffer.strides),
    ]
    return all(
        own_strides(shape, strides) is not None
        and not any(step == 0 and size != 1 for step, size in zip(strides, shape, strict=True))
        for shape, strides in sides
    )


def _views_above(node: FxNode) -> dict[FxNode, FxNode]:
    """Each value that a node is a view of, by way of others, with its view on the way."""
    found: dict[FxNode, FxNode] = {}
    while is_view_op(node.target) and isinstance(node.args[0], FxNode):
        found[node.args[0]] = node
        node = node.args[0]
    return found


def _replaces(user: FxNode, base: FxNode, view: FxNode) -> bool:
    """Whether a user takes of a value only elements outside of a view of it, or of an equal one."""
    if (view.target, user.target) not in _REPLACING:
        return False
    values, *rest = _arguments_of(user)[1:]
    return user.args[0] is base and values is not base and rest == _arguments_of(view)[1:]


def _arguments_of(node: FxNode) -> list[Any]:
    """The op and all arguments but the first by position, those that were left out too."""
    if not isinstance(node.target, OpOverload):
        return [node]
    left = schema_of(node.target).arguments[len(node.args) :]
    given = [*node.args[1:], *(node.kwargs.get(a.name, a.default_value) for a in left)]
    return [node.target, *given]
