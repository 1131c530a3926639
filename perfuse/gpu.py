"""`Gpu`: the properties of a GPU, given by name or read from the one present."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

import torch

from perfuse.errors import ConfigError

KIB, MIB = 1 << 10, 1 << 20
BLOCK_THREADS = 1024  # the most threads per block, on all these GPUs


class Platform(StrEnum):
    """Where kernels run."""

    CPU, CUDA, HIP = "cpu", "cuda", "hip"
    INTERPRETED = "interpreted"  # a GPU's kernels, by Triton's interpreter


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as code generation sees it: what it can do, and its rooflines."""

    kind: Platform
    arch: str  # "sm_90", "gfx942"
    warp: int  # threads that run in step
    multiprocessors: int
    bandwidth: float  # bytes per second, as specified
    flops_f32: float  # per second, without tensor units
    flops_f16: float  # per second, dense, with tensor units
    l2_bytes: int
    shared_bytes: int  # the most one block may use
    registers: int  # 32-bit ones of a multiprocessor
    max_threads: int  # of a multiprocessor
    # How much longer a matmul takes with unaligned rows of an operand, or of its result alone.
    # H200, bfloat16, 8192x50257x768, milliseconds as it is and padded: the result 6.67 and 0.90,
    # the gradients 4.54 and 0.95, 4.30 and 0.93. python -m benchmarks.gpu_padding measures them;
    # other GPUs have these numbers until they are measured there.
    unaligned_operand_slowdown: float = 4.6
    unaligned_result_slowdown: float = 7.4
    # Operations that a matmul does while a copy moves a byte: 680 TFLOP/s, 4 TB/s on an H200.
    matmul_work_per_byte: float = 170

    def __str__(self) -> str:
        rate = f"{self.bandwidth / 1e12:.2f} TB/s"
        return f"{self.kind} {self.arch}, {self.multiprocessors} multiprocessors, {rate}"

    @property
    def capability(self) -> int:
        """The number of an NVIDIA architecture: 90 for sm_90; 0 for others."""
        return int(self.arch.removeprefix("sm_")) if self.kind is Platform.CUDA else 0

    @property
    def triton_arch(self) -> int | str:
        """The architecture as Triton names it."""
        return self.capability if self.kind is Platform.CUDA else self.arch


# The most common part of each architecture, for machines that do not have one. Columns:
# multiprocessors, TB/s, TFLOP/s of f32 and of f16, L2 MiB, shared KiB, registers, threads.
ROWS: dict[str, tuple[int, float, float, float, int, int, int, int]] = {
    "sm_80": (108, 2.04, 19.5, 312, 40, 163, 65536, 2048),
    "sm_86": (84, 0.77, 37, 150, 6, 99, 65536, 1536),
    "sm_89": (142, 0.86, 91, 362, 96, 99, 65536, 1536),
    "sm_90": (132, 4.8, 67, 989, 50, 227, 65536, 2048),
    "sm_100": (148, 8.0, 80, 2250, 126, 227, 65536, 2048),
    "sm_120": (170, 1.79, 105, 419, 96, 99, 65536, 1536),
    "gfx90a": (104, 1.6, 23.9, 191, 8, 64, 131072, 2048),
    "gfx942": (304, 5.3, 163, 1307, 4, 64, 131072, 2048),
}


def _known(arch: str) -> Gpu:
    count, rate, f32, f16, l2, shared, registers, threads = ROWS[arch]
    kind, warp = (Platform.CUDA, 32) if arch.startswith("sm_") else (Platform.HIP, 64)
    return Gpu(
        kind=kind,
        arch=arch,
        warp=warp,
        multiprocessors=count,
        bandwidth=rate * 1e12,
        flops_f32=f32 * 1e12,
        flops_f16=f16 * 1e12,
        l2_bytes=l2 * MIB,
        shared_bytes=shared * KIB,
        registers=registers,
        max_threads=threads,
    )


KNOWN = {arch: _known(arch) for arch in ROWS}


def gpu_of_name(name: str) -> Gpu:
    """The GPU behind "cuda:90", "sm_90", "hip:gfx942" or "gfx942"."""
    kind, _, rest = name.rpartition(":")
    arch = f"sm_{rest}" if rest.isdecimal() else rest
    found = KNOWN.get(arch)
    if found is None or kind not in ("", found.kind):
        names = ", ".join(f"{g.kind}:{g.arch.removeprefix('sm_')}" for g in KNOWN.values())
        raise ConfigError(f"unknown GPU {name!r}", hint=f"choose one of: {names}.")
    return found


@cache
def gpu_of_device(index: int) -> Gpu:
    """The GPU at this place of the machine."""
    properties = torch.cuda.get_device_properties(index)
    is_hip = torch.version.hip is not None
    arch = (
        str(properties.gcnArchName).partition(":")[0]
        if is_hip
        else f"sm_{properties.major}{properties.minor}"
    )
    return _measured(_nearest(arch, is_hip), arch, properties)


def _nearest(arch: str, is_hip: bool) -> Gpu:
    """The known part of this architecture, else the latest one before it."""
    if arch in KNOWN:
        return KNOWN[arch]
    if is_hip:
        return KNOWN["gfx942"]
    number = int(arch.removeprefix("sm_"))
    older = [gpu for gpu in KNOWN.values() if 0 < gpu.capability <= number]
    return older[-1] if older else KNOWN["sm_80"]


def _measured(like: Gpu, arch: str, properties: Any) -> Gpu:
    """The known part, with the properties that this one reports."""
    share = properties.multi_processor_count / like.multiprocessors
    clock_khz = getattr(properties, "memory_clock_rate", 0)
    bits = getattr(properties, "memory_bus_width", 0)
    return dataclasses.replace(
        like,
        arch=arch,
        warp=getattr(properties, "warp_size", like.warp),
        multiprocessors=properties.multi_processor_count,
        bandwidth=2e3 * clock_khz * bits / 8 if clock_khz and bits else like.bandwidth,
        flops_f32=like.flops_f32 * share,
        flops_f16=like.flops_f16 * share,
        l2_bytes=getattr(properties, "L2_cache_size", like.l2_bytes),
        shared_bytes=getattr(properties, "shared_memory_per_block_optin", 0) or like.shared_bytes,
        registers=getattr(properties, "regs_per_multiprocessor", like.registers),
        max_threads=getattr(properties, "max_threads_per_multi_processor", like.max_threads),
    )
