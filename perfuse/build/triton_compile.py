"""One run of Triton's compiler: a kernel of a generated module -> machine code for a GPU.

Nothing here needs a GPU: the target is named, and the assembler comes with Triton. Triton is
imported when the first kernel is compiled, and never by a process that finds everything in the
store.
"""

from __future__ import annotations

import hashlib
import importlib
import linecache
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from perfuse.build.bundle import CodeObject
from perfuse.build.elf import SECTION
from perfuse.codegen.triton.sources import SWIZZLED_BYTES, TritonKernel
from perfuse.errors import CompilerFailed, CompilerMissing
from perfuse.forking import ForkLock
from perfuse.gpu import Gpu, Platform

# Python's own parser is not safe in threads (AST constructor recursion depth mismatch), and this
# stage holds the GIL anyway.
_FRONT = ForkLock()

BINARY = {Platform.CUDA: ("cubin", "ptx"), Platform.HIP: ("hsaco", "amdgcn")}


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel to be compiled for one GPU."""

    module: ModuleType
    kernel: TritonKernel
    gpu: Gpu
    text: str  # the kernel's own, with what it calls


def load_module(text: str) -> ModuleType:
    """A generated module that has no file: its lines are kept where `inspect` looks for them."""
    name = f"perfuse_kernels_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    path = f"<{name}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    module = ModuleType(name)
    module.__file__ = path
    try:
        exec(compile(text, path, "exec"), module.__dict__)
    except ImportError as error:
        raise CompilerMissing(
            f"Triton is needed to compile for GPUs: {error}",
            hint="pip install 'perfuse[gpu]', or a PyTorch with CUDA or ROCm, which includes it.",
        ) from error
    return module


def compile_kernel(job: Job) -> tuple[CodeObject, str]:
    """The kernel's machine code, and its assembly for reports."""
    compiler = importlib.import_module("triton.backends.compiler")
    make_backend = importlib.import_module("triton.compiler.compiler").make_backend
    backend = make_backend(compiler.GPUTarget(str(job.gpu.kind), job.gpu.triton_arch, job.gpu.warp))
    options = backend.parse_options(_options(job))
    try:
        stages, metadata = _run(job, backend, options)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        raise CompilerFailed(
            ("triton", job.kernel.name, job.gpu.arch), f"{message}\n\n{job.text}"
        ) from error
    binary, assembly = (stages[name] for name in BINARY[job.gpu.kind])
    return _object(job, metadata, binary, assembly), assembly


def _options(job: Job) -> dict[str, Any]:
    kernel = job.kernel
    # Assertions are compiled in debug mode only, which would also check sums of ints for overflow.
    # Products are rounded before they are added, as eager's are: fused, a*b - a*b is not zero.
    return {
        "num_warps": kernel.num_warps,
        "num_stages": kernel.num_stages,
        "debug": "device_assert" in job.text,
        "sanitize_overflow": False,
        "enable_fp_fusion": False,
    }


def _run(job: Job, backend: Any, options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Triton's stages one after another: what each made, and what they found out."""
    ir = importlib.import_module("triton._C.libtriton").ir
    source = _source(job)
    metadata: dict[str, Any] = {"target": backend.target, **options.__dict__}
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    with _FRONT:
        made = source.make_ir(backend.target, options, functions, backend.get_module_map(), context)
    results: dict[str, Any] = {}
    for name, stage in stages.items():
        results[name] = made = stage(made, metadata)
    return results, metadata


def _source(job: Job) -> Any:
    kernel = job.kernel
    function = getattr(job.module, kernel.name)
    kinds, values = dict(kernel.signature), dict(kernel.constants)
    order = list(enumerate(function.arg_names))
    signature = {name: kinds.get(name, "constexpr") for _, name in order}
    divisible = [place for place, name in order if name in kernel.divisible]
    promises = {(place,): [["tt.divisibility", 16]] for place in divisible}
    if function.is_gluon():
        ast_source = importlib.import_module("triton.experimental.gluon._runtime").GluonASTSource
    else:
        ast_source = importlib.import_module("triton.compiler").ASTSource
    return ast_source(function, signature, values, promises)


def _object(job: Job, metadata: dict[str, Any], binary: bytes, assembly: str) -> CodeObject:
    is_cluster = metadata.get("num_ctas", 1) != 1 or metadata.get("launch_cooperative_grid")
    if is_cluster or metadata.get("profile_scratch_size"):
        what = "thread block clusters are" if is_cluster else "profiling scratch memory is"
        raise CompilerFailed(("triton", job.kernel.name), f"{what} not supported")
    _check_maps(job, metadata.get("tensordesc_meta") or ())
    if job.gpu.kind is Platform.HIP:
        registers = _noted(assembly, "vgpr_count")
        stack = _noted(assembly, "private_segment_fixed_size")
    else:
        registers, stack = (cubin_attribute(binary, number) for number in (REGISTERS, STACK))
    return CodeObject(
        name=job.kernel.name,
        symbol=metadata["name"],
        num_threads=metadata["num_warps"] * job.gpu.warp,
        shared_bytes=metadata["shared"],
        scratch_bytes=metadata.get("global_scratch_size") or 0,
        num_registers=registers,
        stack_bytes=stack,
        code=bytes(binary),
    )


def _check_maps(job: Job, described: Sequence[dict[str, Any]]) -> None:
    """Refuse a kernel that needs other tensor maps than the launcher makes."""
    kinds = [kind for _, kind in job.kernel.signature if kind.startswith("tensordesc")]
    for kind, made in zip(kinds, described, strict=True):
        rows, width = made["block_size"][0], made["block_size"][-1] * made["elem_size"]
        is_made = made["swizzle"] == _SWIZZLE_128 and width == SWIZZLED_BYTES
        if not is_made or f"[{rows}, " not in kind:
            raise CompilerFailed(("triton", job.kernel.name), f"{kind} is stored as {made}")


_SWIZZLE_128 = 3  # the driver's number for rows of 128 bytes interleaved
# Attributes of a function in the section .nv.info: registers of a thread, bytes of its stack.
REGISTERS, STACK = 0x2F, 0x11


def cubin_attribute(cubin: bytes, wanted: int) -> int:
    """The largest value of an attribute over the functions of an NVIDIA code object."""
    data = _section(cubin, b".nv.info")
    largest, at = 0, 0
    while at + 4 <= len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind != 4:  # the value stands in the size's place
            continue
        if attribute == wanted and size == 8:
            largest = max(largest, struct.unpack_from("<II", data, at)[1])
        at += size
    return largest


def _section(elf: bytes, wanted: bytes) -> bytes:
    (offset,) = struct.unpack_from("<Q", elf, 40)
    size, count, names_at = struct.unpack_from("<HHH", elf, 58)
    headers = [SECTION.unpack_from(elf, offset + k * size) for k in range(count)]
    names = headers[names_at][4]
    for name, _, _, _, start, length, *_ in headers:
        if elf[names + name : names + name + len(wanted) + 1] == wanted + b"\0":
            return elf[start : start + length]
    return b""


def _noted(assembly: str, name: str) -> int:
    """A number of AMD's notes about a kernel."""
    found = re.search(rf"\.{name}:\s*(\d+)", assembly)
    return int(found.group(1)) if found else 0
