"""Joint graphs for tests: traced from a function, or built node by node."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from perfuse.config import Settings
from perfuse.context import Context
from perfuse.graph.decompositions import decomposition_table
from perfuse.graph.facts import output_leaves
from perfuse.graph.partition import Joint, plain_cut
from perfuse.graph.saving.choose import choose_saved
from perfuse.graph.saving.costs import Work
from perfuse.graph.saving.roles import Roles

aten = torch.ops.aten


def traced_joint(fn: Callable[..., Tensor], args: Sequence[Tensor]) -> GraphModule:
    """Result and gradients of `fn` as AOTAutograd would hand them to a partitioner."""
    num_primals = len(args)

    def joint(*values: Tensor) -> list[Tensor]:
        primals = [v.detach().requires_grad_(v.is_floating_point()) for v in values[:num_primals]]
        result = fn(*primals)
        wanted = [p for p in primals if p.requires_grad]
        return [result.detach(), *torch.autograd.grad(result, wanted, values[num_primals])]

    tangent = torch.ones_like(fn(*args))
    table = decomposition_table()
    gm = make_fx(joint, decomposition_table=table, tracing_mode="fake")(*args, tangent)
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        node.target = f"tangents_{i}" if i >= num_primals else f"primals_{i}"
    gm.graph.eliminate_dead_code()
    return gm


class Builder:
    """A joint graph built by hand: every value has the same shape unless told otherwise."""

    def __init__(self, shape: tuple[int, ...] = (64, 64)) -> None:
        self.graph = Graph()
        self.shape = shape

    def _valued(self, node: Node, dtype: torch.dtype) -> Node:
        node.meta["val"] = torch.empty(self.shape, dtype=dtype, device="meta")
        return node

    def input(self, name: str) -> Node:
        return self._valued(self.graph.placeholder(name), torch.float32)

    def call(self, op: Any, *args: Any, dtype: torch.dtype = torch.float32) -> Node:
        return self._valued(self.graph.call_function(op, args), dtype)

    def finish(self, *values: Node) -> Graph:
        self.graph.output(tuple(values))
        return self.graph


def roles_of(graph: Graph, num_results: int = 1) -> Roles:
    leaves = output_leaves(graph)
    tangents = {n for n in graph.nodes if n.op == "placeholder" and "tangents" in str(n.target)}
    return Roles.of(
        graph,
        tangents=tangents,
        results=leaves[:num_results],
        gradients=leaves[num_results:],
        overwritten=[],
    )


def partition_joint(
    joint: GraphModule,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    settings: Settings | None = None,
    **kwargs: Any,
) -> tuple[GraphModule, GraphModule]:
    """The joint graph's forward and backward: a `partition_fn` for AOTAutograd."""
    context = Context.default(settings or Settings())
    cut = plain_cut(Joint.of(joint, num_fwd_outputs, context), context.settings)
    return cut.forward, cut.backward


def kept(graph: Graph, level: int = Work.LOOP, num_results: int = 1) -> list[Node]:
    """The values, besides the caller's own, that are kept at a level of recomputation."""
    chosen = choose_saved(graph, roles_of(graph, num_results), level)
    return [node for node in chosen if node.op != "placeholder"]


def run_halves(gm: GraphModule, args: Sequence[Tensor], tangent: Tensor, **kwargs: Any) -> Any:
    """Result and gradients by way of the two halves, and the values that crossed."""
    forward, backward = partition_joint(gm, None, num_fwd_outputs=1, **kwargs)
    for half in (forward, backward):
        half.graph.lint()
    result, *saved = forward(*args)
    return [result, *backward(*saved, tangent)], saved
