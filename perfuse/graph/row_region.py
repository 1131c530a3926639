"""The part of a graph that works on each row of one large matrix independently.

It begins at the logits, a matmul, and ends where rows are summed: in a loss, in the gradient of a
weight. Leading dimensions whose product is the number of rows count as the rows, so that the tokens
of several sequences are one list of rows. A `Chunk` computes the same for some of the rows.

In a joint graph the gradient of the loss, a scalar that is not known yet, is the *seed*. What
depends on it has to be linear in it: computed for a seed of one, and multiplied by it later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch.fx import Node

from perfuse.graph.facts import is_pure, packet_name, reached, tensor_of
from perfuse.graph.rewrite import scalar_of
from perfuse.graph.row_chunk import Chunk, swapped

aten = torch.ops.aten

# The value of a node in a chunk: rows of it, or for a total the part that the chunk adds.
Make = Callable[[Chunk], Node]

_ELEMENTWISE = frozenset("_to_copy alias clone convert_element_type detach full_like where".split())
_VIEWS = frozenset("_unsafe_view reshape squeeze unsqueeze view".split())
_LINEAR = _VIEWS | frozenset(
    "_to_copy alias clone convert_element_type detach expand gather mean mm neg sum".split()
)
_ROW_SUMS = frozenset({"amax", "logsumexp", "sum"})
_FORMATS = (None, torch.contiguous_format, torch.preserve_format)


def lead_of(shape: Iterable[int], num_rows: int) -> int | None:
    """How many leading dimensions are the rows: the fewest with that product."""
    count = 1
    for i, size in enumerate(shape):
        count *= size
        if count == num_rows:
            return i + 1
    return None


class RowRegion:
    """Nodes that depend on the logits row by row, and the values that leave them."""

    def __init__(self, logits: Node, tangents: Iterable[Node]) -> None:
        shape = shape_of(logits)
        assert shape is not None
        self.logits = logits
        self.num_rows, self.width = shape
        self.after = reached(tangents, lambda node: node.users)  # what the seed may change
        self.lead: dict[Node, int] = {logits: 1}
        self.makes: dict[Node, Make] = {}
        self.totals: dict[Node, Make] = {}  # sums over rows, by chunk
        self.matmuls: dict[Node, tuple[Node, Node]] = {}  # totals: rows times rows
        self.ends: set[Node] = set()  # rows that are no longer logits: gradients of what was given
        self.seeds: set[Node] = set()
        self._below = reached([logits], lambda node: node.users)
        for node in logits.graph.nodes:
            if node in self._below and any(self._continues(n) for n in node.all_input_nodes):
                self._take(node)

    def _continues(self, node: Node) -> bool:
        rows = swapped(node) or node
        return rows in self.lead and rows not in self.ends

    # -- what is found ---------------------------------------------------------------------

    def leaving(self) -> list[Node]:
        """Rows that are read outside."""
        return [node for node in self.lead if not all(map(self._is_inside, node.users))]

    def _is_inside(self, user: Node) -> bool:
        if user in self.totals or user in self.lead:
            return True
        return swapped(user) is not None and all(u in self.totals for u in user.users)

    def is_head(self) -> bool:
        """A loss over logits: rows reduced, a sum of them, and no row of that width leaves."""
        widths = (prod(self.rest(node)) for node in self.leaving() if node not in self.ends)
        is_reduced = any(packet_name(node) in _ROW_SUMS for node in self.makes)
        is_summed = any(numel(node) == 1 for node in self.totals)
        is_gradient = all(node in self.after for node in (*self.ends, *self.matmuls))
        is_small = all(width * 2 <= self.width for width in widths)
        return is_reduced and is_summed and is_gradient and is_small and len(self.seeds) <= 1

    def rest(self, node: Node) -> tuple[int, ...]:
        """The sizes of one row."""
        shape = shape_of(node)
        assert shape is not None
        return shape[self.lead[node] :]

    # -- the walk --------------------------------------------------------------------------

    def _take(self, node: Node) -> bool:
        """Make a node part of the region, or a total of it, if there is a rule for it."""
        if node in self.lead:
            return True
        shape = shape_of(node)
        if shape is None or not is_pure(node) or (node in self.after and not self._is_linear(node)):
            return False
        if node.target is aten.view.dtype or node.kwargs.get("memory_format") not in _FORMATS:
            return False  # other values, or the layout of a rank that chunks do not have
        rule = _RULES.get(packet_name(node))
        if rule is None and _is_elementwise(node):
            rule = _elementwise
        make = None if rule is None else rule(self, node, shape)
        if make is not None:
            self.makes[node] = make
            self.lead.setdefault(node, lead_of(shape, self.num_rows) or 0)
        return make is not None

    def has(self, operand: Node, shape: tuple[int, ...], lead: int) -> bool:
        """Whether a chunk can have what a result of this shape reads."""
        own = shape_of(operand)
        if own is None:
            return False
        if operand in self.lead:
            return operand not in self.ends and _is_rows(own, shape, lead)
        if operand in self.after:
            return self._follows_seed(operand, shape, lead)
        if operand in self._below:
            return False
        if not _is_rows(own, shape, lead):
            return _is_whole(own, shape, lead)
        if numel(operand) >= self.num_rows * self.width:
            self._take(operand)  # a mask of that size is made by the chunk if there is a rule
        return True  # what is given is sliced

    def _follows_seed(self, operand: Node, shape: tuple[int, ...], lead: int) -> bool:
        own = shape_of(operand)
        assert own is not None
        if _is_rows(own, shape, lead) and numel(operand) > 1:
            return self._take(operand) and operand in self.lead
        seed = self.seed_of(operand)
        self.seeds.add(seed)
        return numel(seed) == 1 and _is_whole(own, shape, lead)

    def seed_of(self, node: Node) -> Node:
        """The scalar from which a scalar follows by factors that are known before the logits.

        A mean divides by a count: in the chunk, so that no intermediate gradient is large.
        """
        while node.op == "call_function" and self._is_linear(node):
            late = [n for n in node.all_input_nodes if n in self.after]
            known = [n for n in node.all_input_nodes if n not in self.after]
            if len(late) != 1 or numel(late[0]) != 1 or any(n in self._below for n in known):
                break
            node = late[0]
        return node

    def _is_linear(self, node: Node) -> bool:
        """Linear in what depends on the seed: roundings aside, f(s * x) = s * f(x)."""
        packet, late = packet_name(node), [n for n in node.all_input_nodes if n in self.after]
        first, second = (*node.args, None, None)[:2]
        if packet in _LINEAR:
            dtypes = {tensor.dtype for n in (node, *late) if (tensor := tensor_of(n)) is not None}
            is_one = len(late) == 1 and (packet != "gather" or late[0] is first)
            return is_one and all(dtype.is_floating_point for dtype in dtypes)
        if packet == "mul":
            return len(late) == 1 and first is not second
        if packet == "div":
            return late == [first] and second is not first and not node.kwargs
        if packet in ("add", "sub"):
            return first in late and second in late
        branches = node.args[1:] if packet == "where" else ()
        is_choice = bool(branches) and first not in late
        return is_choice and all(value in late or scalar_of(value) == 0 for value in branches)


def shape_of(node: Any) -> tuple[int, ...] | None:
    """The shape of a strided tensor whose sizes are all known."""
    tensor = tensor_of(node)
    if tensor is None or tensor.layout != torch.strided:
        return None
    return tuple(tensor.shape) if all(isinstance(size, int) for size in tensor.shape) else None


def numel(node: Node) -> int:
    shape = shape_of(node)
    return -1 if shape is None else prod(shape)


def _is_rows(own: tuple[int, ...], shape: tuple[int, ...], lead: int) -> bool:
    return len(own) == len(shape) and own[:lead] == shape[:lead]


def _is_whole(own: tuple[int, ...], shape: tuple[int, ...], lead: int) -> bool:
    """Whether every row reads all of a value: it has sizes of one, or none, where rows are."""
    return all(size == 1 for size in own[: max(len(own) - len(shape) + lead, 0)])


def _is_elementwise(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or packet_name(node) in _ELEMENTWISE


# -- rules: how a chunk computes a node, or None -------------------------------------------------


def _elementwise(region: RowRegion, node: Node, shape: tuple[int, ...]) -> Make | None:
    lead = lead_of(shape, region.num_rows)
    if lead is None or not all(region.has(n, shape, lead) for n in node.all_input_nodes):
        return None
    return lambda chunk: chunk.repeat(node, len(shape), lead)


def _view(region: RowRegion, node: Node, shape: tuple[int, ...]) -> Make | None:
    """Rows stay rows where their number still is a product of leading sizes."""
    (source,), lead = node.all_input_nodes, lead_of(shape, region.num_rows)
    own = shape_of(source)
    before = None if own is None else lead_of(own, region.num_rows)
    if own is None or lead is None or before is None or not region.has(source, own, before):
        return None
    return lambda chunk: chunk.reshaped(node, chunk.rows_of(source), shape[lead:])


def _expand(region: RowRegion, node: Node, shape: tuple[int, ...]) -> Make | None:
    (source,), lead = node.all_input_nodes, lead_of(shape, region.num_rows)
    if lead is None or not region.has(source, shape, lead):
        return None
    return lambda chunk: chunk.expanded(node, source, shape, lead)


def _full(region: RowRegion, node: Node, shape: tuple[int, ...]) -> Make | None:
    lead = lead_of(shape, region.num_rows)
    if lead is None or node.all_input_nodes:
        return None
    return lambda chunk: chunk.full(node, shape[lead:])


def _reduce(region: RowRegion, node: Node, _: tuple[int, ...]) -> Make | None:
    source: Any = node.args[0]
    own = shape_of(source)
    lead = None if own is None else lead_of(own, region.num_rows)
    if own is None or lead is None or not region.has(source, own, lead):
        return None
    dims = _dims_of(node, len(own))
    inner = [d for d in dims if d >= lead]
    if inner == dims:
        places = [d - lead + 1 for d in inner]
        region.lead[node] = lead
        return lambda chunk: chunk.reduced(node, source, places)
    is_sum = packet_name(node) in ("sum", "mean")
    if is_sum and dims[:lead] == list(range(lead)):
        places = [0, *(d - lead + 1 for d in inner)]
        region.totals[node] = lambda chunk: chunk.summed(node, source, places)
    return None


def _dims_of(node: Node, rank: int) -> list[int]:
    given: Any = node.args[1] if len(node.args) > 1 else None
    listed = [given] if isinstance(given, int) else list(given or [])
    return sorted(d % rank for d in listed) if listed else list(range(rank))


def _gather(region: RowRegion, node: Node, shape: tuple[int, ...]) -> Make | None:
    source, dim, index = node.args[:3]
    lead = region.lead.get(source)  # type: ignore[arg-type]
    if lead is None or not isinstance(dim, int) or node.kwargs or not isinstance(source, Node):
        return None
    place = dim % len(shape) - lead + 1
    if place < 1 or not all(region.has(n, shape, lead) for n in node.all_input_nodes):
        return None
    return lambda chunk: chunk.gathered(node, source, index, place)


def _mm(region: RowRegion, node: Node, shape: tuple[int, ...]) -> Make | None:
    """Rows times a matrix are rows; transposed rows times rows are summed over the rows."""
    left: Any = node.args[0]
    right: Any = node.args[1]
    if left in region.lead:
        own = shape_of(left)
        assert own is not None
        if region.lead[left] != 1 or not region.has(left, own, 1) or right in region._below:
            return None
        if right in region.after or not isinstance(right, Node):
            return None
        region.ends.add(node)
        return lambda chunk: chunk.repeat_matmul(node, left, right)
    rows = swapped(left)
    pair = (rows, right)
    if rows is None or not isinstance(right, Node) or not any(n in region.lead for n in pair):
        return None
    for side in (rows, right):
        own = shape_of(side)
        if own is None or own[0] != region.num_rows or not region.has(side, own, 1):
            return None
    region.totals[node] = lambda chunk: chunk.added_matmul(node, rows, right)
    region.matmuls[node] = (rows, right)
    return None


_Rule = Callable[[RowRegion, Node, tuple[int, ...]], Make | None]
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys((*_ROW_SUMS, "amin", "any", "argmax", "mean"), _reduce),
    "expand": _expand,
    "full": _full,
    "gather": _gather,
    "mm": _mm,
}
