"""One variant of an artefact: the arguments it was compiled for, and the compiled call.

Sizes are numbers, or, where a variant was compiled for any size, formulas over size symbols. A
symbol is bound by the argument whose size it is; each call checks what tracing assumed of it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import CodeType
from typing import Any

import torch

from perfuse.errors import ArtefactError
from perfuse.runtime.host_names import with_strides
from perfuse.runtime.size_formula import compiled_formula, evaluate
from perfuse.runtime.tree import collect, rebuild

Size = int | str  # a number, or a formula over size symbols
OTHER_ARGUMENTS = "pass such a tensor, or compile a variant for this one."
SMALL_SIZES = (
    "sizes 0 and 1 need their own variant: add example arguments of that size to variants=[...]."
)
OTHER_SIZES = (
    "add example arguments of such sizes to variants=[...]; if the function itself does not need "
    "this, compile it with example sizes that differ from one another."
)


class InputKind(StrEnum):
    """Where an input of a graph comes from."""

    HELD, ARGUMENT = "held", "argument"  # the function holds it, or the call passes it
    SIZE, NUMBER = "size", "number"


@dataclass(frozen=True, slots=True)
class TensorRow:
    """The requirements on one tensor argument."""

    dtype: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    device: str
    is_written: bool
    has_gradient: bool  # a training step gives it one

    @staticmethod
    def of(document: Mapping[str, Any]) -> TensorRow:
        return TensorRow(
            str(document["dtype"]),
            tuple(document["shape"]),
            tuple(document["strides"]),
            str(document["device"]),
            bool(document["is_written"]),
            bool(document["has_gradient"]),
        )

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether this is such a tensor, whatever its sizes."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        given = (dtype, tensor.dim(), str(tensor.device))
        return given == (self.dtype, len(self.shape), self.device)

    def laid_out(self, tensor: torch.Tensor, sizes: Sizes, where: str) -> torch.Tensor:
        """The tensor with the strides that the program expects."""
        strides = tuple(map(sizes.value, self.strides))
        made = with_strides(tensor, strides)
        if made is not tensor and self.is_written:
            raise ArtefactError(
                f"{where} is written to and has strides {tensor.stride()}, not {strides}",
                hint="pass a tensor with these strides.",
            )
        return made

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}] on {self.device}"


class Sizes:
    """The size symbols of one call."""

    __slots__ = ("_formulas", "known")

    def __init__(self, formulas: Mapping[str, CodeType]) -> None:
        self._formulas = formulas
        self.known: dict[str, int] = {}

    def bind(self, wanted: Sequence[Size], given: Sequence[int]) -> None:
        """Learn the symbols that sizes stand for by themselves; the first to name one binds it."""
        for size, number in zip(wanted, given, strict=False):
            if isinstance(size, str) and size.isidentifier():
                self.known.setdefault(size, number)

    def value(self, size: Size) -> int:
        if isinstance(size, int):
            return size
        known = self.known.get(size)
        return known if known is not None else int(self.holds(size))

    def holds(self, formula: str) -> Any:
        try:
            return evaluate(self._formulas[formula], self.known)
        except ZeroDivisionError:  # a guard that divides by an empty dimension
            return False


class Variant:
    """The arguments of one compiled graph, its results, and the call between them."""

    def __init__(
        self,
        run: Callable[..., Sequence[Any]],
        document: Mapping[str, Any],
        held: Mapping[str, Any],
    ) -> None:
        self._run = run
        self._held = held
        self._arguments = document["arguments"]
        self._results = document["results"]
        self._places: list[list[Any]] = document["inputs"]
        self._guards: list[str] = document["guards"]
        self.rows = [TensorRow.of(row) for row in document["tensors"]]
        self.is_training = bool(document["is_training"])
        self._formulas = {text: compiled_formula(text) for text in self._texts()}
        self._num_written = sum(row.is_written for row in self.rows)

    def _texts(self) -> set[str]:
        sizes = [size for row in self.rows for size in (*row.shape, *row.strides)]
        sizes += [where for kind, where in self._places if kind == InputKind.SIZE]
        return {text for text in [*sizes, *self._guards] if isinstance(text, str)}

    def inputs_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The graph's inputs, then the arguments; raises ArtefactError if these do not match."""
        found: dict[int, torch.Tensor] = {}
        collect(self._arguments, [list(args), kwargs], found, "arguments")
        sizes, rows = Sizes(self._formulas), list(enumerate(self.rows))
        for number, row in rows:
            sizes.bind(row.shape, found[number].shape)
        for number, row in rows:  # after all sizes: a stride may be a number of its own
            sizes.bind(row.strides, found[number].stride())
        for number, _ in rows:
            self._check(number, found[number], sizes)
        for guard in self._guards:
            if not sizes.holds(guard):
                raise self._broken(guard, sizes)
        if self._num_written:
            self._check_apart(found)
        tensors = [row.laid_out(found[n], sizes, f"tensor argument {n}") for n, row in rows]
        return [self._input(kind, where, tensors, sizes) for kind, where in self._places] + tensors

    def _check(self, number: int, tensor: torch.Tensor, sizes: Sizes) -> None:
        """Raise ArtefactError if the tensor's kind or sizes do not match."""
        row = self.rows[number]
        if not row.takes(tensor) or tuple(map(sizes.value, row.shape)) != tensor.shape:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ArtefactError(
                f"tensor argument {number} is {dtype}{list(tensor.shape)} on {tensor.device}, but "
                f"the artefact was compiled for {row}{self._wrong_dimension(row, tensor, sizes)}",
                hint=OTHER_ARGUMENTS,
            )
        if tensor.requires_grad and not row.has_gradient and self.is_training:
            raise ArtefactError(
                f"tensor argument {number} requires a gradient but was compiled without one",
                hint="detach it, or compile with an example argument that requires_grad.",
            )
        if tensor.requires_grad and not self.is_training and torch.is_grad_enabled():
            raise ArtefactError(
                f"tensor argument {number} requires a gradient but this is for inference only",
                hint="call it under torch.no_grad(), or compile it with training=True.",
            )

    def _wrong_dimension(self, row: TensorRow, tensor: torch.Tensor, sizes: Sizes) -> str:
        """The dimension that is wrong and what it must be, if the sizes alone do not show it."""
        if not self._formulas or not row.takes(tensor):
            return ""
        for dim, (wanted, size) in enumerate(zip(row.shape, tensor.shape, strict=True)):
            if (must := sizes.value(wanted)) != size:
                other = f"equal {self._place_of(wanted)}, which is " if must != wanted else "be "
                return f": dimension {dim} must {other}{must}"
        return ""

    def _broken(self, guard: str, sizes: Sizes) -> ArtefactError:
        """The refusal of sizes for which a guard does not hold."""
        names = [name for name in sizes.known if re.search(rf"\b{name}\b", guard)]
        values = "; ".join(f"{n}, {self._place_of(n)}, is {sizes.known[n]}" for n in names)
        is_small = any(sizes.known[name] < 2 for name in names)
        return ArtefactError(
            f"the artefact requires {_bare(guard)}, but {values}",
            hint=SMALL_SIZES if is_small else OTHER_SIZES,
        )

    def _place_of(self, name: Size) -> str:
        """The dimension, or else the stride, that has this name."""
        for what, field in (("dimension", "shape"), ("stride", "strides")):
            for number, row in enumerate(self.rows):
                if name in (named := getattr(row, field)):
                    return f"{what} {named.index(name)} of tensor argument {number}"
        return "a size derived from others"

    def assumptions(self) -> list[str]:
        """The conditions on sizes, as formulas over their names."""
        return [_bare(guard) for guard in self._guards]

    def _input(self, kind: str, where: Any, tensors: Sequence[Any], sizes: Sizes) -> Any:
        if kind == InputKind.HELD:
            return self._held[where]
        if kind == InputKind.ARGUMENT:
            return tensors[where]
        return sizes.value(where) if kind == InputKind.SIZE else where

    def _check_apart(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Refuse a written tensor that shares memory with another: not what was compiled."""
        homes: dict[int, int] = {}
        for number in range(len(self.rows)):
            storage = tensors[number].untyped_storage().data_ptr()
            other = homes.setdefault(storage, number)
            both = (self.rows[number].is_written, self.rows[other].is_written)
            if storage and other != number and any(both):
                raise ArtefactError(
                    f"tensor arguments {other} and {number} share memory, and one is written to",
                    hint="pass tensors that do not overlap.",
                )

    def __call__(self, inputs: list[Any]) -> Any:
        num_inputs = len(self._places)
        results = self._run(*inputs[:num_inputs])
        return rebuild(self._results, [*results, *inputs[num_inputs:]])

    def __str__(self) -> str:
        kind = "training" if self.is_training else "inference"
        return f"{kind}: {', '.join(map(str, self.rows)) or 'no tensors'}"


def _bare(formula: str) -> str:
    """The formula without the parentheses around the whole of it."""
    depths = itertools.accumulate((c == "(") - (c == ")") for c in formula)
    is_wrapped = formula.startswith("(") and all(list(depths)[:-1])
    return formula[1:-1] if is_wrapped else formula
