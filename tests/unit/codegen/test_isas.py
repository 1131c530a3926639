"""Every instruction set: kernels compile, and where this CPU runs them they give eager's values.

All programs are compiled as one, so that each instruction set costs two runs of the compiler.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse import config
from perfuse.build.compiler import HEADERS
from perfuse.codegen.cpp.unit import generate_sources
from perfuse.target import LANES, machine_isas
from perfuse.testing import fresh_cache
from tests.harness.backend import compiled
from tests.harness.compare import complaints
from tests.unit.lower.samples import f32, ids
from tests.unit.planning import CONTEXT, plans_of

PROGRAMS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "pointwise": lambda x, w, i: (x * 2 + w).exp().tanh(),
    "softmax": lambda x, w, i: torch.softmax(x * 3, -1),
    "norm": lambda x, w, i: F.layer_norm(x, x.shape[-1:], w),
    "transpose": lambda x, w, i: x.t().contiguous() * 2,
    "column sum": lambda x, w, i: x.sum(0),
    "scatter": lambda x, w, i: torch.zeros(16, 37, dtype=x.dtype).index_add(0, i, x),
    "scan": lambda x, w, i: x.cumsum(-1),
    "argmax": lambda x, w, i: x.argmax(-1),
    "bf16": lambda x, w, i: (x.bfloat16() + 1).relu(),
    "fp8": lambda x, w, i: (x.detach() * 2).to(torch.float8_e4m3fn).float(),
    "ints": lambda x, w, i: (i * 3 // 2 % 5, i > 4),
}


def everything(x: Tensor, w: Tensor, i: Tensor) -> list[Any]:
    return [program(x, w, i) for program in PROGRAMS.values()]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    x, w = (t.to(dtype).requires_grad_() for t in (f32(33, 37), f32(37)))
    return x, w, ids(16, 33)


def observed(fn: Callable[..., Any], given: tuple[Tensor, Tensor, Tensor]) -> list[Any]:
    """The results, and the gradients of what can be differentiated."""
    results = fn(*given)
    floats = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    return [results, torch.autograd.grad(floats, given[:2], [torch.ones_like(r) for r in floats])]


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_isa(isa: str, tmp_path: Path) -> None:
    if isa in machine_isas():
        check_values(isa)
    elif CONTEXT.target.arch == "x86_64":
        check_compiles(isa, tmp_path)


def check_values(isa: str) -> None:
    torch._dynamo.reset()
    with fresh_cache(), config.patch({"cpu.simd": isa, "cpu.opt_level": 1}):
        got = observed(compiled(everything), inputs())
    eager, exact = observed(everything, inputs()), observed(everything, inputs(torch.float64))
    assert not complaints(got, eager, exact)


def check_compiles(isa: str, folder: Path) -> None:
    target = replace(CONTEXT.target, isa=isa, lanes=LANES[isa])
    context = replace(CONTEXT, target=target)
    for number, plan in enumerate(plans_of(everything, *inputs(), context=context)):
        for name, text in generate_sources(plan, context).units:
            source = folder / f"{name}{number}.cpp"
            source.write_text(text)
            command = [*target.compiler_command(), *target.cxx_flags(1), f"-I{HEADERS}"]
            subprocess.run([*command, "-c", source, "-o", folder / "kernels.o"], check=True)
