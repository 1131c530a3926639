"""Scaled matmuls of eight-bit floats as templates: values, and code for GPUs that are not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse.autotune.sites import plan_of_site, sites_of
from perfuse.build.triton import assembly_of
from perfuse.candidates.triton import template_choices
from perfuse.codegen.triton.templates.template import (
    COOPERATIVE,
    MAPPED,
    PERSISTENT,
    PING_PONG,
    POINTERS,
    SPECIALISED,
    VECTOR,
    Template,
)
from perfuse.gpu import gpu_of_name
from perfuse.ir.program import Matmul
from perfuse.testing import fresh_cache
from tests.harness.compare import assert_as_good_as_eager
from tests.triton.contractions import Problem, context_for, objects_of, run, sources_of
from tests.unit.lower.samples import bf16, f32

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def own_cache() -> Iterator[None]:
    with fresh_cache():
        yield


def scaled(
    *, after: Callable[..., Any] = lambda y: y, out: torch.dtype = BF16, is_fast: bool = False
) -> Callable[..., Any]:
    """A scaled matmul, and what is computed of its result."""

    def fn(
        a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, bias: Tensor | None = None, *rest: Tensor
    ) -> Any:
        made = torch._scaled_mm(a, b, of_a, of_b, bias, out_dtype=out, use_fast_accum=is_fast)
        return after(made, *rest)

    return fn


def operands(
    rows: int = 48, columns: int = 96, depth: int = 80, *, has_row_scales: bool = False,
    of_a: torch.dtype = E4M3, of_b: torch.dtype = E4M3,
) -> tuple[Tensor, ...]:  # fmt: skip
    a, b = f32(rows, depth).to(of_a), f32(columns, depth).to(of_b).t()
    if has_row_scales:
        return a, b, torch.rand(rows, 1) + 0.5, torch.rand(1, columns) + 0.5
    return a, b, torch.tensor(0.75), torch.tensor(1.5)


def in_doubles(*inputs: Tensor) -> Tensor:
    """The matmul of these without rounding."""
    a, b, of_a, of_b, *bias = (x.double() for x in inputs)
    made = (a @ b) * of_a * of_b
    return made + bias[0] if bias else made


ROWS, BIAS = operands(has_row_scales=True), bf16(96)
PLAIN = Template(POINTERS, 32, 32, 32, 4, 2)
SPLIT = Template(POINTERS, 32, 32, 16, 4, 2, splits=3)
SWAPPED = Template(POINTERS, 16, 64, 32, 4, 2, is_swapped=True)
ONE_ROW = Template(VECTOR, 1, 16, 32, 4, 1)
ONE_MAP = Template(MAPPED, 64, 64, 32, 4, 3)
MAPS = Template(PERSISTENT, 64, 64, 32, 4, 3, programs=3, parts=2)
TEMPLATES = (PLAIN, SPLIT, SWAPPED, ONE_MAP, MAPS)


@pytest.mark.parametrize("template", TEMPLATES, ids=str)
@pytest.mark.parametrize("has_row_scales", [False, True], ids=["tensor", "row"])
def test_every_template(template: Template, has_row_scales: bool) -> None:
    inputs = (*operands(has_row_scales=has_row_scales), BIAS)
    fn = scaled()
    (got,) = run(Problem("scaled", fn, inputs), template)
    assert_as_good_as_eager(got, fn(*inputs), in_doubles(*inputs))


CASES = {
    "float16": (scaled(out=torch.float16), ROWS),
    "float32": (scaled(out=torch.float32), ROWS),
    "gradient": (scaled(), operands(of_a=E5M2)),
    "one row": (scaled(), operands(1, has_row_scales=True)),
    "odd rows": (scaled(), operands(47)),
}


@pytest.mark.parametrize("name", CASES)
def test_matches_eager(name: str) -> None:
    fn, inputs = CASES[name]
    template = ONE_ROW if name == "one row" else PLAIN
    (got,) = run(Problem(name, fn, inputs), template)
    eager = fn(*inputs)
    assert got.dtype == eager.dtype and got.stride() == eager.stride()
    assert_as_good_as_eager(got, eager, in_doubles(*inputs))


def quantised(y: Tensor, scale: Tensor) -> Tensor:
    return (y * scale).clamp(-448, 448).to(E4M3)


EPILOGUES = {
    "relu": (F.relu, ()),
    "residual": (lambda y, r: r + y * 2, (bf16(48, 96),)),
    "quantise": (quantised, (torch.tensor(4.0),)),
}


@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize("template", [PLAIN, MAPS], ids=str)
def test_epilogues_are_inside(name: str, template: Template) -> None:
    """Small whole numbers and scales of powers of two: all sums are exact, and so is all of it."""
    after, others = EPILOGUES[name]
    a, b = (torch.randint(-2, 3, s).float().to(E4M3) for s in ((48, 80), (96, 80)))
    inputs = (a, b.t(), torch.tensor(0.5), torch.tensor(0.25), bf16(96).round(), *others)
    fn = scaled(after=after)
    (got,) = run(Problem(name, fn, inputs), template)
    assert torch.equal(got.float(), fn(*inputs).float())


def test_rows_may_be_dynamic() -> None:
    fn, problem_inputs = scaled(after=F.relu), (*operands(has_row_scales=True), BIAS)
    problem = Problem("dynamic", fn, problem_inputs, dynamic=True)
    inputs = (*operands(64, has_row_scales=True), BIAS)
    (got,) = run(problem, PLAIN, inputs)
    assert_as_good_as_eager(got, fn(*inputs), in_doubles(*inputs).relu())


# -- code for GPUs -------------------------------------------------------------------------

LARGE = (*operands(512, 512, 1024, has_row_scales=True), bf16(512))


def sites(fn: Callable[..., Any], inputs: tuple[Tensor, ...], target: str) -> list[Template]:
    """The templates that are proposed for the one matmul of a function."""
    plan = Problem("scaled", fn, inputs).planned(context_for(target))
    (site,) = sites_of(plan)
    program = plan_of_site(site, plan).program
    return [Template.of(c) for c in template_choices(site, program, gpu_of_name(target), False)]


COMPILED = [
    (False, Template(PERSISTENT, 128, 128, 128, 8, 4, programs=132, parts=2)),
    (False, Template(POINTERS, 128, 128, 128, 8, 4)),
    (True, Template(COOPERATIVE, 128, 256, 128, 8, 4, programs=132, parts=2)),
    (True, Template(PING_PONG, 128, 128, 128, 4, 6, programs=132, parts=2)),
]


@pytest.mark.parametrize(("is_fast", "template"), COMPILED, ids=str)
def test_compiles_for_hopper(is_fast: bool, template: Template) -> None:
    """Products of eight bits in matrix units; sums that are not fast are added up in float32."""
    context = context_for("sm_90")
    sources = sources_of(
        Problem("scaled", scaled(after=F.relu, is_fast=is_fast), LARGE), template, "sm_90"
    )
    (made,) = objects_of(sources, context)
    assert made.stack_bytes == 0, "registers are spilled"
    assert context.target.gpu is not None
    (assembly,) = assembly_of(sources, context.target.gpu, context)
    assert "k32.f32.e4m3.e4m3" in assembly
    assert ("max_num_imprecise_acc=128" in sources.text) is not is_fast


def test_compiles_for_cdna() -> None:
    inputs = (*operands(256, 256, 512), bf16(256))
    fnuz = tuple(x.float().to(torch.float8_e4m3fnuz) for x in inputs[:2])
    problem = Problem("scaled", scaled(), (*fnuz, *inputs[2:]))
    template = Template(POINTERS, 64, 64, 64, 4, 2)
    (made,) = objects_of(sources_of(problem, template, "gfx942"), context_for("gfx942"))
    assert made.stack_bytes == 0


@pytest.mark.parametrize("is_fast", [False, True])
def test_what_is_proposed(is_fast: bool) -> None:
    """Groups of warps with roles sum in fewer bits, which the caller has to allow."""
    many = operands(4096, 4096, 512)
    found = sites(scaled(after=F.relu, is_fast=is_fast), many, "sm_90")
    assert found and any(t.kind in SPECIALISED for t in found) == is_fast
    assert not sites(scaled(is_fast=is_fast), LARGE, "gfx942"), "another float of eight bits"
    assert not sites(scaled(is_fast=is_fast), LARGE, "sm_80")


def test_the_call_is_that_of_the_graph() -> None:
    (step,) = Problem("scaled", scaled(is_fast=True), LARGE).planned(context_for("sm_90")).steps
    assert isinstance(step, Matmul) and step.has_fast_sums
    assert step.args[5:] == (None, BF16, True) and len(step.views()) == 5
