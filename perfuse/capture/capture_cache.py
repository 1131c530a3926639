"""The cache of captures: loaded without tracing them down to ATen again.

When all code is already built, tracing (AOTAutograd, decompositions, partition) is most of the
compile time that is left. An entry names the two compiled graphs and holds the `RuntimeFacts` to
run them by, and the guards that tracing set on Python numbers: they are set again when it is
loaded.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.fx import GraphModule

from perfuse.cache.access import open_store
from perfuse.cache.manifest import is_key
from perfuse.capture.dynamo_key import CaptureKey, capture_key
from perfuse.capture.replay import replayed
from perfuse.context import Context
from perfuse.errors import MALFORMED, CacheDamaged
from perfuse.graph.canonical import NotCanonical
from perfuse.graph_cache import Executable, load_graph
from perfuse.logs import channel
from perfuse.runtime.wrapper import RuntimeFacts, facts_from, wrap
from perfuse.torch_compat.graphs import GraphKind
from perfuse.torch_compat.guards import CannotSpell, SymbolTable

CAPTURE = "capture.json"
LOG = channel("capture")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a traced capture is kept, and under which guards it holds."""

    key: str
    guards: list[Any]


def key_of(module: GraphModule, inputs: Sequence[Any], context: Context) -> CaptureKey | None:
    """The key of a capture; None, with the reason counted, if it has none."""
    if not context.settings.cache.enabled:
        return None
    try:
        return capture_key(module, inputs, context)
    except NotCanonical as reason:
        context.counters.inc(f"capture.not_cached.{reason}")
        LOG.info("this capture is not cached: %s", str(reason).replace("_", " "))
        return None


def place_of(key: CaptureKey | None, context: Context) -> Place | None:
    """Where to keep a capture that was traced just now.

    If tracing set guards, it holds for some values only and is stored by value, with them.
    """
    if key is None:
        return None
    try:
        guards = key.symbols.guards_since(key.mark)
        chosen = key.by_value if guards else key.general
    except CannotSpell:
        chosen = None
    if chosen is None:
        context.counters.inc("capture.not_cached.guards")
        return None
    return Place(chosen, guards)


def load_capture(key: CaptureKey, context: Context) -> Callable[..., Any] | None:
    """Load this capture, if its entry and both its graphs are in the cache and undamaged."""
    for name in (key.general, key.by_value):
        found = None if name is None else _load(name, key.symbols, context)
        if found is not None:
            return found
    return None


def _load(key: str, symbols: SymbolTable, context: Context) -> Callable[..., Any] | None:
    store = open_store(context)
    entry = store.get(key)
    if entry is None:
        return None
    try:
        document = entry.read_json(CAPTURE)
        facts = facts_from(document["facts"])
        forward, backward = document["forward"], document["backward"]
        if document["key"] != key or not is_key(forward) or not is_key(backward or forward):
            raise ValueError("not an entry of this capture, or without its graphs")
        guards = list(document["guards"])
    except (CacheDamaged, *MALFORMED):
        store.discard(key)
        return None
    ahead = load_graph(forward, context)
    back = load_graph(backward, context) if backward is not None else None
    if ahead is None or (back is None and backward is not None):
        return None
    if not symbols.set_guards(guards):
        context.counters.inc("capture.guards_failed")
        return None
    context.counters.inc("capture.cache_hit")
    first = GraphKind.FORWARD if facts.is_training else GraphKind.INFERENCE
    ahead = replayed(ahead, first, facts.num_outputs, context)
    back = None if back is None else replayed(back, GraphKind.BACKWARD, 0, context)
    return wrap(ahead.call, None if back is None else partial(getattr, back, "call"), facts)


def store_capture(
    place: Place | None,
    forward: Executable,
    backward: Executable | None,
    facts: RuntimeFacts,
    context: Context,
) -> None:
    """Store the graphs of a capture, if it has a key and both can be loaded again."""
    if place is None:
        return
    if forward.key is None or (backward is not None and backward.key is None):
        context.counters.inc("capture.not_cached.graph")
        LOG.info("this capture is not cached because one of its graphs is not")
        return
    document = {
        "key": place.key,
        "guards": place.guards,
        "facts": dataclasses.asdict(facts),
        "forward": forward.key,
        "backward": backward.key if backward is not None else None,
    }
    open_store(context).put(place.key, {CAPTURE: json.dumps(document).encode()})
