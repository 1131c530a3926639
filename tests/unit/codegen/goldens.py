"""Small programs with the C++ that they become; run as a module, it rewrites the sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perfuse.codegen.cpp.unit import generate_sources
from perfuse.config import Settings
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.gpu import Platform
from perfuse.target import Target
from tests.unit.lower.samples import f32
from tests.unit.planning import plans_of

# A machine that is the same everywhere.
TARGET = Target(
    Platform.CPU,
    "x86_64",
    "avx2",
    8,
    4,
    l1_bytes=32 << 10,
    l2_bytes=1 << 20,
    l3_bytes=16 << 20,
    compiler="g++",
    compiler_version="g++ (a test) 12.2.0",
)
CONTEXT = Context(TARGET, Settings(), Counters())

GOLDEN: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "multiply_add": (lambda x: x * 2 + 1, (f32(8),)),
    "row_sum": (lambda x: x.sum(-1), (f32(4, 24),)),
    "transpose": (lambda x: x.t().contiguous(), (f32(16, 24),)),
    "softmax": (lambda x: torch.softmax(x, -1), (f32(4, 24),)),
}


def golden_path(name: str) -> Path:
    return Path(__file__).parent / "golden" / f"{name}.cpp"


def sources_of(name: str) -> str:
    fn, inputs = GOLDEN[name]
    context = replace(CONTEXT, counters=Counters())
    (plan,) = plans_of(fn, *inputs, context=context)
    ((_, text),) = generate_sources(plan, context).units
    return text


def kernels_text(name: str) -> str:
    """The source without its head, which depends on the PyTorch in use."""
    return sources_of(name).partition("\n\n")[2]


if __name__ == "__main__":
    for each in GOLDEN:
        golden_path(each).write_text(kernels_text(each))
