"""The forward's random numbers from seeds, so that the backward can draw them again.

A dropout mask is then kept as the eight bytes it follows from, if the cut finds that cheaper.
"""

from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from perfuse.graph.facts import ancestors, tensor_of
from perfuse.graph.random_ops import seeds, uniform_at
from perfuse.torch_compat import module_of

_UNIFORM = {torch.ops.aten.rand.default, torch.ops.aten.rand_like.default}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DEVICES = ("cpu", "cuda")


def seed_random_values(joint: GraphModule, results: Sequence[Node]) -> GraphModule:
    """The module with each uniform draw that `results` need made from a seed of its own."""
    needed = ancestors(results)
    drawn = [node for node in joint.graph.nodes if node in needed and _can_seed(node)]
    devices = {_tensor(node).device for node in drawn}
    if len(devices) != 1:
        return joint  # none, or seeds that would have to move between devices
    return module_of(joint, _seeded(joint.graph, drawn))


def _can_seed(node: Node) -> bool:
    tensor = tensor_of(node)
    if node.target not in _UNIFORM or tensor is None or node.kwargs.get("generator") is not None:
        return False
    is_known = all(isinstance(size, int) for size in tensor.shape)
    return is_known and tensor.dtype in _DTYPES and tensor.device.type in _DEVICES


def _tensor(node: Node) -> torch.Tensor:
    found = tensor_of(node)
    assert found is not None
    return found


def _seeded(graph: Graph, drawn: Sequence[Node]) -> Graph:
    new = Graph()
    copy: dict[Node, Node] = {}
    index = {node: i for i, node in enumerate(drawn)}
    source: Node | None = None
    for node in graph.nodes:
        if node not in index:
            copy[node] = new.node_copy(node, lambda n: copy[n])
            continue
        tensor = _tensor(node)
        if source is None:
            source = new.call_function(seeds, (len(drawn),), {"device": tensor.device})
            source.meta = {**node.meta, "val": tensor.new_empty(len(drawn), dtype=torch.int64)}
        args = (source, index[node], list(tensor.shape), tensor.dtype)
        copy[node] = new.call_function(uniform_at, args)
        copy[node].meta = dict(node.meta)
    new._codegen = graph._codegen
    return new
