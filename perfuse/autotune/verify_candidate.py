"""Right before fast: a candidate's result is checked before it is timed, and again afterwards.

Its output is poisoned, between guard bands. The result may be off from a wider reference by
about as much as the library's, and it has to be right each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from perfuse.candidates.request import BenchmarkRequest, RandomTensor

GUARD_ELEMENTS = 1024
MOST_ERROR = 2.0  # a candidate's error in units of the library's, root mean square
MOST_DIFFERENCE = 8.0  # its largest difference from the library's result in units of the same
_PATTERN = 0xA5
_MOST_ROWS = 64


class WrongResult(Exception):
    """A candidate computed something else, or wrote where it must not."""

    is_wrong_result = True


class Reference(Protocol):
    """The computation that candidates are checked against."""

    def library(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result as the library computes it."""

    def exact(self, inputs: Sequence[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        """Some rows of the result, in a wider type."""


class Guarded:
    """Memory for a result, with bands around it that nothing may write to."""

    def __init__(self, operand: RandomTensor) -> None:
        total = operand.span + 2 * GUARD_ELEMENTS
        self._bytes = torch.empty(
            total * operand.dtype.itemsize, dtype=torch.uint8, device=operand.device
        )
        flat = self._bytes.view(operand.dtype)
        self.tensor = flat.as_strided(operand.shape, operand.strides, GUARD_ELEMENTS)
        self.poison()

    def poison(self) -> None:
        """Restore the bands, and fill the result with values that no candidate computes."""
        self._bytes.fill_(_PATTERN)
        if self.tensor.dtype.is_floating_point or self.tensor.dtype.is_complex:
            self.tensor.fill_(float("nan"))

    def check(self) -> None:
        """Raise if anything outside of the result was written, gaps between rows included."""
        result = self.tensor.clone()
        pattern = torch.full((result.dtype.itemsize,), _PATTERN, dtype=torch.uint8)
        self.tensor.fill_(pattern.view(result.dtype)[0])
        is_clean = bool((self._bytes == _PATTERN).all())
        self.tensor.copy_(result)
        if not is_clean:
            raise WrongResult("it writes outside of its result")


@dataclass(frozen=True, slots=True)
class Judge:
    """Inputs, the library's result on them, and some rows of the exact one."""

    inputs: tuple[torch.Tensor, ...]
    pristine: tuple[torch.Tensor, ...]  # copies of them
    library: torch.Tensor
    rows: torch.Tensor
    exact: torch.Tensor
    errors: tuple[float, float]  # of the library: root mean square, largest

    @staticmethod
    def of(operands: Sequence[RandomTensor], reference: Reference) -> Judge:
        inputs = tuple(operand.tensor() for operand in operands)
        library = reference.library(inputs)
        count = library.shape[0] if library.dim() else 1
        rows = torch.linspace(0, max(count - 1, 0), min(count, _MOST_ROWS)).round().long()
        rows = rows.to(library.device)
        exact = reference.exact(inputs, rows)
        pristine = tuple(tensor.clone() for tensor in inputs)
        return Judge(inputs, pristine, library, rows, exact, _errors(library[rows], exact))

    def check_inputs(self) -> None:
        """Raise if the inputs were written to; they are restored for the next candidate."""
        is_kept = True
        for given, kept in zip(self.inputs, self.pristine, strict=True):
            if not torch.equal(given, kept):
                given.copy_(kept)
                is_kept = False
        if not is_kept:
            raise WrongResult("it writes to its inputs")

    def check(self, result: Any) -> None:
        """Raise if a result is not that of the reference, or much less exact than the library's."""
        library = self.library
        if not isinstance(result, torch.Tensor):
            raise WrongResult(f"its result is a {type(result).__name__}")
        if (result.shape, result.dtype) != (library.shape, library.dtype):
            raise WrongResult(f"its result is {result.dtype}{list(result.shape)}")
        if not result.numel():
            return
        root, _ = _errors(result[self.rows], self.exact)
        ulp = _epsilon(library.dtype) * float(self.exact.abs().max())
        if not root <= MOST_ERROR * self.errors[0] + ulp:
            raise WrongResult(f"its error is {root:.2g}, the library's {self.errors[0]:.2g}")
        difference = float((result.to(self.exact.dtype) - library).abs().max())
        if not difference <= MOST_DIFFERENCE * self.errors[1] + 4 * ulp:  # also where it is NaN
            raise WrongResult(f"its result differs by {difference:.2g}")


def _epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _errors(result: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    if not exact.numel():
        return 0.0, 0.0
    error = (result.to(exact.dtype) - exact).abs()
    return float(error.square().mean().sqrt()), float(error.max())


class Trial:
    """A candidate loaded on the judge's inputs, with a guarded result."""

    def __init__(self, request: BenchmarkRequest, result: RandomTensor, judge: Judge) -> None:
        self._judge = judge
        self._out = Guarded(result)
        self.run: Callable[[], Any] = request.loaded(judge.inputs, self._out.tensor)

    def verify(self) -> None:
        """Run it on poisoned memory and check what it wrote; WrongResult where that is wrong."""
        self._out.poison()
        result = self.run()
        self._out.check()
        self._judge.check_inputs()
        self._judge.check(result)
