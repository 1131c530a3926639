"""`as_views_of_inputs`: results that share memory with an overwritten input, as views of it.

A functional graph makes such a result as a view of the input's new value, in memory of its own.
AOTAutograd then makes the view of the input itself, from the strides and the storage offset of what
the graph returned where it cannot repeat the views, which it cannot where they depend on sizes.
Those of a new value are not the input's: a sum of columns has no gaps and starts at zero.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from perfuse.graph.facts import is_part, output_leaves, output_node, tensor_of
from perfuse.graph.rewrite import NodeBuilder
from perfuse.torch_compat.autograd import OverwrittenAlias
from perfuse.torch_compat.ops import is_view_op

aten = torch.ops.aten

# The view that shows what an update wrote, with the same arguments.
_SHOWING: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
    aten.as_strided_scatter.default: aten.as_strided.default,
}

Step = tuple[Any, Sequence[Any]]  # a view op, and its arguments but the first


def as_views_of_inputs(graph: Graph, aliases: Sequence[OverwrittenAlias]) -> None:
    """Make results of a graph views of the inputs that they share memory with in eager."""
    if not aliases:
        return
    results, inputs = list(output_leaves(graph)), graph.find_nodes(op="placeholder")
    old, output = list(results), output_node(graph)
    for alias in aliases:
        place = alias.result
        result, given = old[place], inputs[alias.of_input]
        if not isinstance(result, Node) or tensor_of(result) is None:
            continue
        value, base = _new_value(given, None if alias.value is None else old[alias.value])
        steps = None if value is None else _steps(value, result, set())
        if steps is None:
            continue
        with graph.inserting_before(output):
            made = _applied(NodeBuilder(graph), base, result, steps)
        if made is not None:
            results[place] = made
    output.args = (tuple(results),)


def _new_value(given: Node, returned: Any) -> tuple[Node | None, Node]:
    """The value an input is overwritten with, here or by the caller, and the node to view."""
    for user in given.users:
        if user.target is aten.copy_.default and user.args[0] is given:
            value = user.args[1]
            return (value if isinstance(value, Node) else None), user
    return (returned if isinstance(returned, Node) else None), given


def _steps(root: Node, node: Node, seen: set[Node]) -> list[Step] | None:
    """The views that lead from a value to another one; None if they are not known.

    A view that was updated is not a view of the whole in the graph: the whole is made of it.
    """
    if node is root:
        return []
    if node in seen:
        return None
    seen.add(node)
    is_view = (is_view_op(node.target) or is_part(node)) and not node.kwargs
    if is_view and isinstance(node.args[0], Node):
        found = _steps(root, node.args[0], seen)
        if found is not None:
            return [*found, (node.target, node.args[1:])]
    ways = [(user, back) for user in node.users if (back := _way_back(user, node)) is not None]
    if len(ways) != 1:  # what is written to two places is a view of one of them only
        return None
    user, back = ways[0]
    found = _steps(root, user, seen)
    return None if found is None else [*found, back]


def _way_back(user: Node, node: Node) -> Step | None:
    """The view of `user` that shows `node`, which it was made of."""
    shown = _SHOWING.get(user.target)
    if shown is not None and len(user.args) > 1 and user.args[1] is node and not user.kwargs:
        return shown, user.args[2:]
    rule = _INVERSES.get(user.target)
    if rule is None or user.args[0] is not node or user.kwargs:
        return None
    return user.target, rule(user.args[1:])


def _inverse_order(args: Sequence[Any]) -> list[Any]:
    order = [axis % len(args[0]) for axis in args[0]]
    return [[order.index(axis) for axis in range(len(order))]]


_INVERSES: dict[Any, Callable[[Sequence[Any]], Sequence[Any]]] = {
    aten.permute.default: _inverse_order,
    aten.transpose.int: lambda args: args,
    aten.t.default: lambda args: args,
}


def _applied(builder: NodeBuilder, base: Node, result: Node, steps: list[Step]) -> Node | None:
    """The views of an input; None if its strides allow no such view."""
    made, calls = base, []
    for target, args in steps:
        try:
            made = builder.call(result, target, made, *args)
        except RuntimeError:  # no view of memory with gaps
            made = base
            break
        calls.append(made)
    if len(calls) == len(steps) and tensor_of(made) is not None:
        return made
    for call in reversed(calls):
        call.graph.erase_node(call)
    return None
