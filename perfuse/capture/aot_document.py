"""The description that `perfuse.load` calls a graph by: arguments, sizes, results, as JSON."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import sympy
import torch

from perfuse.capture.aot_capture import CapturedCall
from perfuse.capture.facts import number_or_formula
from perfuse.errors import ArtefactError, UnsupportedOp
from perfuse.lower.symbols import host_formula
from perfuse.runtime.saved import pack_tensors
from perfuse.runtime.tree import describe
from perfuse.runtime.variant import InputKind
from perfuse.torch_compat.graphs import tree_leaves
from perfuse.torch_compat.guards import SizeNames

NO_VIEWS = "return copies (.clone()) and tensors of fixed sizes."


class Held:
    """The tensors that a function holds, by name, each once, no matter how many variants use it."""

    def __init__(self, fn: Any) -> None:
        self._names: dict[int, str] = {}  # by the id of the tensor
        self._tensors: dict[str, torch.Tensor] = {}
        if isinstance(fn, torch.nn.Module):
            named = (*fn.named_parameters(), *fn.named_buffers())
            self._names = {id(tensor): name for name, tensor in named}

    def name_of(self, tensor: torch.Tensor) -> str:
        if id(tensor) not in self._names:
            taken = set(self._names.values())  # a module's own parameter may be called p0
            free = (name for i in itertools.count() if (name := f"p{i}") not in taken)
            self._names[id(tensor)] = next(free)
        name = self._names[id(tensor)]
        self._tensors[name] = tensor  # kept, so that its id stays its own
        return name

    def packed(self) -> tuple[list[dict[str, Any]], bytes]:
        plain = {name: tensor.detach() for name, tensor in self._tensors.items()}
        rows, data = pack_tensors(plain)
        for row in rows:
            row["requires_grad"] = self._tensors[row["name"]].requires_grad
        return rows, data


def document_of(
    capture: CapturedCall, args: Sequence[Any], kwargs: dict[str, Any], held: Held
) -> dict[str, Any]:
    """The description by which a loaded artefact calls one variant."""
    facts = capture.facts
    assert facts is not None
    arguments = [list(args), kwargs]
    given = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    numbers = {id(tensor): number for number, tensor in enumerate(given)}
    written = {id(capture.inputs[i]) for i in facts.written}
    known = capture.traced_arguments
    names = SizeNames.of(known.values(), capture.traced)
    is_looked_up = all(id(v) in known for v in capture.inputs if id(v) in numbers)
    fresh = names.fresh() if capture.is_dynamic and is_looked_up else None
    rows = [
        _row(tensor, id(tensor) in written) | _layout(tensor, known.get(id(tensor)), names, fresh)
        for tensor in given
    ]
    pairs = zip(capture.inputs, capture.traced, strict=True)
    return {
        "arguments": describe(arguments, lambda tensor: numbers[id(tensor)]),
        "tensors": rows,
        "inputs": [_place(value, like, numbers, held, names) for value, like in pairs],
        "guards": sorted((_formula(guard) for guard in names.guards), key=len),  # plain ones first
        "results": describe(capture.result, partial(_number_of, [*capture.results, *given])),
        "facts": dataclasses.asdict(facts),
        "is_training": facts.is_training,
    }


def _place(
    value: Any, traced: Any, numbers: dict[int, int], held: Held, names: SizeNames
) -> list[Any]:
    """Where an input of the graph comes from: an argument, a size of one, or the function."""
    if isinstance(value, torch.Tensor):
        known = numbers.get(id(value))
        if known is None:
            return [InputKind.HELD, held.name_of(value)]
        return [InputKind.ARGUMENT, known]
    if isinstance(value, bool | int | float):
        size = _size(traced, names) if isinstance(traced, torch.SymInt) else value
        return [InputKind.SIZE, size] if isinstance(size, str) else [InputKind.NUMBER, value]
    raise ArtefactError(f"the graph depends on a {type(value).__name__}", hint=NO_VIEWS)


def _row(tensor: torch.Tensor, is_written: bool) -> dict[str, Any]:
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
        "is_written": is_written,
        "has_gradient": tensor.requires_grad,
    }


def _layout(
    tensor: torch.Tensor,
    traced: torch.Tensor | None,
    names: SizeNames,
    fresh: Iterator[sympy.Symbol] | None,
) -> dict[str, Any]:
    """Shape and strides of an argument; one that tracing did not look at takes `fresh` names."""
    if traced is None and fresh is not None:
        shape = [str(next(fresh)) for _ in tensor.shape]
        steps = [" * ".join(shape[dim + 1 :]) or 1 for dim in range(len(shape))]
        return {"shape": shape, "strides": steps}
    like = tensor if traced is None else traced
    return {
        "shape": [_size(size, names) for size in like.shape],
        "strides": [_size(stride, names) for stride in like.stride()],
    }


def _size(size: int | torch.SymInt, names: SizeNames) -> int | str:
    return number_or_formula(size, names.named, _formula)


def _formula(expression: sympy.Basic) -> str:
    try:
        return host_formula(expression)
    except UnsupportedOp as error:
        raise ArtefactError(
            f"an artefact cannot record the function's assumptions about sizes: {error.message}",
            hint="compile it for fixed sizes.",
        ) from error


def _number_of(known: list[Any], tensor: torch.Tensor) -> int:
    """The number of a result: of those the graph gave, and after these the arguments."""
    for number, value in enumerate(known):
        if value is tensor:
            return number
    raise ArtefactError("a result is not an output of the graph", hint=NO_VIEWS)
