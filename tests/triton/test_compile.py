"""Triton kernels without a GPU: compiled for GPUs that are not there, and the code looked at.

Every program for one GPU of each maker, and every other one for a further GPU in turn; those whose
types differ from GPU to GPU for all. What Triton's interpreter lets pass (a wrong type, an op a
target lacks, memory that a block does not have) fails here.
"""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch import Tensor

import perfuse
from perfuse.capture.cross_compile import Generated
from perfuse.gpu import BLOCK_THREADS, gpu_of_name
from tests.behaviour.row import Behaviour
from tests.gpu.programs import LARGE, SMALL, bf16, quantise_rows, saturated

ELF = b"\x7fELF"
MAX_REGISTERS = {"cuda": 255, "hip": 512}
WIDEST, AMD = "cuda:90", "hip:gfx942"
LITTLE_SHARED = ("cuda:86", "cuda:120")
# They ask for the most memory of a block.
LONG_ROWS = ("large_cross_entropy_fb", "large_norm_fb")
OTHERS = ("cuda:80", "cuda:100", "hip:gfx90a")
# Conversions to eight bits, and functions of doubles, are instructions here and calls there.
OF_OTHER_TYPES = ("e4m3", "e5m2", "quantise", "float64", "special", "product")
FNUZ = tuple(
    Behaviour(f"quantise_{name}", partial(function, dtype=dtype), lambda: [bf16(17, 130)])
    for name, dtype, function in (
        ("rows_e4m3fnuz", torch.float8_e4m3fnuz, quantise_rows),
        ("e5m2fnuz", torch.float8_e5m2fnuz, saturated),
    )
)
PROGRAMS = {program.name: program for program in (*SMALL, *LARGE, *FNUZ)}


def targets_of(number: int, name: str) -> tuple[str, ...]:
    """The GPUs that a program is compiled for."""
    if any(word in name for word in OF_OTHER_TYPES) or name in LONG_ROWS:
        return (WIDEST, AMD, *OTHERS)
    further = OTHERS[number // 2 % len(OTHERS)]
    return (WIDEST, AMD) if number % 2 else (WIDEST, AMD, further)


ROWS = [
    *(
        (target, program.name)
        for number, program in enumerate((*SMALL, *LARGE))
        for target in targets_of(number, program.name)
    ),
    *((target, name) for target in LITTLE_SHARED for name in LONG_ROWS),
    *((AMD, program.name) for program in FNUZ),
]
# They are one call of a library, or nothing at all.
WITHOUT_KERNELS = {"zero_elements", "sort"}


def generated(name: str, target: str) -> Generated:
    program = PROGRAMS[name]
    return perfuse.codegen_for(
        program.function, program.inputs(), target=target, dynamic=program.dynamic
    )


@pytest.mark.parametrize(("target", "name"), ROWS)
def test_compiles(target: str, name: str) -> None:
    made = generated(name, target)
    kind, _, arch = target.partition(":")
    gpu = gpu_of_name(target)
    assert made.graphs
    assert made.objects or name in WITHOUT_KERNELS
    if name.endswith("_fb"):
        assert {graph.kind for graph in made.graphs} == {"forward", "backward"}
    for graph in made.graphs:
        for code, text in zip(graph.objects, graph.assembly, strict=True):
            assert code.code.startswith(ELF)
            assert 0 < code.num_registers <= MAX_REGISTERS[kind]
            assert code.shared_bytes <= gpu.shared_bytes
            assert code.num_threads <= BLOCK_THREADS
            assert code.num_registers * code.num_threads <= gpu.registers
            assert re.search(rf"\.target sm_{arch}" if kind == "cuda" else rf"\b{arch}\b", text)
            assert code.symbol in text


UNARY = """floor ceil trunc round sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p sigmoid
tanh sin cos tan sinh cosh asin acos atan asinh acosh atanh erf erfc erfinv lgamma digamma sign neg
abs isnan isinf isfinite signbit""".split()
BINARY = """div floor_divide remainder fmod pow atan2 hypot nextafter copysign
maximum minimum fmax fmin""".split()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("target", ("cuda:90", "hip:gfx942"))
def test_every_function_of_floats_compiles(target: str, dtype: torch.dtype) -> None:
    """Triton's library differs from target to target and from dtype to dtype."""

    def every(x: Tensor, y: Tensor) -> list[Tensor]:
        unary = [getattr(torch, name)(x) for name in UNARY]
        return [*unary, *(getattr(torch, name)(x, y) for name in BINARY)]

    x = torch.empty(4096, dtype=dtype, device="meta")
    made = perfuse.codegen_for(every, (x, x), target=target)
    assert made.objects


@pytest.mark.parametrize("name", ("softmax", "layer_norm", "add_f32"))
def test_a_small_kernel_keeps_its_values_in_registers(name: str) -> None:
    for code in generated(name, WIDEST).objects:
        assert code.stack_bytes == 0


def test_wide_accesses() -> None:
    """Aligned rows of half precision move sixteen bytes at a time."""
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    made = perfuse.codegen_for(lambda x: x * 2 + 1, (x,), target=WIDEST)
    (text,) = (text for graph in made.graphs for text in graph.assembly)
    assert re.search(r"ld\.global\S*\.v(4\.[bu]32|2\.[bu]64)", text)
    assert re.search(r"st\.global\S*\.v(4\.[bu]32|2\.[bu]64)", text)
