"""Matmul templates without a GPU: values in Triton's interpreter, and their code for GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse.build.triton import assembly_of
from perfuse.codegen.triton.templates.template import (
    COOPERATIVE,
    MAPPED,
    PERSISTENT,
    PING_PONG,
    POINTERS,
    VECTOR,
    Template,
)
from perfuse.testing import fresh_cache
from tests.harness.compare import assert_as_good_as_eager
from tests.triton.contractions import Problem, context_for, objects_of, run, sources_of
from tests.unit.lower.samples import bf16, f32


@pytest.fixture(autouse=True)
def own_cache() -> Iterator[None]:
    with fresh_cache():
        yield


PLAIN = Template(POINTERS, 32, 32, 16, 4, 2)
SPLIT = Template(POINTERS, 32, 32, 16, 4, 2, splits=3)
SWAPPED = Template(POINTERS, 16, 64, 32, 4, 2, is_swapped=True)
ONE_ROW = Template(VECTOR, 1, 16, 32, 4, 1)
ONE_ROW_SPLIT = Template(VECTOR, 1, 16, 32, 4, 1, splits=4)
ONE_MAP = Template(MAPPED, 64, 64, 32, 4, 3)
SWAPPED_MAP = Template(MAPPED, 16, 64, 32, 4, 3, is_swapped=True)
SPLIT_MAP = Template(MAPPED, 64, 64, 32, 4, 3, splits=2)
MAPS = Template(PERSISTENT, 64, 64, 32, 4, 3, programs=3, parts=2)

A, B, BIAS = bf16(50, 70), bf16(70, 90), bf16(90)
W = bf16(90, 70)


def strided(rows: int, columns: int, *strides: int) -> torch.Tensor:
    flat = torch.randn(rows * max(strides) + columns * min(strides) + columns * max(strides))
    return flat.to(torch.bfloat16).as_strided((rows, columns), strides)


PROBLEMS = [
    Problem("mm", lambda a, b: a @ b, (A, B)),
    Problem("f16", lambda a, b: a @ b, (A.half(), B.half())),
    Problem("f32", lambda a, b: torch.mm(a, b), (f32(50, 70), f32(70, 90))),
    Problem("transposed", lambda a, b: a.t() @ b.t(), (bf16(70, 50), bf16(90, 70))),
    Problem("strided", lambda a, b: a @ b, (strided(50, 70, 1, 56), strided(70, 90, 200, 2))),
    Problem("offset", lambda a, b: a[3:, 5:] @ b[5:, 7:], (bf16(50, 70), bf16(70, 90))),
    Problem("one row", lambda a, b: a @ b, (bf16(1, 70), B)),
    Problem("one row relu", lambda a, b: F.relu(a @ b), (bf16(1, 70), B)),
    Problem("no depth", lambda a, b: a @ b, (bf16(20, 0), bf16(0, 30))),
    Problem("no rows", lambda a, b: a @ b, (bf16(0, 70), B)),
    Problem("addmm", lambda c, a, w: F.linear(a, w, c), (BIAS, A, W)),
    Problem(
        "factors", lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), (bf16(50, 90), A, B)
    ),
    Problem(
        "bias of no weight", lambda c, a, b: torch.addmm(c, a, b, beta=0), (BIAS * torch.nan, A, B)
    ),
    Problem("gelu", lambda a, w, c: F.gelu(F.linear(a, w, c)), (A, W, BIAS)),
    Problem("residual", lambda a, b, r: r + (a @ b) * 2, (A, B, bf16(50, 90))),
    Problem("float result", lambda a, b: (a @ b).float() * 2, (A, B)),
    Problem("two results", lambda a, b: ((y := a @ b), y.relu(), y.float() * 2), (A, B)),
    Problem("row scale", lambda a, b, s: (a @ b) * s[:, None], (A, B, bf16(50))),
    Problem("bmm", lambda a, b: torch.bmm(a, b), (bf16(3, 20, 40), bf16(3, 40, 30))),
    Problem("bmm relu", lambda a, b: F.relu(torch.bmm(a, b)), (bf16(3, 20, 40), bf16(3, 40, 30))),
    Problem(
        "heads",
        lambda a, w: F.linear(a, w).view(2, 25, 9, 10).transpose(1, 2).contiguous() * 2,
        (bf16(2, 25, 70), W),
    ),
    Problem(
        "sum of two",
        lambda a, b, c, d: a @ b + c @ d,
        (f32(50, 70), f32(70, 90), f32(50, 33), f32(33, 90)),
    ),
    Problem("gate and up", lambda a, g, u: F.silu(a @ g) * (a @ u), (A, B, bf16(70, 90))),
]

FITTING = [
    Problem("mm", lambda a, b: a @ b, (bf16(80, 72), bf16(72, 96))),
    Problem("transposed", lambda a, b: a.t() @ b.t(), (bf16(72, 80), bf16(96, 72))),
    Problem(
        "gelu", lambda a, w, c: F.gelu(F.linear(a, w, c)), (bf16(80, 72), bf16(96, 72), bf16(96))
    ),
    Problem("two results", lambda a, b: ((y := a @ b), y.float()), (bf16(150, 72), bf16(72, 96))),
    Problem("bmm", lambda a, b: F.relu(torch.bmm(a, b)), (bf16(3, 80, 72), bf16(3, 72, 96))),
    Problem(
        "gate", lambda a, g, u: F.silu(a @ g) * (a @ u), (bf16(80, 72), bf16(72, 96), bf16(72, 96))
    ),
    Problem("odd result", lambda a, b: a @ b, (bf16(80, 72), bf16(72, 96)[:, :90])),
]
CASES = [
    *((problem, PLAIN) for problem in PROBLEMS),
    *(
        (problem, SPLIT)
        for problem in PROBLEMS
        if problem.name in ("mm", "gelu", "sum of two", "bmm")
    ),
    *((problem, SWAPPED) for problem in PROBLEMS if problem.name in ("mm", "gelu", "gate and up")),
    *(
        (problem, template)
        for problem in PROBLEMS
        if problem.name.startswith("one row")
        for template in (ONE_ROW, ONE_ROW_SPLIT, SWAPPED)
    ),
    *((problem, ONE_MAP) for problem in FITTING),
    *((problem, SWAPPED_MAP) for problem in FITTING if problem.name in ("mm", "transposed")),
    *((problem, SPLIT_MAP) for problem in FITTING if problem.name in ("gelu", "bmm")),
    *((problem, MAPS) for problem in FITTING if problem.name != "bmm"),
]


@pytest.mark.parametrize(("problem", "template"), CASES, ids=str)
def test_matches_eager(problem: Problem, template: Template) -> None:
    got = run(problem, template)
    eager = problem.fn(*problem.inputs)
    exact = problem.fn(*(x.double() for x in problem.inputs))
    several = eager if isinstance(eager, tuple) else (eager,)
    exacts = exact if isinstance(exact, tuple) else (exact,)
    for one, two, three in zip(got, several, exacts, strict=True):
        assert one.dtype == two.dtype and one.stride() == two.stride()
        assert_as_good_as_eager(one, two, three)


LARGE, DEEP = bf16(512, 1024), bf16(1024, 512)
# A template, and operands of its size.
COMPILED = [
    (Template(POINTERS, 128, 128, 64, 8, 3), LARGE, DEEP),
    (Template(POINTERS, 64, 128, 128, 4, 3, splits=2), LARGE, DEEP),
    (Template(POINTERS, 16, 128, 128, 4, 4, is_swapped=True), LARGE[:16], DEEP),
    (Template(VECTOR, 1, 128, 64, 4, 1, splits=16), LARGE[:1], DEEP),
    (Template(PERSISTENT, 128, 256, 64, 8, 4, programs=132, parts=2), LARGE, DEEP),
    (Template(MAPPED, 64, 128, 128, 4, 4), LARGE, DEEP),
    (Template(MAPPED, 16, 64, 128, 4, 5, is_swapped=True), LARGE[:16], DEEP),
]


DYNAMIC = [
    (
        Problem("dynamic", lambda a, b: F.relu(a @ b), (bf16(50, 70), bf16(70, 90)), dynamic=True),
        PLAIN,
    ),
    (
        Problem(
            "dynamic",
            lambda a, b: torch.bmm(a, b),
            (bf16(3, 50, 70), bf16(3, 70, 90)),
            dynamic=True,
        ),
        PLAIN,
    ),
    (
        Problem(
            "dynamic",
            lambda a, w, c: F.gelu(F.linear(a, w, c)),
            (bf16(50, 70), bf16(90, 70), bf16(90)),
            dynamic=True,
        ),
        SWAPPED,
    ),
]


@pytest.mark.parametrize(("problem", "template"), DYNAMIC, ids=str)
def test_one_kernel_for_all_sizes(problem: Problem, template: Template) -> None:
    """The first size of the first operand is another one when it is called."""
    a, *others = problem.inputs
    if a.ndim == 3:
        inputs = tuple(torch.cat([x, x]) for x in problem.inputs)
    else:
        inputs = (torch.cat([a, a[:13]]), *others)
    (got,) = run(problem, template, inputs)
    assert_as_good_as_eager(got, problem.fn(*inputs), problem.fn(*(x.double() for x in inputs)))


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("row", COMPILED, ids=lambda row: str(row[0]))
def test_compiles_without_spills(row: tuple[Template, Tensor, Tensor], target: str) -> None:
    template, a, b = row
    if target == "gfx942":
        if template.kind in (PERSISTENT, MAPPED):
            pytest.skip("no tensor maps there")
        template = replace(template, num_stages=2, depth=min(64, template.depth))
    problem = Problem("gelu", lambda a, b: F.gelu(a @ b), (a, b))
    context = context_for(target)
    (made,) = objects_of(sources_of(problem, template, target), context)
    assert context.target.gpu is not None
    assert made.shared_bytes <= context.target.gpu.shared_bytes
    assert made.stack_bytes == 0, "registers are spilled"


@pytest.mark.parametrize("template", [PLAIN, SPLIT], ids=str)
def test_bytes_are_summed_exactly(template: Template) -> None:
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((40, 64), (64, 48)))
    (got,) = run(Problem("int8", torch._int_mm, (a, b)), template)
    assert torch.equal(got, (a.int() @ b.int()))


def test_bytes_compile() -> None:
    a, b = (torch.zeros(shape, dtype=torch.int8) for shape in ((256, 512), (512, 256)))
    template = Template(POINTERS, 64, 64, 128, 4, 3)
    sources = sources_of(Problem("int8", torch._int_mm, (a, b)), template, "sm_90")
    (made,) = objects_of(sources, context_for("sm_90"))
    assert made.stack_bytes == 0


SPECIAL = {
    "residual": (lambda a, b, r: torch.relu(a @ b + r), (LARGE, DEEP, bf16(512, 512))),
    "gate": (lambda a, g, u: F.silu(a @ g) * (a @ u), (LARGE, DEEP, bf16(1024, 512))),
}


@pytest.mark.parametrize(
    ("name", "kind"), [("residual", PING_PONG), ("gate", PING_PONG), ("gate", COOPERATIVE)]
)
def test_warps_have_roles(name: str, kind: str) -> None:
    """Matrix units are used by groups of warps, blocks are copied by tensor maps of the host."""
    fn, inputs = SPECIAL[name]
    columns, warps = 64 if name == "gate" else 128, 4 if kind == PING_PONG else 8
    template = Template(kind, 128, columns, 64, warps, 4, programs=132)
    problem, context = Problem(name, fn, inputs), context_for("sm_90")
    sources = sources_of(problem, template, "sm_90")
    (made,) = objects_of(sources, context)
    assert context.target.gpu is not None
    (assembly,) = assembly_of(sources, context.target.gpu, context)
    assert all(text in assembly for text in ("wgmma.mma_async", "setmaxnreg.inc", "n128k16"))
    assert "tensormap.replace" not in assembly, "a map is made in the kernel"
    assert (made.num_threads, made.stack_bytes, made.scratch_bytes) == (384, 0, 0)
    (launch,) = sources.all_launches
    assert {m.buffer for m in launch.maps}.isdisjoint(launch.buffers), "all is read by maps"
    names = [name for name, _ in sources.kernels[0].signature]
    assert ("ahead_map" in names) == (name == "residual")
