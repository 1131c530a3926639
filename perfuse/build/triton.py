"""Triton kernels -> a bundle in the store: each distinct kernel is compiled once, ever."""

from __future__ import annotations

import hashlib

from perfuse.build.bundle import INTERPRETED, Bundle, bundle_files
from perfuse.build.compiler import open_store
from perfuse.build.store import Entry
from perfuse.codegen.triton.sources import TritonSources
from perfuse.context import Context
from perfuse.version import VERSION


def build_bundle(sources: TritonSources, ctx: Context) -> Entry:
    """The store's entry of all kernels of a program."""
    assert ctx.target.gpu is not None
    bundle = Bundle(INTERPRETED, ctx.target.gpu.arch, (), sources.text, sources.kernels)
    return _stored(bundle, ctx)


def _stored(bundle: Bundle, ctx: Context) -> Entry:
    files = bundle_files(bundle)
    digest = hashlib.sha256(VERSION.encode())
    for name, data in sorted(files.items()):
        digest.update(f"{name} {len(data)}\n".encode() + data)
    key = f"gpu-{digest.hexdigest()}"
    store = open_store(ctx)
    return store.get(key) or store.put(key, files)
