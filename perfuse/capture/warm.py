"""Captures that were compiled before: loaded without tracing them down to ATen again.

Tracing (AOTAutograd, decompositions, partition) is most of what is left of a compile when all code
is built already. An entry names the two compiled graphs and holds the `Facts` to run them by.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.fx import GraphModule

from perfuse.build.compiler import open_store
from perfuse.capture.dynamo_key import capture_key
from perfuse.capture.frame_chunks import build_keeper
from perfuse.capture.replay import replayed
from perfuse.context import Context
from perfuse.graph.canonical import NotCanonical
from perfuse.graph_cache import Executable, load_graph
from perfuse.logs import channel
from perfuse.runtime.wrapper import Facts, Tangent, wrap

CAPTURE = "capture.json"
LOG = channel("capture")


def key_of(module: GraphModule, inputs: Sequence[Any], context: Context) -> str | None:
    """The key of a capture; None, with the reason counted, where it has none."""
    if not context.settings.cache.enabled:
        return None
    try:
        return capture_key(module, inputs, context)
    except NotCanonical as reason:
        context.counters.inc(f"capture.not_cached.{reason}")
        LOG.info("this capture is not cached: %s", str(reason).replace("_", " "))
        return None


def load_capture(key: str, context: Context) -> Callable[..., Any] | None:
    """What runs this capture, if its entry and both its graphs are there, whole."""
    entry = open_store(context).get(key)
    if entry is None:
        return None
    try:
        document = json.loads(entry.read_text(CAPTURE))
        facts = _facts_of(document["facts"])
        forward, backward = document["forward"], document["backward"]
    except (KeyError, TypeError, ValueError):
        context.counters.inc("cache.damaged")
        return None
    ahead = load_graph(forward, context)
    back = load_graph(backward, context) if backward is not None else None
    if ahead is None or (back is None and backward is not None):
        return None
    context.counters.inc("capture.cache_hit")
    ahead = replayed(
        ahead, "forward" if facts.is_training else "inference", facts.num_outputs, context
    )
    back = None if back is None else replayed(back, "backward", 0, context)
    return wrap(ahead.call, None if back is None else partial(getattr, back, "call"), facts)


def store_capture(
    key: str | None,
    forward: Executable,
    backward: Executable | None,
    facts: Facts,
    context: Context,
) -> None:
    """Keep which graphs a capture became, if it has a key and both can be loaded again."""
    if key is None:
        return
    if forward.key is None or (backward is not None and backward.key is None):
        context.counters.inc("capture.not_cached.graph")
        LOG.info("this capture is not cached: one of its graphs is not")
        return
    document = {
        "facts": dataclasses.asdict(facts),
        "forward": forward.key,
        "backward": backward.key if backward is not None else None,
    }
    open_store(context).put(key, {CAPTURE: json.dumps(document).encode()})
    build_keeper(context)


def _facts_of(document: dict[str, Any]) -> Facts:
    tangents = tuple(
        Tangent(t["output"], t["dtype"], tuple(t["shape"]), tuple(t["strides"]), t["device"])
        for t in document["tangents"]
    )
    lists = {name: tuple(document[name]) for name in ("written", "without_grad")}
    return Facts(**{**document, **lists, "tangents": tangents})
