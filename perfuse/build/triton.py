"""Triton kernels -> a bundle in the store: each distinct kernel is compiled once, ever.

Kernels are compiled in threads: Triton releases the GIL while it works. Its own cache is
not used: its key hashes all of Triton, and ours has what we need.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from perfuse.build.bundle import INTERPRETED, Bundle, CodeObject, bundle_files, facts_of
from perfuse.build.kernel_text import text_of_kernel
from perfuse.build.triton_compile import Job, compile_kernel, load_module
from perfuse.cache import keys
from perfuse.cache.access import open_store
from perfuse.cache.keys import key_of
from perfuse.cache.manifest import Entry
from perfuse.cache.store import Store
from perfuse.codegen.triton.sources import TritonKernel, TritonSources
from perfuse.context import Context
from perfuse.errors import MALFORMED, CacheDamaged, KernelTooLarge
from perfuse.gpu import BLOCK_THREADS, Gpu

FACTS, CODE, ASSEMBLY = "kernel.json", "code.bin", "assembly.txt"


def build_bundle(sources: TritonSources, ctx: Context) -> Entry:
    """The store's entry of all kernels of a program."""
    gpu = ctx.target.gpu
    assert gpu is not None
    if ctx.settings.gpu.interpret and ctx.device.type == "cpu":
        bundle = Bundle(INTERPRETED, gpu.arch, (), sources.text, sources.kernels)
    else:
        bundle = Bundle(gpu.kind, gpu.arch, _objects(sources, gpu, ctx))
    return _stored(bundle, ctx)


def _stored(bundle: Bundle, ctx: Context) -> Entry:
    files = bundle_files(bundle)
    key = key_of(keys.BUNDLE, *(part for row in sorted(files.items()) for part in row))
    store = open_store(ctx)
    return store.get(key) or store.put(key, files)


def _objects(sources: TritonSources, gpu: Gpu, ctx: Context) -> tuple[CodeObject, ...]:
    """The machine code of every kernel, compiled where the store has none."""
    store = open_store(ctx)
    keys = [_key(sources.text, kernel, gpu) for kernel in sources.kernels]
    found = {key: _read(store, key) for key in keys} if ctx.settings.cache.enabled else {}
    missing = {
        key: kernel
        for key, kernel in zip(keys, sources.kernels, strict=True)
        if found.get(key) is None
    }
    ctx.counters.inc("build.cache_hit", len(keys) - len(missing))
    ctx.counters.inc("build.cache_miss", len(missing))
    if missing:
        found |= _compiled(sources.text, missing, gpu, ctx)
    objects = tuple(made for key in keys if (made := found[key]) is not None)
    check_limits(objects, gpu)
    return objects


def check_limits(objects: Sequence[CodeObject], gpu: Gpu) -> None:
    """Refuse what the driver would refuse, while a smaller tile can still be chosen."""
    large = [
        made
        for made in objects
        if made.shared_bytes > gpu.shared_bytes or made.num_threads > BLOCK_THREADS
    ]
    if large:
        said = "; ".join(
            f"{made.name} has {made.shared_bytes} bytes of shared memory and {made.num_threads} "
            f"threads per block"
            for made in large
        )
        most = f"{gpu.shared_bytes} bytes and {BLOCK_THREADS} threads"
        raise KernelTooLarge(f"{said}: {gpu.arch} allows at most {most}", [m.name for m in large])


def _compiled(
    text: str, missing: dict[str, TritonKernel], gpu: Gpu, ctx: Context
) -> dict[str, CodeObject]:
    module = load_module(text)
    store = open_store(ctx)
    jobs = {key: Job(module, k, gpu, text_of_kernel(text, k.name)) for key, k in missing.items()}

    def build(item: tuple[str, Job]) -> tuple[str, CodeObject]:
        key, job = item
        made, assembly = compile_kernel(job)
        facts = json.dumps(facts_of(made)).encode()
        store.put(key, {FACTS: facts, CODE: made.code, ASSEMBLY: assembly.encode()})
        return key, made

    with ThreadPoolExecutor(ctx.num_jobs(len(missing))) as pool:
        built = dict(pool.map(build, jobs.items()))
    ctx.counters.inc("build.kernels_compiled", len(built))
    return built


def _key(text: str, kernel: TritonKernel, gpu: Gpu) -> str:
    """The hash of everything that Triton's output for a kernel depends on."""
    own = text_of_kernel(text, kernel.name)
    promised = (kernel.signature, kernel.constants, sorted(kernel.divisible))
    shape = (kernel.num_warps, kernel.num_stages)
    machine = (gpu.kind, gpu.arch, gpu.warp)
    return key_of(keys.KERNEL, triton_version(), machine, promised, shape, own)


def _read(store: Store, key: str) -> CodeObject | None:
    entry = store.get(key)
    if entry is None:
        return None
    try:
        return CodeObject(**entry.read_json(FACTS), code=entry.read_bytes(CODE))
    except (CacheDamaged, *MALFORMED):
        store.discard(key)
        return None


def assembly_of(sources: TritonSources, gpu: Gpu, ctx: Context) -> Sequence[str]:
    """The assembly of every kernel that the store holds, "" where it has none."""
    store = open_store(ctx)
    entries = [store.get(_key(sources.text, kernel, gpu)) for kernel in sources.kernels]
    return [entry.read_text(ASSEMBLY) if entry is not None else "" for entry in entries]


@functools.cache
def triton_version() -> str:
    """Triton's version, without importing it."""
    for package in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return _imported_version()


def _imported_version() -> str:
    triton: Any = __import__("triton")
    return str(triton.__version__)
