"""Probes of what a CPU program needs: Python, PyTorch, a C++ compiler, threads; and a kernel."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from perfuse.diagnosis.machine import Machine
from perfuse.diagnosis.report import Finding
from perfuse.errors import CompilerMissing
from perfuse.supported import NEWEST, OLDEST, is_supported
from perfuse.target import LANES, major_version

BROKEN_PYTHON = "3.13.0"
VECTOR_BITS = {"avx512": 512, "avx2": 256, "neon": 128, "scalar": 0}


@dataclass(frozen=True, slots=True)
class CompilerBug:
    """A bug that generated code meets in some versions of a compiler."""

    compiler: str  # "g++" or "clang"
    first: int
    last: int
    effect: str


# Those with a remedy in Perfuse; the places are in target.py and codegen/cpp/simd_vec.h.
WORKED_AROUND = (
    CompilerBug("g++", 12, 12, "drops loops that read an array from both ends"),
    CompilerBug("g++", 12, 12, "misreads constant masks of vectors"),
)
# Kernels are C++20, by the name that compilers know since these versions.
OLDEST_COMPILER = {"g++": 10, "clang": 10}


def python(machine: Machine) -> Finding:
    """The version of Python, and the one in which torch.compile is wrong."""
    version = sys.version.split()[0]
    if version == BROKEN_PYTHON:
        advice = "install another version of Python, 3.11 or newer."
        return Finding("problem", f"{version}: torch.compile misses changes of modules", advice)
    return Finding("ok", version)


def pytorch(machine: Machine) -> Finding:
    """The version of PyTorch against those that are tested."""
    version = machine.torch_version()
    oldest, newest = (".".join(map(str, v)) for v in (OLDEST, NEWEST))
    libraries = ", ".join(f"{name} {v}" for name, v in machine.libraries().items())
    detail = f"{version} (tested: {oldest} to {newest}){libraries and f', {libraries}'}"
    if is_supported(version):
        return Finding("ok", detail)
    return Finding("note", detail, f"install a tested version: pip install 'torch=={newest}.*'.")


def cpp_compiler(machine: Machine) -> Finding:
    """The C++ compiler, its version and the bugs it is known for."""
    target = machine.target(machine.settings_or_defaults())
    detail = f"{' '.join(target.compiler_command())} ({target.compiler_version})"
    family = "clang" if target.is_clang() else "g++"
    major = major_version(target.compiler_version)
    oldest = OLDEST_COMPILER[family]
    if major is not None and major < oldest:
        return Finding("problem", f"{detail}: no C++20", f"install {family} {oldest} or newer.")
    bugs = [
        b.effect for b in WORKED_AROUND if b.compiler == family and _is_in(major, b.first, b.last)
    ]
    known = f"; known bugs, worked around: {', '.join(bugs)}" if bugs else ""
    return Finding("ok", detail + known)


def _is_in(major: int | None, first: int, last: int) -> bool:
    return major is not None and first <= major <= last


def vectors(machine: Machine) -> Finding:
    """The vector instructions that kernels use, and the widest that the CPU has."""
    target = machine.target(machine.settings_or_defaults())
    bits = VECTOR_BITS[target.isa]
    width = f"{bits} bits, {LANES[target.isa]} lanes of float32" if bits else "no vectors"
    detail = f"{target.arch} {target.isa} ({width})"
    widest = machine.isas()[0]
    if target.isa != widest:
        return Finding("note", f"{detail}; this CPU has {widest}", "set cpu.simd to auto.")
    if not bits:
        return Finding("note", detail, "use a CPU with AVX2 or NEON for speed.")
    return Finding("ok", detail)


def cores(machine: Machine) -> Finding:
    """The threads of a kernel and the cores they run on."""
    num_threads = machine.target(machine.settings_or_defaults()).num_threads
    num_cores = machine.num_cores()
    detail = f"{num_threads} threads on {num_cores} cores"
    if num_threads > num_cores:
        return Finding("note", detail, "set OMP_NUM_THREADS or cpu.threads to the number of cores.")
    return Finding("ok", detail)


def openmp(machine: Machine) -> Finding:
    """The OpenMP runtime that PyTorch has loaded, which kernels share."""
    found = machine.openmp_runtimes()
    if len(found) > 1:
        detail = f"several are loaded: {', '.join(found)}"
        return Finding("problem", detail, "remove all but PyTorch's, or unset LD_PRELOAD.")
    if not found:
        return Finding(
            "note", "none is loaded: kernels run on one thread", "apt-get install libgomp1."
        )
    return Finding("ok", found[0])


def kernel(machine: Machine) -> Finding:
    """A small kernel, compiled, loaded and run."""
    try:
        machine.run_cpu_kernel()
    except CompilerMissing as error:
        return Finding("problem", error.message, error.hint or "")
    return Finding("ok", "compiled, loaded and correct")
