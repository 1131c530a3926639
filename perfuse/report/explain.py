"""`explain`: recompile a function and report the result."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from perfuse.capture.backend import perfuse_backend
from perfuse.capture.observe import observing, observing_cuts
from perfuse.capture.request import Request
from perfuse.context import Context
from perfuse.counters import counters
from perfuse.graph.facts import reached
from perfuse.graph.partition import Cut
from perfuse.pipeline import Compiled
from perfuse.precision.whole_model import region_around, whole_model_of, without_region
from perfuse.report.explanation import Explanation, GraphReport
from perfuse.report.memory import TrainingReport
from perfuse.torch_compat.graphs import tree_leaves
from perfuse.torch_compat.records import dynamo_events


def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Explain how `fn` is compiled for these arguments; it runs once, with its backward if any.

    A function that is already compiled is explained with its own mode and options; it stays
    compiled, as do all others.
    """
    request = Request.of(without_region(fn))
    seen: list[Compiled] = []
    before = counters.snapshot()
    start = time.perf_counter()
    cuts: list[tuple[Cut, Context]] = []
    with (
        observing(seen.append),
        observing_cuts(lambda cut, context: cuts.append((cut, context))),
        dynamo_events() as events,
    ):
        backend = partial(perfuse_backend, options=request.overrides)
        with region_around(fn, args, kwargs):
            result = request.call(args, kwargs, backend)
        _run_backward(result)
    seconds, happened = time.perf_counter() - start, events()
    now = counters.snapshot().items()
    counted = {name: more for name, count in now if (more := count - before.get(name, 0))}
    reports = tuple(GraphReport.of(compiled, i) for i, compiled in enumerate(seen))
    training = tuple(TrainingReport.of(cut, context) for cut, context in cuts)
    whole = whole_model_of(fn)
    layers = None if whole is None else whole.conversion
    return Explanation(reports, counted, seconds, training, happened, layers)


def _run_backward(result: Any) -> None:
    """Compute gradients, so that the backward is compiled too; .grad is left unchanged."""
    leaves = [v for v in tree_leaves(result) if isinstance(v, torch.Tensor) and v.requires_grad]
    if not leaves:
        return
    inputs = _leaf_inputs(leaves)
    if inputs:
        gradients = [torch.ones_like(leaf) for leaf in leaves]
        torch.autograd.grad(leaves, inputs, gradients, allow_unused=True)


def _leaf_inputs(results: list[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves of the autograd graph under these results."""
    ends: list[Any] = [result.grad_fn for result in results if result.grad_fn is not None]
    nodes = reached(ends, lambda n: (after for after, _ in n.next_functions if after is not None))
    return [node.variable for node in nodes if hasattr(node, "variable")]
