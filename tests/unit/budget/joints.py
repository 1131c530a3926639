"""Joint graphs to test with: traced as the backend traces them, and random ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from perfuse.config import Settings
from perfuse.context import Context
from perfuse.graph.decompositions import decomposition_table
from perfuse.graph.partition import Joint
from perfuse.torch_compat.autograd import aot_compile_graph


class _Traced(Exception):
    """Stops a compile once its joint graph is there."""


def joint_of(fn: Callable[..., Any], *args: Tensor, dynamic: bool = False) -> Joint:
    """The joint graph of a function of tensors that want gradients."""
    found: list[Joint] = []

    def partition(joint: GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        found.append(Joint.of(joint, num_fwd_outputs, Context.default(Settings())))
        raise _Traced

    def backend(module: GraphModule, inputs: Any) -> Any:
        return aot_compile_graph(
            module,
            inputs,
            compiler=lambda kind, graph: graph.forward,
            decompositions=decomposition_table(),
            partition=partition,
        )

    torch._dynamo.reset()
    try:
        torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    except Exception as error:
        if not found:
            raise error
    return found[0]


Network = Callable[..., Tensor]


def random_network(seed: int) -> tuple[Network, list[Tensor]]:
    """A random chain with skips of products, activations, norms and dropout, and its arguments."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    width, rows = draw.choice([64, 128]), draw.choice([512, 2048])
    kinds = [draw.choice(["product", "gelu", "norm", "skip", "drop", "wide"]) for _ in range(9)]
    x = torch.randn(rows, width, generator=generator, requires_grad=True)
    weights = [_weight(kind, width, generator) for kind in kinds]
    skips = [draw.randrange(i + 1) for i in range(len(kinds))]

    def network(x: Tensor, *weights: Tensor) -> Tensor:
        seen = [x]
        for kind, weight, skip in zip(kinds, weights, skips, strict=True):
            seen.append(_layer(kind, seen[-1], weight, seen[skip]))
        return seen[-1].square().mean()

    return network, [x, *weights]


def _weight(kind: str, width: int, generator: torch.Generator) -> Tensor:
    shape = (width, 4 * width) if kind == "wide" else (width, width)
    made = torch.randn(shape, generator=generator) / shape[0] ** 0.5
    return made.requires_grad_()


def _layer(kind: str, x: Tensor, weight: Tensor, earlier: Tensor) -> Tensor:
    if kind == "product":
        return x @ weight
    if kind == "wide":
        return F.gelu(x @ weight) @ weight.t()
    if kind == "gelu":
        return F.gelu(x + weight[0])
    if kind == "norm":
        return F.layer_norm(x, x.shape[-1:], weight[0], weight[1])
    if kind == "drop":
        return F.dropout(x * weight[0], 0.2)
    return x + earlier
