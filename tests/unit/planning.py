"""Plans to test with: a function traced as the backend would, both ways, then scheduled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from functorch.compile import aot_function, make_boxed_func  # type: ignore[import-untyped]
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from perfuse.config import Settings
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.gpu import gpu_of_name
from perfuse.graph.decompositions import decomposition_table
from perfuse.pipeline import plan_graph
from perfuse.schedule.plan import Plan
from perfuse.target import gpu_target
from tests.unit.graph.joint import partition_joint

CONTEXT = Context.default()


def gpu_context(name: str) -> Context:
    """Default settings for a GPU that need not be there."""
    settings = Settings()
    return Context(gpu_target(settings, gpu_of_name(name)), settings, Counters())


def plans_of(
    fn: Callable[..., Any], *inputs: Any, dynamic: bool = False, context: Context = CONTEXT
) -> list[Plan]:
    """The checked plan of the forward, and of the backward where an input wants a gradient."""
    made: list[Plan] = []

    def keep_plan(module: GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        made.append(plan_of(module, context))
        boxed: Callable[..., Any] = make_boxed_func(module.forward)
        return boxed

    traced = aot_function(
        fn,
        fw_compiler=keep_plan,
        bw_compiler=keep_plan,
        partition_fn=partition_joint,
        decompositions=decomposition_table(),
        dynamic=dynamic,
        keep_inference_input_mutations=True,
    )
    results = [r for r in tree_leaves(traced(*inputs)) if isinstance(r, Tensor)]
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    if wanted:
        outs = [r for r in results if r.requires_grad]
        torch.autograd.grad(outs, wanted, [torch.ones_like(r) for r in outs])
    return made


def plan_of(module: GraphModule, context: Context = CONTEXT) -> Plan:
    """The stages up to the plan, each held to its spec."""
    untuned = replace(context.settings.cpu, tune_matmuls=False)
    settings = replace(context.settings, verify=True, cpu=untuned)
    return plan_graph(module, replace(context, settings=settings)).plan


def wants_grad(*inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.requires_grad_() for x in inputs)
