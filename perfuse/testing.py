"""Helpers for tests of compiled code: an empty cache, generated sources, strided tensors."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from perfuse import config
from perfuse.capture.backend import perfuse_backend
from perfuse.capture.observe import observing
from perfuse.capture.request import Request
from perfuse.pipeline import Compiled
from perfuse.runtime.pool import POOL
from perfuse.torch_compat.dynamo import compiled_as
from perfuse.torch_compat.tensors import cpu_allocations


@contextmanager
def fresh_cache() -> Iterator[Path]:
    """A block with an empty cache, which is removed afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="perfuse-") as folder,
        config.patch({"cache.dir": folder}),
    ):
        yield Path(folder)


def run_and_get_code(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
    """Recompile and call `fn`; return its result and every generated source, the host program last.

    A function that Perfuse has compiled is compiled again for this call, with its own mode and
    options, and stays compiled as it was. For any other, the sources are those it compiles itself.
    """
    seen: list[Compiled] = []
    is_ours = compiled_as(fn).backend is perfuse_backend
    request = Request.of(fn)
    with observing(seen.append):
        if is_ours:
            backend = partial(perfuse_backend, options=request.overrides)
            result = request.call(args, kwargs, backend)
        else:
            result = fn(*args, **kwargs)
    return result, [text for compiled in seen for text in compiled.texts()]


def rand_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """A random tensor of exactly these strides, gaps and overlaps included."""
    steps = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    span = 0 if 0 in size else 1 + steps
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        memory = torch.randn(span, dtype=wide, device=device).to(dtype)
    else:
        limit = 2 if dtype is torch.bool else 16
        memory = torch.randint(0, limit, (span,), device=device).to(dtype)
    return memory.as_strided(tuple(size), tuple(stride))


@dataclass(frozen=True, slots=True)
class Allocation:
    """Bytes allocated (positive) or freed (negative) at a time."""

    time_ns: int
    num_bytes: int


def trace_allocations(step: Callable[[], Any]) -> tuple[Allocation, ...]:
    """Memory that `step()` takes on the CPU and gives back, in order, with nothing pooled."""
    with POOL.bypassed():
        events = [Allocation(at, size) for at, size in cpu_allocations(step)]
    return tuple(sorted(events, key=lambda event: event.time_ns))


def do_bench_using_profiling(fn: Callable[[], Any], warmup: int = 25, rep: int = 100) -> float:
    """Milliseconds that a call takes on its device, as PyTorch's profiler sees it.

    `warmup` and `rep`: milliseconds to run before measuring, and to measure for. On a GPU it is the
    time of its kernels, without the gaps between them; without a GPU, that of operators on the CPU.
    """
    start = time.perf_counter()
    fn()
    is_gpu = torch.cuda.is_available()
    if is_gpu:
        torch.cuda.synchronize()
    once_ms = max(1e-3, 1e3 * (time.perf_counter() - start))
    for _ in range(int(warmup / once_ms)):
        fn()
    num_runs = max(1, int(rep / once_ms))
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if is_gpu else []
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(num_runs):
            fn()
        if is_gpu:
            torch.cuda.synchronize()
    events = profile.key_averages()
    device_us = sum(event.self_device_time_total for event in events)
    cpu_us = sum(event.self_cpu_time_total for event in events)
    return float(device_us or cpu_us) / num_runs / 1e3


def peak_memory(step: Callable[[], Any], device: str | torch.device = "cpu") -> int:
    """The most bytes that `step()` holds at a time beyond what was there before it."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    held = peak = 0
    for event in trace_allocations(step):
        held += event.num_bytes
        peak = max(peak, held)
    return peak
