"""One form for equal calls, so that equal expressions look equal to every later room.

Arguments go where the schema has them, those that only repeat a default are left out, and names
for the same tensor (`alias`, `detach`, `lift_fresh`) disappear.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from perfuse.graph.copying import GraphCopy, copy_but_for
from perfuse.graph.facts import tensor_of
from perfuse.graph.rewrite import NodeBuilder, Rule, index_rules, rewrite
from perfuse.torch_compat.ops import OpOverload, schema_of

ALIASES = ("alias", "detach", "lift_fresh", "lift_fresh_copy", "lift")


def same_tensor(node: Node, build: NodeBuilder) -> Node | None:
    source = node.args[0] if node.args else None
    return source if isinstance(source, Node) else None


_INDEXED = index_rules(
    (
        Rule("another name for x -> x", ALIASES, same_tensor),
        # `rewrite` checks whether the copy was needed to keep results apart.
        Rule("clone(x), same strides -> x", ("clone",), same_tensor),
    )
)


def canonicalize(gm: GraphModule) -> GraphModule:
    """The pass: calls in the form of their schema, without renamings."""
    return _spelled(rewrite(gm, _INDEXED))


def _spelled(gm: GraphModule) -> GraphModule:
    """Every call in its schema's spelling."""
    if not any(_spelling(node) is not None for node in gm.graph.nodes):
        return gm
    return copy_but_for(gm, _spelled_copy)


def _spelled_copy(node: Node, new: GraphCopy) -> Node:
    copied = new.copy(node)
    spelled = _spelling(copied)
    if spelled is not None:
        copied.args, copied.kwargs = spelled
    return copied


def _spelling(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The schema's spelling of a call, where it has another."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    args, kwargs = schema_spelling(node.target, node.args, node.kwargs)
    is_same = len(args) == len(node.args) and len(kwargs) == len(node.kwargs)
    return None if is_same else (args, kwargs)


def schema_spelling(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments: positional ones in place, keyword ones in order, defaults left out."""
    is_factory = not any(isinstance(tensor_of(arg), torch.Tensor) for arg in args)
    positional: list[tuple[Any, bool]] = []
    keywords: dict[str, Any] = {}
    for i, formal in enumerate(schema_of(op).arguments):
        is_given = i < len(args) if not formal.kwarg_only else False
        if not is_given and formal.name not in kwargs:
            if not formal.kwarg_only and formal.has_default_value():
                positional.append((formal.default_value, True))
            continue
        value = args[i] if is_given else kwargs[formal.name]
        is_default = formal.has_default_value() and is_same_argument(value, formal.default_value)
        if not formal.kwarg_only:
            positional.append((value, is_default))
        elif not (is_default or _says_nothing(formal.name, value, is_factory)):
            keywords[formal.name] = value
    while positional and positional[-1][1]:
        positional.pop()
    return tuple(value for value, _ in positional), keywords


def is_same_argument(a: Any, b: Any) -> bool:
    """Equal in value and in type: 1 is not 1.0, and not True."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(is_same_argument, a, b))
    if isinstance(a, Node) or isinstance(b, Node):
        return a is b
    return type(a) is type(b) and bool(a == b)


def _says_nothing(name: str, value: Any, is_factory: bool) -> bool:
    """Keywords that tracing writes out although they ask for the default behaviour."""
    if name == "pin_memory":
        return value is False
    return name == "layout" and value is torch.strided and is_factory
