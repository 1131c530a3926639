"""NVIDIA and AMD GPUs: Triton kernels in a bundle, launched by a small C++ library."""

from __future__ import annotations

import torch

from perfuse.build.triton import build_bundle, build_launcher
from perfuse.cache.manifest import Entry
from perfuse.candidates.sources import build_unit, writers
from perfuse.codegen.host.gpu import generate_gpu_host
from perfuse.codegen.host.source import HostSource
from perfuse.codegen.triton.sources import TritonSources
from perfuse.codegen.triton.unit import generate_triton
from perfuse.context import Context
from perfuse.schedule.plan import Plan


def generate(plan: Plan, context: Context) -> TritonSources:
    return generate_triton(plan, context, writers())


def build(sources: TritonSources, context: Context) -> tuple[Entry, ...]:
    """The bundle, the launcher library if there is a GPU, and the libraries of host calls."""
    bundle = build_bundle(sources, context)
    is_here = context.device.type != "cpu" and torch.cuda.is_available()
    launcher = build_launcher(context) if is_here else None
    units = [build_unit(unit, context) for unit in sources.units]
    return (bundle, *units) if launcher is None else (bundle, launcher, *units)


def host(plan: Plan, sources: TritonSources, context: Context) -> HostSource:
    return generate_gpu_host(plan, sources, context.device)
