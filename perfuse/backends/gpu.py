"""NVIDIA and AMD GPUs: Triton kernels in a bundle, launched by a small library in C++."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from perfuse.backends.backend import Backend
from perfuse.build import LIBRARY
from perfuse.build.bundle import read_bundle
from perfuse.build.ck import CK_LIBRARY, build_ck
from perfuse.build.triton import build_bundle, build_launcher
from perfuse.cache.manifest import Entry
from perfuse.codegen.ck.launch import ck_unit_name
from perfuse.codegen.host.gpu import generate_gpu_host
from perfuse.codegen.host.program import HostSource
from perfuse.codegen.triton.sources import TritonSources
from perfuse.codegen.triton.unit import generate_triton, retiled
from perfuse.context import Context
from perfuse.runtime.bind_gpu import bind_gpu, launcher_of
from perfuse.runtime.host_library import HostLibrary
from perfuse.runtime.host_names import Call
from perfuse.schedule.plan import Plan


def generate(plan: Plan, context: Context) -> TritonSources:
    return generate_triton(plan, context)


def build(sources: TritonSources, context: Context) -> tuple[Entry, ...]:
    """The bundle, the launcher library if there is a GPU, and the libraries of host calls."""
    bundle = build_bundle(sources, context)
    is_here = context.device.type != "cpu" and torch.cuda.is_available()
    launcher = build_launcher(context) if is_here else None
    units = build_ck(sources.units, context)
    return (bundle, *units) if launcher is None else (bundle, launcher, *units)


def host(plan: Plan, sources: TritonSources, context: Context) -> HostSource:
    return generate_gpu_host(plan, sources, context.device)


def load(
    host: HostSource, built: Sequence[Entry], constants: Mapping[str, Any], context: Context
) -> Call:
    bundle, *others = built
    libraries = [entry.read_bytes(LIBRARY) for entry in others if LIBRARY in entry.contents]
    found = [entry.read_bytes(CK_LIBRARY) for entry in others if CK_LIBRARY in entry.contents]
    units = {ck_unit_name(n): HostLibrary(ck_unit_name(n), data) for n, data in enumerate(found)}
    library = libraries[0] if libraries else None
    launcher = launcher_of(read_bundle(bundle.read_bytes), context, library, units)
    return bind_gpu(host, launcher, constants)


GPU_BACKEND = Backend(
    "gpu", lambda target: target.gpu is not None, generate, build, host, load, retile=retiled
)
