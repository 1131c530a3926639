"""The library as a source: its calls for a matmul on a CPU, and its call for a site on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from perfuse.candidates.request import BenchmarkRequest, RandomTensor, Run
from perfuse.candidates.site import Site
from perfuse.candidates.source import Contractions, Offer, Source
from perfuse.context import Context
from perfuse.decision import Choice, library
from perfuse.ir.matmul import RIVALS, Operands, call_arguments, rival_call
from perfuse.ir.program import Program
from perfuse.runtime.host_names import resolve_op


@dataclass(frozen=True, slots=True)
class CpuMatmul:
    """a @ b (+ bias) in float32, by sizes and strides."""

    rows: int
    columns: int
    depth: int
    a_strides: tuple[int, int]
    b_strides: tuple[int, int]
    has_bias: bool

    def __str__(self) -> str:
        bias = " + bias" if self.has_bias else ""
        return f"matmul {self.rows}x{self.depth}x{self.columns}{bias}"

    @property
    def work(self) -> int:
        """Its multiplications."""
        return self.rows * self.columns * self.depth

    def distance(self, other: CpuMatmul) -> float:
        """The doublings and halvings between its sizes and the other's; None if layouts differ."""
        if self._layout() != other._layout():
            return math.inf
        pairs = zip(
            (self.rows, self.columns, self.depth),
            (other.rows, other.columns, other.depth),
            strict=True,
        )
        return sum(abs(math.log2(mine / its)) for mine, its in pairs)

    def _layout(self) -> tuple[bool, bool]:
        return self.a_strides[1] == 1, self.b_strides[1] == 1

    def operands(self) -> tuple[RandomTensor, ...]:
        """a, b and the bias, of different random numbers."""
        a = RandomTensor((self.rows, self.depth), self.a_strides, torch.float32, seed=0)
        b = RandomTensor((self.depth, self.columns), self.b_strides, torch.float32, seed=1)
        bias = RandomTensor((self.columns,), (1,), torch.float32, seed=2)
        return (a, b, bias) if self.has_bias else (a, b)

    def result(self) -> RandomTensor:
        return RandomTensor((self.rows, self.columns), (self.columns, 1), torch.float32)


def choices_of(problem: CpuMatmul) -> Sequence[Choice]:
    """The library calls that compute it, the default first."""
    default = "aten.addmm.out" if problem.has_bias else "aten.mm.out"
    right = (problem.depth, problem.columns), problem.b_strides
    rivals = [row.op for row in RIVALS if row.is_available() and row.reads(*right)]
    return tuple(map(library, (default, *rivals)))


@dataclass(frozen=True, slots=True)
class MatmulReference:
    """a @ b (+ bias) by ATen, and in float64."""

    def library(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        a, b, *bias = inputs
        return torch.addmm(bias[0], a, b) if bias else a @ b

    def exact(self, inputs: Sequence[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        a, b, *bias = inputs
        product = a[rows].double() @ b.double()
        return product + bias[0].double() if bias else product


class LibraryMatmul(BenchmarkRequest):
    """A library call that computes a matmul."""

    def __init__(self, op: str, problem: CpuMatmul) -> None:
        self.op = op
        self.operands = problem.operands()

    def loaded(self, inputs: tuple[torch.Tensor, ...], out: torch.Tensor | None) -> Run:
        a, b, *bias = inputs
        call, args = resolve_op(self.op), self._arguments(a, b, bias)
        if rival_call(self.op) is not None or out is None:
            return lambda: call(*args)
        return lambda: call(*args, out=out)

    def _arguments(self, a: torch.Tensor, b: torch.Tensor, bias: list[torch.Tensor]) -> Any:
        return call_arguments(self.op, Operands(a, b, bias[0] if bias else None))


def _choices(problem: Any, context: Context) -> Sequence[Choice]:
    is_known = isinstance(problem, CpuMatmul) and context.target.gpu is None
    return choices_of(problem) if is_known else ()


def _request(problem: Any, choice: Choice, context: Context) -> BenchmarkRequest:
    return LibraryMatmul(choice.name, problem)


def _offer(site: Site, program: Program, context: Context) -> Offer:
    return Offer((site.default,))


ATEN = Source(
    "ATEN",
    lambda target: True,
    _choices,
    _request,
    contractions=Contractions(_offer, write=None),
)
