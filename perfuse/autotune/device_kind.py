"""Where a decision holds: the kind of device, and the versions of libraries and compilers."""

import functools
import re
from importlib.metadata import PackageNotFoundError, version

import torch

from perfuse.build.triton import triton_version
from perfuse.gpu import Gpu, Platform
from perfuse.target import Target, cpu_model

Versions = tuple[tuple[str, str], ...]

_LIBRARIES = {"mkl": r"Math Kernel Library Version (\S+)", "onednn": r"MKL-DNN v(\S+)"}


def device_kind(target: Target) -> str:
    """The kind of device that kernels run on, equal on machines where the same choices win."""
    if target.gpu is not None:
        return _gpu_kind(target.gpu)
    caches = "/".join(f"{n >> 10}" for n in (target.l1_bytes, target.l2_bytes, target.l3_bytes))
    isa = f"{target.arch} {target.isa}"
    return f"cpu {isa}, {cpu_model()}, {caches} KiB, {target.num_threads} threads"


def _gpu_kind(gpu: Gpu) -> str:
    # Drivers report bandwidths a few percent off the specification: an H200's is 4.8 or 4.9 TB/s.
    rate = round(2 * gpu.bandwidth / 1e12) / 2 or 0.5
    return f"{gpu.kind} {gpu.arch}, {gpu.multiprocessors} multiprocessors, about {rate:g} TB/s"


@functools.cache
def library_versions(kind: Platform) -> Versions:
    """PyTorch and the matmul libraries that it calls on a device of this kind."""
    found = {"torch": str(torch.__version__)}
    if kind == Platform.CPU:
        built = str(torch.__config__.show())
        rows = {name: re.search(pattern, built) for name, pattern in _LIBRARIES.items()}
        found |= {name: row[1] for name, row in rows.items() if row is not None}
    else:
        found[str(kind)] = str(getattr(torch.version, kind, None))
        found["cublas" if kind == Platform.CUDA else "hipblas"] = _blas_version(kind)
    return tuple(sorted(found.items()))


def generated_versions() -> Versions:
    """The compiler of generated GPU kernels. Their own text is part of the problem."""
    return (("triton", triton_version()),)


def current_versions(target: Target) -> dict[str, str]:
    """All versions that a decision for this target may depend on."""
    if target.gpu is None:
        return {**dict(library_versions(Platform.CPU)), "compiler": target.compiler_version}
    return dict(library_versions(target.gpu.kind)) | dict(generated_versions())


def _blas_version(kind: Platform) -> str:
    major = str(getattr(torch.version, kind, "")).partition(".")[0]
    for package in (f"nvidia-cublas-cu{major}", "nvidia-cublas", "hipblaslt"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "unknown"
