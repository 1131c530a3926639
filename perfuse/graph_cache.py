"""The graph cache: a graph that was compiled before, here or in another process, is loaded. It is
above the cache of built libraries, which needs the sources for a lookup. The key covers everything
that decides the result: the graph's canonical text, versions, target and settings. An entry holds
data (`runtime/saved.py`); a lost or damaged one only makes the next compile slower.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from perfuse.backends import backend_of
from perfuse.cache import keys
from perfuse.cache.access import open_store
from perfuse.cache.keys import identity, key_of
from perfuse.cache.lock_file import lock_digest
from perfuse.cache.manifest import Entry
from perfuse.codegen.host.tables import GpuTables
from perfuse.context import Context
from perfuse.decision import Decision
from perfuse.deferred import deferred
from perfuse.errors import MALFORMED, CacheDamaged, PerfuseError
from perfuse.graph.canonical import NotCanonical, aten_text, is_storable
from perfuse.logs import channel
from perfuse.runtime.host_names import Call
from perfuse.runtime.saved import SavedProgram, files_of, read_program
from perfuse.torch_compat.guards import graph_assumptions

if TYPE_CHECKING:
    from perfuse.pipeline import Compiled

LOG = channel("cache")

# A graph that is loaded needs no compiler.
compile_graph: Callable[[GraphModule, Context], Compiled]
compile_graph = deferred("perfuse.pipeline:compile_graph")


@dataclass(frozen=True, slots=True)
class Executable:
    """A callable graph, and the key it can be loaded by, if it is cached."""

    call: Call
    key: str | None
    gpu: GpuTables | None = None  # what it launches, where it runs on a GPU
    decisions: tuple[Decision, ...] = ()  # what was measured to choose among implementations


def load_or_compile(
    module: GraphModule, context: Context, observe: Callable[[Compiled], None] | None = None
) -> Executable:
    """The graph's executable. With an `observe` function, artefacts are always generated."""
    pinned = lock_digest(context.settings.lock_file)
    key = graph_key(module, context) if context.settings.cache.enabled else None
    if key is not None and observe is None:
        found = load_graph(key, context)
        if found is not None:
            context.counters.inc("graph.cache_hit")
            LOG.info("graph loaded: %s", key)
            return found
    if key is not None:
        context.counters.inc("graph.cache_miss")
        LOG.info("graph not found: %s", key)
    assumed = graph_assumptions(_values(module))
    compiled = compile_graph(module, context)
    if observe is not None:
        observe(compiled)
    if key is not None and graph_assumptions(_values(module)) != assumed:
        _skipped(context, "guards")  # a loaded program would lack them
        key = None
    if key is not None and lock_digest(context.settings.lock_file) != pinned:
        _skipped(context, "lock_file")  # it was written meanwhile: these may be other choices
        key = None
    kept = store_graph(key, compiled, context) if key else None
    return Executable(compiled.call, kept, compiled.host.gpu, compiled.decisions)


def graph_key(module: GraphModule, context: Context) -> str | None:
    """The hash of everything a compiled graph depends on; None if text cannot identify it."""
    try:
        return key_of(keys.GRAPH, *identity(context), aten_text(module))
    except NotCanonical as reason:
        _skipped(context, str(reason))
        return None


def load_graph(key: str, context: Context) -> Executable | None:
    """The executable under this key, if it and its library are in the store, undamaged."""
    store = open_store(context)
    entry = store.get(key)
    if entry is None:
        return None
    try:
        saved = read_program(entry.read_bytes)
    except CacheDamaged as error:
        LOG.warning("damaged entry %s: %s", key, error.message)
        store.discard(key)
        return None
    built = [found for name in saved.built if (found := store.get(name)) is not None]
    if len(built) < len(saved.built):
        return None
    try:
        call = backend_of(context.target).load(saved.host, built, saved.constants, context)
    except (PerfuseError, *MALFORMED) as error:  # undamaged, but does not load
        LOG.warning("entry %s does not load: %s", key, error)
        for name in (key, *saved.built):
            store.discard(name)
        return None
    for name, n in saved.counts.items():
        context.counters.inc(name, n)
    return Executable(call, key, saved.host.gpu, saved.decisions)


def store_graph(key: str, compiled: Compiled, context: Context) -> str | None:
    """Store a compiled graph; its key, or None if it holds something that is not data."""
    constants = compiled.program.constants
    is_searching = context.settings.search_autotune_cache
    if any((is_searching and d.is_open) or not d.is_final for d in compiled.decisions):
        _skipped(context, "undecided")  # what is remembered later has to be found
        return None
    if any(name.startswith("py:") for name in constants):
        _skipped(context, "python_call")
        return None
    if not all(is_storable(value) for value in constants.values()):
        _skipped(context, "constant")
        return None
    built = tuple(entry.key for entry in compiled.built)
    # Counts describe the program, and are counted again when it is loaded; tuning is not done then,
    # and no candidate is built.
    own = ("autotune.", "build.")
    counts = {name: n for name, n in compiled.counts.items() if not name.startswith(own)}
    saved = SavedProgram(
        compiled.host, built, constants, counts, str(compiled.plan), compiled.decisions
    )
    entry: Entry = open_store(context).put(key, files_of(saved))
    return entry.key


def _skipped(context: Context, reason: str) -> None:
    context.counters.inc(f"graph.not_cached.{reason}")
    LOG.info("graph not cached: %s", reason.replace("_", " "))


def _values(module: GraphModule) -> list[Any]:
    return [node.meta.get("val") for node in module.graph.nodes]
