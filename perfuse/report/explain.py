"""`explain`: recompile a function and report the result."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from perfuse.capture.backend import perfuse_backend
from perfuse.capture.observe import observing, observing_cuts
from perfuse.capture.request import Request
from perfuse.capture.restore import left_as_they_were, modules_of, slots_of
from perfuse.context import Context
from perfuse.counters import counters
from perfuse.graph.facts import reached
from perfuse.graph.partition import Cut
from perfuse.pipeline import Compiled
from perfuse.report.explanation import Explanation, GraphReport
from perfuse.report.memory import TrainingReport
from perfuse.torch_compat.graphs import tree_leaves
from perfuse.torch_compat.records import dynamo_events


def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Explain how `fn` is compiled for these arguments; it runs once, with its backward if any.

    Arguments, the buffers and plain attributes of the modules that it is, is a method of or refers
    to, and the random state are left as they were. A function that is already compiled is explained
    with its own mode and options; it stays compiled, as do all others.
    """
    request = Request.of(fn)
    seen: list[Compiled] = []
    before = counters.snapshot()
    start = time.perf_counter()
    cuts: list[tuple[Cut, Context]] = []
    given = [v for v in tree_leaves([args, kwargs]) if isinstance(v, torch.Tensor)]
    edges = [get_gradient_edge(tensor) for tensor in given if tensor.requires_grad]
    with (
        _put_back(request.function),
        left_as_they_were([*given, *_buffers(request.function)]),
        observing(seen.append),
        observing_cuts(lambda cut, context: cuts.append((cut, context))),
        dynamo_events() as events,
    ):
        backend = partial(perfuse_backend, options=request.overrides)
        result = request.call(args, kwargs, backend)
        _run_backward(result, edges)
    seconds, happened = time.perf_counter() - start, events()
    now = counters.snapshot().items()
    counted = {name: more for name, count in now if (more := count - before.get(name, 0))}
    reports = tuple(GraphReport.of(compiled, i) for i, compiled in enumerate(seen))
    training = tuple(TrainingReport.of(cut, context) for cut, context in cuts)
    layers = None if request.precision is None else request.precision.conversion
    return Explanation(reports, counted, seconds, training, happened, layers)


def _buffers(function: Callable[..., Any]) -> list[torch.Tensor]:
    return [buffer for module in modules_of(function) for buffer in module.buffers()]


@contextmanager
def _put_back(function: Callable[..., Any]) -> Iterator[None]:
    """A block after which the function finds the tensors and plain values that it found before."""
    slots = slots_of(function)
    try:
        yield
    finally:
        for slot in slots:
            slot.put_back()


def _run_backward(result: Any, given: Sequence[GradientEdge]) -> None:
    """Compute gradients, so that the backward is compiled too; .grad is left unchanged.

    `given` is where the arguments are in the autograd graph: what came before is not run, and
    stays as it is.
    """
    leaves = [v for v in tree_leaves(result) if isinstance(v, torch.Tensor) and v.requires_grad]
    inputs: list[Any] = [*given, *_leaf_inputs(leaves, {edge.node for edge in given})]
    if leaves and inputs:
        gradients = [torch.ones_like(leaf) for leaf in leaves]
        try:
            torch.autograd.grad(leaves, inputs, gradients, allow_unused=True, retain_graph=True)
        except RuntimeError as error:
            if "through the graph a second time" not in str(error):
                raise  # otherwise the function ran the backward itself


def _leaf_inputs(results: Sequence[torch.Tensor], ends: set[Node]) -> list[torch.Tensor]:
    """The leaves of the autograd graph under these results, not looking beyond some nodes."""

    def next_of(node: Node) -> Iterator[Node]:
        following = () if node in ends else node.next_functions
        return (after for after, _ in following if after is not None)

    starts = [result.grad_fn for result in results if result.grad_fn is not None]
    nodes = reached(starts, next_of) - ends
    return [node.variable for node in nodes if hasattr(node, "variable")]
