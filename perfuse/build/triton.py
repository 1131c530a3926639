"""Triton kernels -> a bundle in the store: each distinct kernel is compiled once, ever.

Kernels are compiled in threads: Triton releases the GIL while it works. Its own cache is not used:
its key hashes all of Triton; ours covers what matters.
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from perfuse.build.bundle import Bundle, CodeObject, bundle_files, facts_of
from perfuse.build.compiler import build_shared_library
from perfuse.build.triton_compile import Job, compile_kernel, load_module
from perfuse.cache import keys
from perfuse.cache.access import open_store
from perfuse.cache.keys import key_of
from perfuse.cache.manifest import Entry
from perfuse.cache.store import Store
from perfuse.codegen.triton.sources import TritonKernel, TritonSources
from perfuse.context import Context
from perfuse.errors import MALFORMED, CacheDamaged, KernelTooLarge
from perfuse.gpu import BLOCK_THREADS, Gpu, Platform

FACTS, CODE, ASSEMBLY = "kernel.json", "code.bin", "assembly.txt"
LAUNCHER = Path(__file__).with_name("launcher.cpp")


def build_bundle(sources: TritonSources, ctx: Context) -> Entry:
    """The store's entry of all kernels of a program."""
    gpu = ctx.target.gpu
    assert gpu is not None
    if ctx.settings.gpu.interpret and ctx.device.type == "cpu":
        bundle = Bundle(Platform.INTERPRETED, gpu.arch, (), sources.text, sources.kernels)
    else:
        bundle = Bundle(gpu.kind, gpu.arch, _objects(sources, gpu, ctx))
    return _stored(bundle, ctx)


def build_launcher(ctx: Context) -> Entry | None:
    """The library that passes launches to a driver; None if there is no compiler to build it."""
    if not ctx.target.compiler:
        return None
    return build_shared_library([("launcher", LAUNCHER.read_text())], ctx)


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
    every = zip(keys, sources.kernels, strict=True)
    missing = {key: kernel for key, kernel in every if found.get(key) is None}
    ctx.counters.inc("build.cache_hit", len(keys) - len(missing))
    ctx.counters.inc("build.cache_miss", len(missing))
    if missing:
        found |= _compiled(sources.text, missing, gpu, ctx)
    objects = tuple(made for key in keys if (made := found[key]) is not None)
    check_limits(objects, gpu)
    return objects


def check_limits(objects: Sequence[CodeObject], gpu: Gpu) -> None:
    """Refuse what the driver would refuse, while a smaller tile can still be chosen."""
    limits = gpu.shared_bytes, BLOCK_THREADS
    large = [m for m in objects if m.shared_bytes > limits[0] or m.num_threads > limits[1]]
    if large:
        message = "; ".join(
            f"{m.name} has {m.shared_bytes} bytes of shared memory and {m.num_threads} "
            f"threads per block"
            for m in large
        )
        most = f"{gpu.shared_bytes} bytes and {BLOCK_THREADS} threads"
        names = [m.name for m in large]
        raise KernelTooLarge(f"{message}: {gpu.arch} allows at most {most}", names)


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
    triton: Any = __import__("triton")
    return str(triton.__version__)


@functools.lru_cache(maxsize=64)
def _pieces(text: str) -> tuple[dict[str, str], str]:
    """The module's functions and values by name, and what stands around them (imports)."""
    named: dict[str, str] = {}
    around = []
    lines = text.splitlines()
    for node in ast.parse(text).body:
        names = _names_of(node)
        # Decorators stand above the line of the function itself.
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        piece = "\n".join(lines[first - 1 : node.end_lineno])
        named |= dict.fromkeys(names, piece)
        if not names:
            around.append(piece)
    return named, "\n".join(around)


def _names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


@functools.lru_cache(maxsize=4096)
def _used(piece: str) -> frozenset[str]:
    return frozenset(n.id for n in ast.walk(ast.parse(piece)) if isinstance(n, ast.Name))


def text_of_kernel(text: str, name: str) -> str:
    """The part of the module that decides what this kernel compiles to."""
    named, around = _pieces(text)
    needed: dict[str, None] = {}
    waiting = [name]
    while waiting:
        at = waiting.pop()
        if at in named and at not in needed:
            needed[at] = None
            waiting += sorted(_used(named[at]))
    return "\n".join([around, *(named[n] for n in named if n in needed)])
