"""`Chunk`: nodes of a row region, repeated for some of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from perfuse.graph.chunk_ops import add_matmul, copy_after
from perfuse.graph.facts import known_tensor, packet_name, tensor_of

aten = torch.ops.aten


class Calls(Protocol):
    """Makes nodes in the new graph."""

    def __call__(self, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node: ...


def swapped(node: Any) -> Node | None:
    """The matrix that a node is the transpose of."""
    tensor = tensor_of(node)
    if tensor is None or tensor.dim() != 2:
        return None
    packet = packet_name(node)
    if packet == "permute":
        is_swapped = [d % 2 for d in node.args[1]] == [1, 0]
    elif packet == "transpose":
        is_swapped = {d % 2 for d in node.args[1:]} == {0, 1}
    else:
        is_swapped = packet == "t"
    source = node.args[0] if is_swapped else None
    return source if isinstance(source, Node) else None


class Inputs:
    """Values that chunks read from outside: whole, or as rows to take slices of."""

    def __init__(self, num_rows: int, call: Calls, given: Callable[[Node], Node]) -> None:
        self.num_rows = num_rows
        self.call = call
        self._given = given  # a value of the old graph in the new one, a seed as one
        self._made: dict[tuple[Any, ...], Node] = {}

    def whole(self, node: Node, rank: int) -> Node:
        """A value that all rows read, without leading sizes of one."""
        given = self._given(node)
        shape = list(known_tensor(given).shape)
        if len(shape) <= rank:
            return given
        shape = shape[len(shape) - rank :]
        return self._once((node, rank), lambda: self.call(node, aten.view.default, given, shape))

    def rows(self, node: Node, rest: Sequence[int], start: int, stop: int) -> Node:
        """Some rows of a value."""
        flat = self._once((node, *rest), lambda: self._flat(node, [self.num_rows, *rest]))
        key = (node, *rest, start, stop)
        return self._once(key, lambda: self.call(node, aten.slice.Tensor, flat, 0, start, stop))

    def _flat(self, node: Node, shape: list[int]) -> Node:
        given = self._given(node)
        tensor = known_tensor(given)
        if list(tensor.shape) == shape:
            return given
        if not tensor.is_contiguous():
            given = self.call(
                node, aten.clone.default, given, memory_format=torch.contiguous_format
            )
        return self.call(node, aten.view.default, given, shape)

    def _once(self, key: tuple[Any, ...], make: Callable[[], Node]) -> Node:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class Chunk:
    """Some rows: `of` has the values of the region for them."""

    def __init__(self, inputs: Inputs, start: int, stop: int, after: list[Node]) -> None:
        self.inputs = inputs
        self.after = after  # results of the chunk before
        self.call = inputs.call
        self.start, self.stop = start, stop
        self.of: dict[Node, Node] = {}
        self.totals: dict[Node, Node] = {}  # of this chunk and those before, for matmuls
        self._copies: dict[tuple[Node, int], Node] = {}

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    def rows_of(self, node: Node, lead: int | None = None) -> Node:
        """The chunk's rows of a value, of the region or from outside."""
        if node in self.of:
            return self.of[node]
        shape = list(known_tensor(node).shape)
        lead = lead if lead is not None else self._leading(shape)
        rows = self.inputs.rows(node, shape[lead:], self.start, self.stop)
        if (node, lead) not in self._copies:
            # Masks that depend on targets alone could be computed for all chunks at once.
            self._copies[node, lead] = self.call(node, copy_after, rows, self.after)
        return self._copies[node, lead]

    def operand_rows(self, node: Node) -> Node:
        """The chunk's rows of a matrix that a matmul reads."""
        if node in self.of:
            return self.of[node]
        width = known_tensor(node).shape[1]
        return self.inputs.rows(node, [width], self.start, self.stop)

    def _leading(self, shape: list[int]) -> int:
        count, lead = 1, 0
        while count != self.inputs.num_rows:
            count, lead = count * shape[lead], lead + 1
        return lead

    def operand(self, node: Node, rank: int, lead: int, like: Sequence[int]) -> Node:
        """An operand of a result of `rank` dimensions, of which `lead` are rows."""
        if node in self.of:
            return self.of[node]
        shape = list(known_tensor(node).shape)
        if len(shape) == rank and shape[:lead] == list(like[:lead]):
            return self.rows_of(node, lead)
        return self.inputs.whole(node, rank - lead)

    def repeat(self, node: Node, rank: int, lead: int) -> Node:
        shape = known_tensor(node).shape
        args, kwargs = map_arg(
            (node.args, dict(node.kwargs)), lambda n: self.operand(n, rank, lead, shape)
        )
        return self.call(node, node.target, *args, **kwargs)

    def reshaped(self, node: Node, source: Node, rest: Sequence[int]) -> Node:
        shape = [self.num_rows, *rest]
        if list(known_tensor(source).shape) == shape:
            return source
        return self.call(node, aten.view.default, source, shape)

    def expanded(self, node: Node, source: Node, shape: Sequence[int], lead: int) -> Node:
        given = self.operand(source, len(shape), lead, shape)
        return self.call(node, aten.expand.default, given, [self.num_rows, *shape[lead:]])

    def full(self, node: Node, rest: Sequence[int]) -> Node:
        shape = [self.num_rows, *rest]
        return self.call(node, node.target, shape, *node.args[1:], **node.kwargs)

    def reduced(self, node: Node, source: Node, dims: list[int]) -> Node:
        given: Any = dims
        if packet_name(node) == "argmax" or str(node.target) == "aten.any.dim":
            (given,) = dims
        target = aten.sum.dim_IntList if packet_name(node) == "sum" else node.target
        target = aten.mean.dim if packet_name(node) == "mean" else target
        return self.call(node, target, self.rows_of(source), given, *node.args[2:], **node.kwargs)

    def summed(self, node: Node, source: Node, dims: list[int]) -> Node:
        """The part of a sum over rows, in float32 where the sum is a half."""
        kwargs = {key: value for key, value in node.kwargs.items() if key == "dtype"}
        if known_tensor(node).dtype in (torch.bfloat16, torch.float16):
            kwargs["dtype"] = torch.float32
        return self.call(node, aten.sum.dim_IntList, self.rows_of(source), dims, False, **kwargs)

    def gathered(self, node: Node, source: Node, index: Any, dim: int) -> Node:
        return self.call(node, aten.gather.default, self.rows_of(source), dim, self.rows_of(index))

    def repeat_matmul(self, node: Node, left: Node, right: Node) -> Node:
        return self.call(node, aten.mm.default, self.of[left], self.inputs.whole(right, 2))

    def _widened(self, like: Node, rows: Node) -> Node:
        """Rows in float32, as they were before they were rounded if that is what was done."""
        source: Any = rows.args[0] if packet_name(rows) == "_to_copy" else None
        if source is not None and known_tensor(source).dtype == torch.float32:
            return source  # type: ignore[no-any-return]
        return self.call(like, aten._to_copy.default, rows, dtype=torch.float32)

    def added_matmul(self, node: Node, left: Node, right: Node) -> Node:
        """The total so far, with what these rows add."""
        rows = [self.operand_rows(left), self.operand_rows(right)]
        tensor = known_tensor(node)
        if tensor.device.type == "cpu" and tensor.dtype in (torch.bfloat16, torch.float16):
            # Rounded once for each chunk, the total would be less exact than that of one matmul.
            rows = [self._widened(node, x) for x in rows]
        transposed = self.call(node, aten.permute.default, rows[0], [1, 0])
        if node not in self.totals:
            return self.call(node, aten.mm.default, transposed, rows[1])
        return self.call(node, add_matmul, self.totals[node], transposed, rows[1])
