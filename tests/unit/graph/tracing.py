"""Graphs to test with: a function traced as AOTAutograd would, and two modules compared."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from perfuse.context import Context
from perfuse.graph.decompositions import decomposition_table
from perfuse.graph.passes import ATEN_PASSES, Record, run_passes


def traced(fn: Callable[..., Any], *args: torch.Tensor, decompose: bool = False) -> GraphModule:
    """The ATen graph of `fn`, with fake values."""
    table = decomposition_table() if decompose else {}
    module: GraphModule = make_fx(fn, decomposition_table=table, tracing_mode="fake")(*args)
    return module


def after_passes(gm: GraphModule, record: Record | None = None) -> GraphModule:
    """The graph as it is lowered on this machine."""
    return run_passes(gm, Context.default(), ATEN_PASSES, record)


def calls(gm: GraphModule) -> list[str]:
    """The calls of a graph in order, as `add(x_1, 1)`."""
    return [_call(node) for node in gm.graph.nodes if node.op == "call_function"]


def _call(node: torch.fx.Node) -> str:
    name = getattr(node.target, "_schema", None)
    short = str(name.name).split("::")[1] if name else getattr(node.target, "__name__", "?")
    args = [*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())]
    return f"{short}({', '.join(args)})"


def assert_same_values(a: GraphModule, b: GraphModule, *args: torch.Tensor) -> None:
    """Both give the same bits, types and strides."""
    torch.manual_seed(0)
    left = list(flat(a(*[x.clone() for x in args])))
    torch.manual_seed(0)
    right = list(flat(b(*[x.clone() for x in args])))
    assert len(left) == len(right)
    for x, y in zip(left, right, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride()
        # Signs of zeros are values too; NaNs are equal to themselves.
        same = (x == y) | ((x != x) & (y != y))
        assert bool(same.all())
        if x.is_floating_point():
            assert torch.equal(torch.signbit(x[x == 0]), torch.signbit(y[y == 0]))


def flat(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from flat(item)
