"""`trace_capture`: a Dynamo graph that is not in the cache, traced, compiled and stored."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from perfuse.capture import capture_cache
from perfuse.capture.dynamo_key import CaptureKey
from perfuse.capture.facts import facts_of
from perfuse.capture.observe import Observer
from perfuse.capture.shared_memory import with_checked_memory
from perfuse.capture.source_records import summary
from perfuse.capture.trace import TrainingGraphs
from perfuse.context import Context
from perfuse.logs import channel
from perfuse.runtime.host_names import Call
from perfuse.runtime.wrapper import without_tangents, wrap

LOG = channel("capture")


def trace_capture(
    module: GraphModule,
    example_inputs: Sequence[Any],
    key: CaptureKey | None,
    watching: Sequence[Observer],
    context: Context,
) -> Callable[..., Any]:
    """Trace and compile a capture; store it under its key, if it has one."""
    context.counters.inc("capture.traced")
    if LOG.isEnabledFor(logging.INFO):
        LOG.info("%s: traced and compiled for %s", summary(module), context.target)
    graphs = TrainingGraphs(context, watching)
    traced = graphs.capture.trace(module, example_inputs)
    facts = facts_of(graphs.capture.graphs, len(example_inputs), context)
    checked = with_checked_memory(traced, module, example_inputs, context.counters)
    if facts is None or checked is not traced:
        return without_tangents(checked)
    place = capture_cache.place_of(key, context)
    forward = graphs.forward
    if not facts.is_training:
        if _wants_gradients(example_inputs):
            context.counters.inc("capture.not_cached.without_gradients")
        else:
            capture_cache.store_capture(place, forward, None, facts, context)
        return wrap(forward.call, None, facts)

    def backward() -> Call:
        made = graphs.backward()
        if graphs.keeps_budget:  # otherwise the next process reports the missed budget again
            capture_cache.store_capture(place, forward, made, facts, context)
        return made.call

    return wrap(forward.call, backward, facts)


def _wants_gradients(inputs: Sequence[Any]) -> bool:
    """Whether the caller may want gradients, although no result has one.

    A failed torch.func transform can leave PyTorch in a state in which every trace is for
    inference. This process is then wrong, with any backend; the next one must not be.
    """
    is_trainable = any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
    return is_trainable and torch.is_grad_enabled()
