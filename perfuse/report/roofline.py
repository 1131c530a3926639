"""Lower bounds on running time: bytes over bandwidth, operations over peak arithmetic."""

import time
from dataclasses import dataclass
from functools import cache

import torch

from perfuse.ir.atoms import Indirect
from perfuse.ir.expr import SCALAR_OPS, Expr, walk
from perfuse.ir.index import Dim, atoms_of, product
from perfuse.ir.program import Buffer, Extern, Program
from perfuse.schedule.contract import depth_of, sizes_of
from perfuse.schedule.plan import Kernel
from perfuse.schedule.size_hints import Hints, value_of
from perfuse.target import Target
from perfuse.torch_compat.state import disable_dispatch_modes

CPU_HZ = 2.5e9  # a server core's clock under vector load
FMA_UNITS = 2  # of a core, each a multiplication and an addition in every lane
COPY_FLOATS = 8 << 20  # more than caches hold


@dataclass(frozen=True, slots=True)
class Roofline:
    """Peak bandwidth and arithmetic of a machine, per second."""

    bytes_per_s: float
    flops_per_s: float  # float32, outside of matrix units
    matrix_flops_per_s: float  # halves, in matrix units

    @staticmethod
    def of(target: Target) -> "Roofline":
        if target.gpu is not None:
            return Roofline(target.gpu.bandwidth, target.gpu.flops_f32, target.gpu.flops_f16)
        peak = CPU_HZ * target.num_threads * target.lanes * FMA_UNITS * 2
        return Roofline(_copy_rate(), peak, peak)

    def seconds(self, num_bytes: int, num_flops: int, matrix_flops: int = 0) -> float:
        """A lower bound on the time to move these bytes and compute these flops."""
        scalar = (num_flops - matrix_flops) / self.flops_per_s
        return max(num_bytes / self.bytes_per_s, scalar, matrix_flops / self.matrix_flops_per_s)


@cache
def _copy_rate() -> float:
    """Measure the copy bandwidth of this machine, reads plus writes; takes about 20 ms."""
    with disable_dispatch_modes(), torch.inference_mode():
        source = torch.ones(COPY_FLOATS)
        target = torch.empty_like(source).copy_(source)
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            target.copy_(source)
            best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best


def kernel_bytes(kernel: Kernel, program: Program) -> int:
    """Bytes that a kernel moves; dynamic sizes count as their hints.

    A table in which it looks up rows counts only what it reads; the plan counts all of it.
    """
    looked_up = _looked_up(kernel, program)
    names = [n for n in kernel.reads() if n in program.buffers]
    if not looked_up and not _is_dynamic(kernel):
        return kernel.num_bytes
    sizes = {n: _buffer_bytes(program.buffers[n], program.hints) for n in (*names, *kernel.stored)}
    read = sum(min(sizes[n], looked_up.get(n, sizes[n])) for n in names)
    return read + sum(sizes[n] for n in kernel.stored)


def _buffer_bytes(buffer: Buffer, hints: Hints) -> int:
    return value_of(buffer.num_elements, hints) * buffer.dtype.num_bytes


def _looked_up(kernel: Kernel, program: Program) -> dict[str, int]:
    """Buffers read only at data-dependent positions, with the bytes of those reads."""
    found: dict[str, int] = {}
    plain: set[str] = set()
    for member in kernel.members:
        steps = value_of(product([axis.size for axis in member.loop.axes]), program.hints)
        for read in member.loop.reads():
            name = read.buffer
            if any(isinstance(atom, Indirect) for atom in atoms_of(read.index)):
                size = program.buffers[name].dtype.num_bytes
                found[name] = found.get(name, 0) + steps * size
            else:
                plain.add(name)
    return {name: count for name, count in found.items() if name not in plain}


def kernel_flops(kernel: Kernel, hints: Hints) -> int:
    """Operations of a kernel; dynamic sizes count as their hints."""
    if not _is_dynamic(kernel):
        return kernel.num_flops
    total, seen = contraction_flops(kernel, hints), set[Expr]()
    for member in kernel.members:
        ops = sum(e.op in SCALAR_OPS for e in walk(member.loop.value, seen))
        count = value_of(product([axis.size for axis in member.loop.axes]), hints)
        total += count * (ops + member.loop.is_reduction)
    return total


def contraction_flops(kernel: Kernel, hints: Hints) -> int:
    """Operations of the matmuls among those of a kernel."""
    return sum(2 * value_of(product(sizes), hints) for sizes in _products(kernel))


def _products(kernel: Kernel) -> list[tuple[Dim, ...]]:
    """The sizes of each matmul of a kernel, the depth among them."""
    matmuls = () if kernel.contraction is None else kernel.contraction.matmuls
    own = () if kernel.attention is None else kernel.attention.products
    grouped = [] if kernel.grouped is None else [_of_groups(kernel.grouped)]
    return [*((*sizes_of(m), depth_of(m)) for m in matmuls), *own, *grouped]


def _of_groups(call: Extern) -> tuple[Dim, ...]:
    """The sizes of matmuls of groups together: each row meets one matrix."""
    left, right, _ = call.args
    return (*left.shape, right.shape[-1])


def _is_dynamic(kernel: Kernel) -> bool:
    sizes: list[Dim] = [axis.size for m in kernel.members for axis in m.loop.axes]
    sizes += [size for each in _products(kernel) for size in each]
    return any(not isinstance(size, int) for size in sizes)
