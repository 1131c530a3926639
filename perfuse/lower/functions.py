"""Functions that higher-order ops take, as formulas of their arguments."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from perfuse.ir.atoms import Atom
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.program import Loop, Opaque
from perfuse.lower.builder import Builder
from perfuse.lower.registry import CannotLower, lowering_of


@dataclass(frozen=True, slots=True)
class Scattered:
    """A tensor of zeros to which values are added at positions: a gradient, by element."""

    shape: tuple[Dim, ...]
    parts: tuple[tuple[tuple[Dim, ...], Expr], ...]  # positions, and what is added there


def function_of(builder: Builder, value: Any) -> GraphModule:
    """The graph of a function that was passed to an op."""
    module = builder.constants.get(value.name) if isinstance(value, Opaque) else None
    if not isinstance(module, GraphModule):
        raise CannotLower("it is called with a function that was not traced")
    return module


def applied(
    builder: Builder, module: GraphModule, args: Sequence[Any], own: Collection[Atom]
) -> Any:
    """The results of a traced function for these tensors, as formulas.

    Values that vary with the variables `own` cannot be stored: where they would have to be, or an
    op has no lowering, it raises CannotLower.
    """
    mark = len(builder.nodes)
    values: dict[FxNode, Any] = {}
    given = iter(args)
    result: Any = None
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "call_function":
            values[node] = _called(builder, node, values)
        elif node.op == "output":
            result = _known(node.args[0], values)
        else:
            raise CannotLower(f"the function of an op has a node {node.op}")
    for made in builder.nodes[mark:]:
        if not isinstance(made, Loop) or made.value.variables() & set(own):
            raise CannotLower("the function of an op computes more than a formula")
    return result


def _called(builder: Builder, node: FxNode, values: dict[FxNode, Any]) -> Any:
    args = [_known(arg, values) for arg in node.args]
    if node.target is operator.getitem:
        return args[0][args[1]]
    scattered = [arg for arg in args if isinstance(arg, Scattered)]
    if scattered:
        return _sum(node, args, scattered)
    lowering = lowering_of(node.target)
    if lowering is None:
        raise CannotLower(f"no lowering for {node.target} in the function of an op")
    kwargs = {name: _known(value, values) for name, value in node.kwargs.items()}
    return lowering(builder, *args, **kwargs)


def _sum(node: FxNode, args: Sequence[Any], scattered: Sequence[Scattered]) -> Scattered:
    """The sum of gradients by element, the only thing that may be computed from them."""
    if node.target is not torch.ops.aten.add.Tensor or len(scattered) != len(args):
        raise CannotLower(f"{node.target} of the gradient of a captured tensor")
    parts = tuple(part for each in scattered for part in each.parts)
    return Scattered(scattered[0].shape, parts)


def _known(value: Any, values: dict[FxNode, Any]) -> Any:
    if isinstance(value, FxNode):
        return values[value]
    if isinstance(value, list | tuple):
        return type(value)(_known(item, values) for item in value)
    return value
