"""Constant folding: compute what depends only on constants at compile time.

A folded value that is one number everywhere becomes a `full`, which later rooms see through; a
small table becomes an attribute of the module. Larger ones stay: computing them in a fused loop
costs less than reading them.

Not so where a GPU program computes constants on the CPU (positions, buckets of distances) and moves
them: every call would compute them, copy them and wait for the copy. These become attributes on the
GPU.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from perfuse.graph.aliases import Aliases
from perfuse.graph.copying import GraphCopy, copy_but_for
from perfuse.graph.facts import (
    ancestors,
    attribute_of,
    attributes_of,
    is_pure,
    output_nodes,
    packet_name,
    tensor_of,
)
from perfuse.torch_compat.state import disable_dispatch_modes

MAX_ELEMENTS = 1024
# What is moved to a GPU: it stays there as long as the program.
MAX_MOVED_ELEMENTS = 1 << 20

# Constants already. They are cheap, so folding one alone gains nothing.
_SOURCES = frozenset({"full", "scalar_tensor", "arange"})
_COPIES = frozenset({"_to_copy", "device_put"})


def fold_constants(gm: GraphModule) -> GraphModule:
    """The pass: constant expressions of up to `MAX_ELEMENTS` elements, evaluated."""
    with disable_dispatch_modes(), torch.no_grad():
        values = _evaluate(gm)
        has_work = any(packet_name(node) not in _SOURCES for node in values)
        return _Fold(gm, values).run() if has_work else gm


def _evaluate(gm: GraphModule) -> dict[Node, torch.Tensor]:
    """The value of every constant node that is small enough."""
    values: dict[Node, torch.Tensor] = {}
    aliases, moved = Aliases.of(gm.graph), _moved(gm)
    for node in gm.graph.nodes:
        if aliases.of_node(node).is_mutated:
            continue  # its value is not one value
        value = _value(gm, node, values, moved)
        if value is not None:
            values[node] = value
    return values


def _moved(gm: GraphModule) -> frozenset[Node]:
    """The copies from the CPU to another device, and all that they depend on."""
    copies = [node for node in gm.graph.nodes if _is_moving(node)]
    return frozenset(ancestors(copies)) if copies else frozenset()


def _is_moving(node: Node) -> bool:
    made = tensor_of(node)
    if packet_name(node) not in _COPIES or made is None or made.device.type == "cpu":
        return False
    source = tensor_of(node.all_input_nodes[0])
    return source is not None and source.device.type == "cpu"


def _value(
    gm: GraphModule, node: Node, values: dict[Node, torch.Tensor], moved: frozenset[Node]
) -> torch.Tensor | None:
    is_foldable = _is_foldable(node, node in moved)
    if node.op == "get_attr":
        held = attribute_of(gm, str(node.target))
        is_frozen = isinstance(held, torch.Tensor) and not isinstance(held, torch.nn.Parameter)
        return held if is_frozen and is_foldable else None
    if not is_pure(node) or not is_foldable:
        return None
    if any(n not in values for n in node.all_input_nodes):
        return None
    if not node.all_input_nodes and packet_name(node) not in _SOURCES:
        return None  # `empty` and its like: no inputs, and no value either
    call: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    try:
        result = call(*args, **kwargs)
    except (RuntimeError, IndexError, AssertionError):  # of the user's program, when it runs
        return None
    return result if isinstance(result, torch.Tensor) else None


def _is_foldable(node: Node, is_moved: bool) -> bool:
    """A small tensor of static shape, of a type whose numbers Python can hold, on the CPU."""
    tensor = tensor_of(node)
    if tensor is None or tensor.dtype.is_complex:
        return False
    if tensor.device.type != "cpu" and not _is_moving(node):
        return False
    if any(not isinstance(size, int) for size in tensor.shape):
        return False
    return tensor.numel() <= (MAX_MOVED_ELEMENTS if is_moved else MAX_ELEMENTS)


def uniform_value(tensor: torch.Tensor) -> bool | int | float | None:
    """The number that every element is, bit for bit; None if they differ or there are none."""
    if tensor.numel() == 0:
        return None
    flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
    number: Any = flat[0].item()
    if not isinstance(number, (bool, int, float)):
        return None
    again = torch.full_like(flat, number)
    is_uniform = torch.equal(again.view(torch.uint8), flat.view(torch.uint8))
    return number if is_uniform else None


class _Fold:
    """Builds the new graph with what has been evaluated."""

    def __init__(self, gm: GraphModule, values: dict[Node, torch.Tensor]) -> None:
        self._gm = gm
        self._values = values
        self._attributes = attributes_of(gm)
        self._num_tables = 0
        self._outputs = set(output_nodes(gm.graph))
        self._aliases = Aliases.of(gm.graph)

    def run(self) -> GraphModule:
        return copy_but_for(
            self._gm, lambda node, new: self._folded(node, new) or new.copy(node), self._attributes
        )

    def _folded(self, node: Node, new: GraphCopy) -> Node | None:
        value, tensor = self._values.get(node), tensor_of(node)
        if value is None or tensor is None or packet_name(node) in _SOURCES:
            return None
        if not tensor.is_contiguous() or node in self._outputs:
            return None  # a result must be the caller's own, and a stride must stay what it was
        number = uniform_value(value)
        is_read = any(user not in self._values for user in node.users)  # by what is not folded
        if number is None and (node.op == "get_attr" or not is_read):
            return None
        if number is None and self._aliases.of_node(node).num_outputs:
            return None  # the caller could overwrite the table through a view
        folded = self._table(value, new) if number is None else self._full(tensor, number, new)
        folded.meta = dict(node.meta)
        return folded

    def _full(self, tensor: torch.Tensor, number: bool | int | float, new: GraphCopy) -> Node:
        kwargs: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
        args = (list(tensor.shape), number)
        return new.graph.call_function(torch.ops.aten.full.default, args, kwargs)

    def _table(self, value: torch.Tensor, new: GraphCopy) -> Node:
        name = f"_folded_{self._num_tables}"
        while hasattr(self._gm, name):
            name += "_"
        self._num_tables += 1
        self._attributes[name] = value.contiguous().clone()
        return new.graph.create_node("get_attr", name)
