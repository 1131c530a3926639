"""Writes to memory that is seen twice: by several arguments, or by several elements of one.

A graph is functional, and what it computes for a written argument is copied back at its end. Where
elements of that argument share a place in memory, each write changes others: such a graph runs
eagerly.

Arguments that share memory, one of which the graph writes to, are checked at every call.
AOTAutograd replaces such arguments by their common base, and writes their offsets and the size of
the base into the graph. Dynamo guards on none of these: without a check, a call with other
arguments would read and write memory that is not theirs.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from perfuse.capture.failure import CompileWarning
from perfuse.counters import Counters
from perfuse.torch_compat.autograd import merges_arguments, writes_overlapping
from perfuse.torch_compat.tensors import placement, storage_id

Call = Callable[..., Any]

OTHER_OFFSETS = (
    "it writes to an argument that shares memory with another, and was compiled for other offsets "
    "in that memory"
)


def with_checked_memory(
    call: Call, module: GraphModule, inputs: Sequence[Any], counters: Counters
) -> Call:
    """The call just traced; the graph runs eagerly where arguments share memory otherwise."""
    if writes_overlapping(_as_traced(module, inputs)):
        _report("it writes to arguments whose elements overlap in memory", counters)
        eager: Call = module.forward
        return eager
    if not merges_arguments(inputs):
        return call
    sharing = _sharing(inputs)
    traced = _relation(inputs, sharing)
    is_reported = False

    def checked(*args: Any) -> Any:
        nonlocal is_reported
        if _agrees(_relation(args, sharing), traced):
            return call(*args)
        if not is_reported:
            is_reported = True
            _report(OTHER_OFFSETS, counters)
        return module.forward(*args)

    return checked


def _as_traced(module: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The inputs of a graph of Dynamo's, with symbols where their sizes are dynamic."""
    nodes = module.graph.find_nodes(op="placeholder")
    return [n.meta.get("example_value", x) for n, x in zip(nodes, inputs, strict=True)]


def _sharing(inputs: Sequence[Any]) -> list[int]:
    """The places of arguments that share memory with others."""
    users: dict[int, list[int]] = {}
    for place, value in enumerate(inputs):
        if isinstance(value, Tensor):
            users.setdefault(storage_id(value), []).append(place)
    return [place for places in users.values() if len(places) > 1 for place in places]


def _relation(args: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """Which of the arguments share memory, and where in it and in their bases they are."""
    numbers: dict[int, int] = {}
    found: list[Any] = []
    for place in places:
        tensor = args[place]
        found.append(numbers.setdefault(storage_id(tensor), len(numbers)))
        found += placement(tensor)
    return found


def _agrees(found: Sequence[Any], traced: Sequence[Any]) -> bool:
    """Whether the numbers are those of the trace; symbolic ones have guards of their own."""
    if len(found) != len(traced):
        return False
    pairs = zip(found, traced, strict=True)
    return all(now == then for now, then in pairs if isinstance(then, int))


def _report(reason: str, counters: Counters) -> None:
    counters.inc("graph.eager")
    warnings.warn(f"Perfuse runs a graph eagerly: {reason}", CompileWarning, stacklevel=3)
