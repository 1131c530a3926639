"""Constant folding: compute what depends only on constants at compile time.

A folded value that is one number everywhere becomes a `full`, which later rooms see through; a
small table becomes an attribute of the module. Larger ones stay: computing them in a fused loop
costs less than reading them.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from perfuse.graph.aliases import Aliases
from perfuse.graph.copying import GraphCopy, copy_but_for
from perfuse.graph.facts import (
    attribute_of,
    attributes_of,
    is_pure,
    output_nodes,
    packet_name,
    tensor_of,
)
from perfuse.torch_compat.state import disable_dispatch_modes

MAX_ELEMENTS = 1024

# Constants already. They are cheap, so folding one alone gains nothing.
_SOURCES = frozenset({"full", "scalar_tensor", "arange"})


def fold_constants(gm: GraphModule) -> GraphModule:
    """The pass: constant expressions of up to `MAX_ELEMENTS` elements, evaluated."""
    with disable_dispatch_modes(), torch.no_grad():
        values = _evaluate(gm)
        has_work = any(packet_name(node) not in _SOURCES for node in values)
        return _Fold(gm, values).run() if has_work else gm


def _evaluate(gm: GraphModule) -> dict[Node, torch.Tensor]:
    """The value of every constant node that is small enough."""
    values: dict[Node, torch.Tensor] = {}
    aliases = Aliases.of(gm.graph)
    for node in gm.graph.nodes:
        if aliases.of_node(node).is_mutated:
            continue  # its value is not one value
        value = _value(gm, node, values)
        if value is not None:
            values[node] = value
    return values


def _value(gm: GraphModule, node: Node, values: dict[Node, torch.Tensor]) -> torch.Tensor | None:
    if node.op == "get_attr":
        held = attribute_of(gm, str(node.target))
        is_small = isinstance(held, torch.Tensor) and held.numel() <= MAX_ELEMENTS
        is_frozen = is_small and not isinstance(held, torch.nn.Parameter)
        return held if is_frozen and _is_foldable(node) else None
    if not is_pure(node) or not _is_foldable(node):
        return None
    if any(n not in values for n in node.all_input_nodes):
        return None
    if not node.all_input_nodes and packet_name(node) not in _SOURCES:
        return None  # `empty` and its like: no inputs, and no value either
    call: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    try:
        result = call(*args, **kwargs)
    except (RuntimeError, IndexError):  # of the user's program: raised when it runs
        return None
    return result if isinstance(result, torch.Tensor) else None


def _is_foldable(node: Node) -> bool:
    """A small tensor of static shape, of a type whose numbers Python can hold, on the CPU."""
    tensor = tensor_of(node)
    if tensor is None or tensor.device.type != "cpu" or tensor.dtype.is_complex:
        return False
    if any(not isinstance(size, int) for size in tensor.shape):
        return False
    return tensor.numel() <= MAX_ELEMENTS


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
