"""Contractions in C++: epilogues, strides, dtypes and sizes, held to float64, memory watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse.backends import backend_of
from perfuse.codegen.cpp.templates.choices import (
    CppTemplate,
    CppTemplateKind,
    choice_of,
    is_legal,
    propose,
    template_of,
    why_not,
)
from perfuse.codegen.cpp.unit import generate_sources
from perfuse.config import Settings
from perfuse.context import Context
from perfuse.decision import Choice
from perfuse.ir.program import Matmul
from perfuse.schedule.contract import contracted, contracted_with, with_contraction
from perfuse.schedule.plan import Kernel, Plan, with_template
from perfuse.schedule.schedule import place
from perfuse.schedule.verify import verify_plan
from perfuse.target import LANES, machine_isas
from tests.harness.compare import assert_as_good_as_eager
from tests.unit.lower.samples import bf16, f16, f32, f64, i32
from tests.unit.planning import plans_of

WATCHED = Settings().with_overrides({"verify": "memory", "cpu.opt_level": 1, "cpu.threads": 2})
M, N, K = 29, 83, 61
A, B, W, BIAS, R = f32(M, K), f32(K, N), f32(N, K), f32(N), f32(M, N)
Fn = Callable[..., Any]

FUSED: dict[str, tuple[Fn, tuple[Tensor, ...]]] = {
    "alone": (lambda a, b: a @ b, (A, B)),
    "bias and gelu": (lambda a, w, c: F.gelu(F.linear(a, w, c)), (A, W, BIAS)),
    "residual": (lambda a, b, r: r + 2 * (a @ b), (A, B, R)),
    "a row's scale": (lambda a, b, s: (a @ b) * s[:, None], (A, B, f32(M))),
    "the product too": (lambda a, b: ((y := a @ b), y.relu()), (A, B)),
    "two results": (lambda a, b: ((y := a @ b).relu(), y.exp()), (A, B)),
    "bool and half results": (lambda a, b: ((y := a @ b) > 0, y.half()), (A, B)),
    "heads": (
        lambda a, w: F.linear(a, w).view(4, 6, 8, 10).transpose(1, 2).contiguous() * 2,
        (f32(4, 6, K), f32(80, K)),
    ),
    "one row is replaced": (lambda a, b: (a @ b).select_scatter(b[3], 0, 1).relu(), (A, B)),
    "one head is replaced": (
        lambda a, w: (
            F.linear(a, w).view(4, 6, 4, 20).transpose(1, 2).select_scatter(a[:, :6, :20], 1, 2) * 2
        ),
        (f32(4, 6, K), f32(80, K)),
    ),
    "transposed operands": (lambda a, b: (a.mT @ b.mT).relu(), (f32(K, M), f32(N, K))),
    "offset and padded": (lambda a, b: (a[1:, 3:] @ b[3:, 5:]).relu(), (A, B)),
    "every other": (lambda a, b: (a[::2, ::2] @ b[:31, ::3]).relu(), (A, B)),
    "with itself": (lambda a: (a @ a.mT).relu(), (A,)),
    "one column": (lambda a, b: (a @ b).relu(), (A, f32(K, 1))),
    "one row": (lambda a, b: (a @ b).relu(), (f32(1, K), B)),
    "bf16": (lambda a, w, c: F.relu(F.linear(a, w, c)), (bf16(M, K), bf16(N, K), bf16(N))),
    "f16": (lambda a, b: (a @ b).sigmoid(), (f16(M, K), f16(K, N))),
}


def context_of(isa: str = "", threads: int = 2) -> Context:
    changes = {"cpu.simd": isa or "auto", "cpu.threads": threads}
    return Context.default(WATCHED.with_overrides(changes))


def kernel_of(plan: Plan) -> Kernel:
    """The matmul of a plan with its last kernel, or alone."""
    (matmul,) = (step for step in plan.steps if isinstance(step, Matmul))
    made = contracted_with([matmul], plan.kernels[-1], plan) if plan.kernels else ""
    made = made if isinstance(made, Kernel) else contracted(matmul, plan.program)
    assert isinstance(made, Kernel), made
    return made


def with_kernel(plan: Plan, kernel: Kernel, template: CppTemplate, context: Context) -> Plan:
    made = with_template(with_contraction(plan, kernel), kernel.name, choice_of(template))
    placed = place(made, context)
    verify_plan(placed)
    return placed


def loaded(plan: Plan, context: Context) -> Callable[[list[Any]], Sequence[Any]]:
    backend = backend_of(context.target)
    sources = backend.generate(plan, context)
    host = backend.host(plan, sources, context)
    call: Any = backend.load(host, backend.build(sources, context), {}, context)
    return lambda args: call(list(args))


def check(fn: Fn, inputs: tuple[Tensor, ...], context: Context, most: int | None = 1) -> None:
    """The first `most` of the templates that are proposed give eager's results."""
    (plan,) = plans_of(fn, *inputs, context=context)
    kernel = kernel_of(plan)
    proposed = propose(kernel, plan.program.buffers, context.target)
    assert proposed
    eager = fn(*inputs)
    exact = fn(*(x.double() for x in inputs))
    for template in proposed[:most]:
        got = loaded(with_kernel(plan, kernel, template, context), context)(list(inputs))
        expected, wide = ([r] if isinstance(r, Tensor) else list(r) for r in (eager, exact))
        for number, result in enumerate(got):
            assert_as_good_as_eager(result, expected[number], wide[number])


@pytest.mark.parametrize("name", FUSED)
def test_matches_eager(name: str) -> None:
    check(*FUSED[name], context_of())


def test_every_template_matches_eager() -> None:
    check(*FUSED["bias and gelu"], context_of(), most=None)
    check(*FUSED["residual"], context_of(), most=None)


@pytest.mark.parametrize("isa", ["scalar", "avx2"])
def test_isa(isa: str) -> None:
    if isa in machine_isas():
        check(*FUSED["bias and gelu"], context_of(isa, threads=1))


def linear_of_halves(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(torch.nn.functional.linear(x, w, bias))


@pytest.mark.parametrize("sizes", [(1, 7, 3), (3, 31, 6), (5, 64, 33), (13, 1100, 261)], ids=str)
def test_pairs_of_bfloat16(sizes: tuple[int, int, int]) -> None:
    """Dot products by the instruction for two products: odd depths, edges, several parts."""
    context = context_of(threads=2)
    if not context.target.has_bf16_pairs:
        pytest.skip("this CPU does not multiply pairs of bfloat16")
    m, k, n = sizes
    inputs = tuple(x.bfloat16() for x in (f32(m, k), f32(n, k), f32(n)))
    (plan,) = plans_of(linear_of_halves, *inputs, context=context)
    kinds = [t.kind for t in propose(kernel_of(plan), plan.program.buffers, context.target)]
    assert kinds[:2] == [CppTemplateKind.PAIRS] * 2
    check(linear_of_halves, inputs, context, most=2)


def test_pairs_are_for_machines_and_types_that_have_them() -> None:
    context = context_of()
    inputs = f32(4, 64), f32(32, 64), f32(32)
    halves = tuple(x.bfloat16() for x in inputs)
    for has, given, is_proposed in (
        (True, halves, True),
        (True, inputs, False),
        (False, halves, False),
    ):
        target = replace(context.target, isa="avx512", lanes=16, has_bf16_pairs=has)
        (plan,) = plans_of(linear_of_halves, *given, context=context)
        found = propose(kernel_of(plan), plan.program.buffers, target)
        assert any(t.kind is CppTemplateKind.PAIRS for t in found) == is_proposed


def test_one_function_for_all_sizes() -> None:
    """Dynamic sizes are arguments: nothing, one, primes, and more than a block."""
    context = context_of()
    fn = lambda a, b, c: torch.tanh(a @ b + c)  # noqa: E731
    (plan,) = plans_of(fn, A, B, BIAS, dynamic=True, context=context)
    kernel = kernel_of(plan)
    for template in propose(kernel, plan.program.buffers, context.target)[:2]:
        call = loaded(with_kernel(plan, kernel, template, context), context)
        for m, n, k in ((0, 5, 3), (5, 0, 3), (5, 3, 0), (2, 2, 2), (31, 17, 53), (200, 300, 400)):
            a, b, c = f32(m, k), f32(k, n), f32(n)
            got = call(_arguments(plan, a, b, c))
            exact = fn(a.double(), b.double(), c.double())
            assert_as_good_as_eager(got[0], fn(a, b, c), exact)


def _arguments(plan: Plan, *tensors: Tensor) -> list[Any]:
    """The tensors in order, with the sizes that the program takes besides: rows, depth, columns."""
    sizes = iter([*tensors[0].shape, tensors[1].shape[1]])
    waiting = iter(tensors)
    return [next(waiting if n in plan.program.buffers else sizes) for n in plan.program.inputs]


@pytest.mark.parametrize(
    "fn, inputs, reason",
    [
        (lambda a, b: a @ b, (f64(M, K), f64(K, N)), "no template sums f64"),
        (torch.bmm, (f32(3, M, K), f32(3, K, N)), "it is a batch of matmuls"),
    ],
)
def test_refused_with_a_reason(fn: Fn, inputs: tuple[Tensor, ...], reason: str) -> None:
    (plan,) = plans_of(fn, *inputs, context=context_of())
    kernel = kernel_of(plan)
    assert why_not(kernel, plan.program.buffers) == reason
    assert propose(kernel, plan.program.buffers, context_of().target) == ()


def test_illegal_templates_are_not_proposed() -> None:
    (plan,) = plans_of(FUSED["residual"][0], *FUSED["residual"][1], context=context_of())
    kernel = kernel_of(plan)
    assert kernel.contraction is not None
    (matmul,) = kernel.contraction.matmuls
    dots = CppTemplate(CppTemplateKind.DOTS, 3, 4, 0, 0, 256)
    assert not is_legal(dots, matmul, 8), "columns are not contiguous"
    assert not is_legal(CppTemplate(CppTemplateKind.PACKED, 6, 2, 256, 100, 256), matmul, 8)
    assert not is_legal(CppTemplate(CppTemplateKind.ROWS, 6, 2, 256, 0, 250), matmul, 8)


def test_choices_go_to_json_and_back() -> None:
    template = CppTemplate(CppTemplateKind.PACKED, 6, 2, 256, 96, 256)
    choice = choice_of(template)
    document = {"source": choice.source, "name": choice.name, "options": list(choice.options)}
    assert template_of(Choice.from_json(document)) == template


def test_avx512_uses_its_registers() -> None:
    target = replace(context_of().target, isa="avx512", lanes=LANES["avx512"])
    context = replace(context_of(), target=target)
    (plan,) = plans_of(FUSED["bias and gelu"][0], f32(64, K), W, BIAS, context=context)
    kernel = kernel_of(plan)
    for template in propose(kernel, plan.program.buffers, target):
        units = dict(generate_sources(with_kernel(plan, kernel, template, context), context).units)
        assert "pf::gemm_packed<pf::Blocking<14, 2" in units["template_kernels0"]


def test_plans_without_contractions_do_not_include_the_header() -> None:
    (plan,) = plans_of(lambda x: (x + i32(3)).sum(), f32(3), context=context_of())
    assert all("gemm.h" not in text for _, text in generate_sources(plan, context_of()).units)
