"""`TritonSources`: what the Triton code generator hands to the host program and to the build.

A kernel's arguments are passed in this order: the addresses of `Launch.buffers`, then the values of
`Launch.symbols`. Constants are spelled into the compiled code and are never passed.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfuse.ir.index import Dim
from perfuse.schedule.turns import Scratch


@dataclass(frozen=True, slots=True)
class TritonKernel:
    """One function of the module, with all that its compilation depends on besides its text."""

    name: str
    signature: tuple[tuple[str, str], ...]  # parameter -> "*fp32", "*i8", "i32", "i64", in order
    constants: tuple[tuple[str, int], ...]  # the constexpr parameters, which stand anywhere
    divisible: frozenset[str]  # parameters whose value is promised to be a multiple of 16
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel. Names in `buffers` are the program's, or those in `scratch`.

    A scratch buffer is listed by each launch that uses it, and filled before the first of them.
    A launch whose grid has a zero is left out.
    """

    kernel: str
    buffers: tuple[str, ...]
    symbols: tuple[str, ...]  # size symbols, passed after the buffers
    grid: tuple[Dim, Dim, Dim]
    scratch: tuple[Scratch, ...] = ()


@dataclass(frozen=True, slots=True)
class TritonSources:
    """Every distinct kernel of a program in one Python module, and how each step launches them."""

    text: str
    kernels: tuple[TritonKernel, ...]
    launches: tuple[tuple[Launch, ...], ...]  # those of each Kernel of the plan, in its order

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,)

    @property
    def all_launches(self) -> list[Launch]:
        return [launch for launches in self.launches for launch in launches]
