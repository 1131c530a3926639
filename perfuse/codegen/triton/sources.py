"""`TritonSources`: what the Triton code generator passes to the host program and the build.

A kernel's arguments are passed in this order: the addresses of `Launch.buffers`, the values of
`Launch.symbols`, then `Launch.maps`. Constants are spelled into the compiled code, never passed.
A kernel may also be a *host call*: a C++ function of a library of its own that launches on the
given stream.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfuse.ir.dtype import DType
from perfuse.ir.index import Dim
from perfuse.schedule.turns import Scratch


@dataclass(frozen=True, slots=True)
class TritonKernel:
    """One function of the module, with all that its compilation depends on besides its text."""

    name: str
    signature: tuple[tuple[str, str], ...]  # parameter -> "*fp32", "*i8", "i32", "i64", in order
    constants: tuple[tuple[str, int], ...]  # the constexpr parameters, which stand anywhere
    divisible: frozenset[str]  # parameters whose value is assumed to be a multiple of 16
    num_warps: int
    num_stages: int


SWIZZLED_BYTES = 128  # the width of a block in shared memory whose rows are interleaved


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A matrix that a kernel copies in blocks by a tensor map, which the launcher makes."""

    buffer: str
    offset: int  # elements before the first
    dtype: DType
    shape: tuple[int, int]
    stride: int  # elements from a row to the next
    block: tuple[int, int]

    @property
    def copied(self) -> tuple[int, int]:
        """The block that one instruction copies: as wide as what is interleaved."""
        return self.block[0], min(self.block[1], SWIZZLED_BYTES // self.dtype.num_bytes)


# The functions of the library of a host call: the bytes that it needs besides, and the call.
WORKSPACE, RUN = "pf_host_workspace", "pf_host_run"


@dataclass(frozen=True, slots=True)
class HostCall:
    """The arguments of a host call, besides the addresses of its buffers."""

    offsets: tuple[int, ...]  # bytes that are added to each address
    sizes: tuple[int, ...]
    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class HostLaunch:
    """A kernel that is a host call: the C++ source of its library, and what is passed to it."""

    text: str
    buffers: tuple[str, ...]  # in the order of the pointers
    call: HostCall


@dataclass(frozen=True, slots=True)
class HostUnit:
    """The C++ source of a library with one host call, named as launches name it."""

    name: str
    text: str
    source: str  # that of the choice that asked for it, which knows how it is built


def unit_name(number: int) -> str:
    """The name of the library with this number among those of a program."""
    return f"unit{number}"


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
    maps: tuple[TensorMap, ...] = ()
    call: HostCall | None = None  # then `kernel` is the name of a HostUnit

    @property
    def passed(self) -> tuple[str, ...]:
        """The buffers whose address a launch needs, by itself or in a tensor map."""
        return (*self.buffers, *(made.buffer for made in self.maps))


@dataclass(frozen=True, slots=True)
class TritonSources:
    """Every distinct kernel of a program in one Python module, and how each step launches them."""

    text: str
    kernels: tuple[TritonKernel, ...]
    launches: tuple[tuple[Launch, ...], ...]  # those of each Kernel of the plan, in its order
    units: tuple[HostUnit, ...] = ()  # each is built as a library

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text, *(unit.text for unit in self.units))

    @property
    def all_launches(self) -> list[Launch]:
        return [launch for launches in self.launches for launch in launches]
