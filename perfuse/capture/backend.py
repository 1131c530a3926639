"""`perfuse_backend`: the function that `torch.compile(..., backend="perfuse")` calls."""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from perfuse import config
from perfuse.capture import capture_cache
from perfuse.capture.device import device_of
from perfuse.capture.failure import warn_eager
from perfuse.capture.list_inputs import flat, flattened, takes_lists, with_lists
from perfuse.capture.modes import settings_for
from perfuse.capture.observe import cut_observers, observers
from perfuse.capture.pause_gc import pause_garbage_collection
from perfuse.capture.source_records import source_observers, summary
from perfuse.context import Context
from perfuse.counters import counters
from perfuse.deferred import deferred
from perfuse.errors import UnsupportedPython
from perfuse.logs import channel
from perfuse.torch_compat.graphs import is_drawn_number
from perfuse.torch_compat.ops import keep_checks
from perfuse.torch_compat.registration import never_trace
from perfuse.torch_compat.tensors import in_memory

LOG = channel("capture")

# Tracing and the compiler: a capture that is found in the cache needs neither.
trace_capture: Callable[..., Callable[..., Any]]
trace_capture = deferred("perfuse.capture.trace_capture:trace_capture")

Prepare = Callable[[Any], Any]

# Dynamo's guards miss calls to `train()` or `eval()`: the wrong graph runs, silently.
UNSAFE_PYTHONS = frozenset({(3, 13, 0)})

# When the backend is first named, which is before anything is captured for it. A backward that is
# compiled in the middle of a traced function is not part of that function.
pause_garbage_collection()
never_trace("perfuse", but="precision")
keep_checks()


def perfuse_backend(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph: forward now, backward too if gradients are wanted.

    The settings are read once, here: the backward is compiled under those of its forward.
    """
    check_interpreter()
    if takes_lists(example_inputs):
        module_of_tensors = flattened(module, example_inputs)
        call = perfuse_backend(module_of_tensors, flat(example_inputs), mode=mode, options=options)
        return with_lists(call, module)
    settings = settings_for(config.snapshot(), mode, options)
    try:
        context = Context.on(device_of(module, example_inputs), settings)
        inputs = [in_memory(x) if isinstance(x, Tensor) else x for x in example_inputs]
        call = compile_capture(module, inputs, context)
        prepared = _prepared(module, example_inputs, inputs)
        return _with_prepared(call, prepared) if prepared else call
    except Exception as error:
        if settings.on_error == "raise":
            raise
        warn_eager(error, counters)
        eager: Callable[..., Any] = module.forward
        return eager


def _prepared(
    module: GraphModule, example_inputs: Sequence[Any], inputs: Sequence[Any]
) -> dict[int, Prepare]:
    """Changes to arguments before the graph gets them, by place."""
    made: dict[int, Prepare] = {}
    for i, (given, used) in enumerate(zip(example_inputs, inputs, strict=True)):
        if given is not used:
            made[i] = in_memory
    for i, node in enumerate(module.graph.find_nodes(op="placeholder")):
        if is_drawn_number(node):  # traced as float32, and passed as float64
            made[i] = methodcaller("to", inputs[i].dtype)
    return made


def _with_prepared(call: Callable[..., Any], prepared: Mapping[int, Prepare]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        given = list(args)
        for i, prepare in prepared.items():
            given[i] = prepare(given[i])
        return call(*given)

    return run


def check_interpreter(version: Sequence[int | str] = sys.version_info) -> None:
    """Raise on Python versions in which graphs run although their guards fail, with any backend."""
    if tuple(version[:3]) in UNSAFE_PYTHONS:
        name = ".".join(map(str, version[:3]))
        raise UnsupportedPython(
            f"Python {name} cannot be used with torch.compile: a compiled module keeps running its "
            "training graph after eval(), and vice versa",
            hint=f"upgrade to a later Python {version[0]}.{version[1]}.",
        )


def compile_capture(
    module: GraphModule, example_inputs: Sequence[Any], context: Context
) -> Callable[..., Any]:
    """Load this capture from the cache, or trace and compile it."""
    watching = (*observers(), *source_observers())
    key = capture_cache.key_of(module, example_inputs, context)
    is_watched = bool(watching or cut_observers())
    found = capture_cache.load_capture(key, context) if key is not None and not is_watched else None
    if found is not None:
        if LOG.isEnabledFor(logging.INFO):
            LOG.info("%s: loaded from the cache", summary(module))
        return found
    return trace_capture(module, example_inputs, key, watching, context)
