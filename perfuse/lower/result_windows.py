"""`EagerWindows`: results that are views, as windows with eager's strides on shared memory."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from torch.fx import Node as FxNode

from perfuse.ir import index as ix
from perfuse.ir.program import ARGUMENTS, View
from perfuse.lower.aliases import alias_root
from perfuse.lower.builder import Builder, same_layout
from perfuse.lower.layout import dense_strides, own_strides
from perfuse.lower.symbols import Symbols
from perfuse.lower.tensor import Tensor
from perfuse.torch_compat.ops import is_view_op


def may_overlap(node: FxNode, symbols: Symbols) -> bool:
    """Whether elements of a traced tensor share memory, or may do so."""
    traced = node.meta["val"]
    shape, strides = symbols.dims(traced.shape), symbols.strides(traced.stride())
    repeated = any(st == 0 and sz != 1 for st, sz in zip(strides, shape, strict=True))
    return repeated or own_strides(shape, strides) is None


def own_memory(builder: Builder, tensor: Tensor, expected: Any) -> Tensor:
    """The tensor in memory owned by the program, for every view of it."""
    strides = dense_strides(expected, builder.symbols)
    made = builder.realize(tensor, strides)
    is_given = builder.buffers[builder.memory_of(made).buffer].kind in ARGUMENTS
    return builder.realize_copy(tensor, strides) if is_given else made


@dataclass(frozen=True, slots=True)
class EagerWindows:
    """Finds the windows that eager's views lead to.

    The traced strides and offsets say where a view is in the memory of the value that it is a view
    of. A formula of a view need not: with unknown sizes it may not show that it is a window.
    """

    builder: Builder
    values: dict[FxNode, Any]
    owners: Mapping[str, FxNode]  # the node that made a buffer
    outdated: Set[FxNode]  # their formulas read memory that was overwritten since

    def of(self, node: FxNode, claimed: dict[str, FxNode]) -> View | None:
        """The view of a value that is in memory as in eager; None if there is none.

        Where elements overlap, the value that they are a view of is put into memory. `claimed` has
        the buffers of results so far, each with the one root whose views may share it.
        """
        symbols = self.builder.symbols
        chain = self._same_values(node)
        found = next(((base, v) for base in chain if (v := self._memory_of(base))), None)
        if found is None and may_overlap(node, symbols):
            found = self._dense_base(chain)
        if found is None:
            return None
        base, view = found
        root = alias_root(node)
        if claimed.setdefault(view.buffer, root) is not root:
            return None
        traced = node.meta["val"]
        start = symbols.dim(base.meta["val"].storage_offset())
        moved = ix.add(symbols.dim(traced.storage_offset()), ix.mul(start, -1))
        shape, strides = symbols.dims(traced.shape), symbols.strides(traced.stride())
        return View(view.buffer, shape, strides, ix.add(moved, view.offset))

    def _same_values(self, node: FxNode) -> list[FxNode]:
        """A result and the values that it is a view of, while these are of its dtype."""
        root, chain = alias_root(node), [node]
        while chain[-1] is not root and is_view_op(chain[-1].target):
            source = chain[-1].args[0]
            assert isinstance(source, FxNode)
            is_same = source.meta["val"].dtype == node.meta["val"].dtype
            if not is_same or not isinstance(self.values[source], Tensor):
                break
            if source in self.outdated:
                break
            chain.append(source)
        return chain

    def _memory_of(self, node: FxNode) -> View | None:
        """Where a value is in memory, if it has eager's strides there and may be shared."""
        strides = self.builder.symbols.strides(node.meta["val"].stride())
        value = self.values[node]
        view = self.builder.window_on(value)
        if view is None or not same_layout(view, strides):
            return None
        buffer = self.builder.buffers[view.buffer]
        if buffer.dtype is not value.dtype:
            return None  # converted when it is loaded
        is_given = buffer.kind in ARGUMENTS
        is_copy = is_given and self.owners.get(view.buffer) is not alias_root(node)
        return None if is_copy else view

    def _dense_base(self, chain: list[FxNode]) -> tuple[FxNode, View] | None:
        """The first value of a chain of views that covers its memory once, put there."""
        for node in chain[1:]:
            traced = node.meta["val"]
            if dense_strides(traced, self.builder.symbols) is not None:
                self.values[node] = own_memory(self.builder, self.values[node], traced)
                return node, self.builder.memory_of(self.values[node])
        return None
