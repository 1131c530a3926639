"""Failed compiles: an error that names what was being compiled, or a fallback to eager."""

import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.errors import CompileFailed, PerfuseError
from perfuse.graph.blame import node_of
from perfuse.graph_cache import Executable
from perfuse.torch_compat.graphs import source_line

PACKAGE = Path(__file__).parent.parent


class CompileWarning(UserWarning):
    """A graph could not be compiled and runs eagerly."""


def compile_or_eager(
    module: GraphModule, context: Context, name: str, compile_it: Callable[[], Executable]
) -> Executable:
    """Call `compile_it()`; if it fails, raise or run eagerly as the setting on_error says."""
    try:
        return compile_it()
    except Exception as error:
        described = describe(error, module, name)
        if context.settings.on_error == "raise":
            raise described from error
        warn_eager(described, context.counters)
        return Executable(eager_call(module), None)


def warn_eager(error: BaseException, counters: Counters) -> None:
    """Warn once per graph that it runs eagerly, and why."""
    counters.inc("graph.eager")
    message = f"Perfuse could not compile a graph and runs it eagerly: {error}"
    warnings.warn(message, CompileWarning, stacklevel=2)


def eager_call(module: GraphModule) -> Callable[[list[Any]], tuple[Any, ...]]:
    """The graph itself, with the calling convention of a compiled one."""

    def call(args: list[Any]) -> tuple[Any, ...]:
        values = list(args)
        args.clear()
        return tuple(module(*values))

    return call


def describe(error: Exception, module: GraphModule, name: str) -> PerfuseError:
    """Add to an error what was being compiled: the graph, the op, the user's line."""
    node = node_of(error)
    where = f"the {name} graph, {len(module.graph.nodes)} nodes"
    line = (source_line(node) if node is not None else "") or _first_line(module)
    at = f"{line} ({where})" if line else where
    if isinstance(error, PerfuseError):
        error.at = error.at if error.at is not None else at
        return error
    op = f" on {node.target}" if node is not None else ""
    message = f"{_room_of(error)} failed{op}: {type(error).__name__}: {error}"
    return CompileFailed(message, at=at)


def _room_of(error: BaseException) -> str:
    """The room of the innermost Perfuse function in the traceback."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(PACKAGE):
            return path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "the compiler"


def _first_line(module: GraphModule) -> str:
    lines = (source_line(node) for node in module.graph.nodes if node.op == "call_function")
    return next((line for line in lines if line), "")
