"""C++ templates that default mode takes without measuring, where they are known to win."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse.autotune import known_contractions
from perfuse.autotune.matmuls import tune_matmuls
from perfuse.codegen.cpp.templates.choices import CppTemplateKind, template_of
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.ir.dtype import DType
from perfuse.ir.program import Matmul
from perfuse.pipeline import compile_graph
from perfuse.schedule.plan import Plan
from perfuse.schedule.schedule import place
from perfuse.schedule.verify import verify_plan
from perfuse.target import LANES
from perfuse.testing import fresh_cache
from tests.harness.compare import assert_as_good_as_eager
from tests.unit.graph.tracing import traced
from tests.unit.lower.samples import f32
from tests.unit.planning import plans_of

BF16 = torch.bfloat16


def layer(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, bias))


def inputs(rows: int, depth: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(x.to(dtype) for x in (f32(rows, depth), f32(columns, depth), f32(columns)))


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    """A CPU with AVX-512 of the maker whose machines were measured, wherever this runs."""
    monkeypatch.setattr(known_contractions, "cpu_model", lambda: "AMD EPYC")
    with fresh_cache():
        default = Context.default()
        target = replace(default.target, isa="avx512", lanes=LANES["avx512"], has_bf16_pairs=True)
        yield replace(default, target=target, counters=Counters())


def tuned(context: Context, fn: Callable[..., Any], *given: Tensor) -> Plan:
    # A matmul that no row names is raced; here it keeps its default.
    over = replace(context, tune_until=0.0)
    (plan,) = plans_of(fn, *given, context=context)
    return tune_matmuls(plan, over)


@pytest.mark.parametrize(
    ("sizes", "dtype", "kind"),
    [
        ((1, 768, 3072), BF16, CppTemplateKind.PAIRS),
        ((32, 512, 512), BF16, CppTemplateKind.PAIRS),
        ((8, 768, 768), torch.float32, CppTemplateKind.DOTS),
        ((16, 1280, 512), torch.float32, CppTemplateKind.DOTS),
        ((64, 1280, 512), torch.float32, CppTemplateKind.PACKED),
        ((48, 512, 512), BF16, None),
        ((4, 64, 64), BF16, None),
        ((16, 768, 768), torch.float32, None),
        ((64, 1024, 512), torch.float32, None),
        ((64, 1280, 64), torch.float32, None),
        ((64, 9000, 512), torch.float32, None),
    ],
    ids=str,
)
def test_classes(
    sizes: tuple[int, int, int], dtype: torch.dtype, kind: CppTemplateKind | None, amd: Context
) -> None:
    plan = tuned(amd, layer, *inputs(*sizes, dtype))
    assert [template_of(choice).kind for choice in plan.templates.values()] == [kind] * bool(kind)
    has_matmul = any(isinstance(step, Matmul) for step in plan.steps)
    assert has_matmul == (kind is None)
    if kind is not None:
        (decision,) = plan.decisions
        assert decision.chosen.source == "cpp" and "times" in decision.reason
        assert len(plan.steps) == 1, "the epilogue is inside"
        verify_plan(place(plan, amd))


def test_a_weight_stored_by_rows_is_packed_or_left_to_the_libraries(amd: Context) -> None:
    assert not tuned(amd, torch.mm, f32(4, 512), f32(512, 512)).templates
    plan = tuned(amd, torch.mm, f32(64, 1280), f32(1280, 512))
    assert [template_of(c).kind for c in plan.templates.values()] == [CppTemplateKind.PACKED]


def test_other_machines_and_the_setting_leave_it_to_the_libraries(
    amd: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs(4, 512, 512, BF16)
    off = amd.settings.with_overrides({"cpu.tune_matmuls": False})
    assert not tuned(replace(amd, settings=off), layer, *given).templates
    aten = amd.settings.with_overrides({"max_autotune_gemm_backends": "ATEN"})
    assert not tuned(replace(amd, settings=aten), layer, *given).templates
    without = replace(amd.target, has_bf16_pairs=False)
    assert not tuned(replace(amd, target=without), layer, *given).templates
    monkeypatch.setattr(known_contractions, "cpu_model", lambda: "another maker")
    assert not tuned(amd, layer, *given).templates


@pytest.mark.parametrize(
    ("sizes", "dtype", "kind"),
    [
        ((4, 768, 3072), BF16, CppTemplateKind.PAIRS),
        ((8, 768, 3072), BF16, None),
        ((32, 512, 512), torch.float32, CppTemplateKind.DOTS),
        ((48, 1280, 512), torch.float32, None),
        ((256, 3072, 768), torch.float32, None),
    ],
    ids=str,
)
def test_classes_with_matrix_units(
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    kind: CppTemplateKind | None,
    amd: Context,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_contractions, "cpu_model", lambda: "Intel Xeon")
    plan = tuned(amd, layer, *inputs(*sizes, dtype))
    assert [template_of(choice).kind for choice in plan.templates.values()] == [kind] * bool(kind)
    without = replace(amd, target=replace(amd.target, has_bf16_pairs=False))
    assert not tuned(without, layer, *inputs(*sizes, dtype)).templates


def test_equal_matmuls_are_one_decision(amd: Context) -> None:
    x, w, bias = inputs(4, 512, 512, torch.float32)
    plan = tuned(amd, lambda *given: layer(layer(*given), *given[1:]), x, w, bias)
    assert len(plan.templates) == 2 and len(plan.decisions) == 1


def block(x: Tensor, w: Tensor, bias: Tensor, back: Tensor) -> Tensor:
    """Two layers, one after the other, and a row kernel after both."""
    return torch.softmax(F.linear(layer(x, w, bias), back) + x, -1)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_programs_match_eager(dtype: torch.dtype, amd: Context) -> None:
    if not Context.default().target.has_bf16_pairs:
        pytest.skip("this CPU does not multiply pairs of bfloat16")
    x, w, bias = inputs(3, 512, 1024, dtype)
    given = (x, w / 16, bias, f32(512, 1024).to(dtype) / 16)
    watched = amd.settings.with_overrides({"verify": "memory"})
    program = compile_graph(traced(lambda *a: [block(*a)], *given), replace(amd, settings=watched))
    assert [d.chosen.source for d in program.decisions] == ["cpp", "cpp"]
    (got,) = program.call(list(given))
    exact = block(*(x.double() for x in given))
    assert_as_good_as_eager(got, block(*given), exact)


def test_some_rows_whose_number_changes(amd: Context) -> None:
    """The MLP of an expert, which gathers another number of rows in every call."""
    compiled = torch.compile(layer, backend="perfuse", dynamic=True)
    _, w, bias = inputs(1, 128, 256, torch.float32)
    for rows in (64, 3, 90):
        x = f32(rows, 128)
        exact = layer(x.double(), w.double(), bias.double())
        assert_as_good_as_eager(compiled(x, w, bias), layer(x, w, bias), exact)


def test_only_known_sizes_besides_the_rows(amd: Context) -> None:
    facts = known_contractions.CpuFacts(64, 256, 128, DType.F32, along_depth=True, changes=True)
    meant = [row.name for row in known_contractions.KNOWN if row.is_meant(facts)]
    assert meant == ["some rows of float32, whose number changes"]
    few = replace(facts, rows=4)
    assert not any(row.is_meant(few) for row in known_contractions.KNOWN)
    fixed = replace(facts, changes=False)
    assert not any(row.is_meant(fixed) for row in known_contractions.KNOWN)


def test_batches_of_matmuls_are_left_to_the_libraries(amd: Context) -> None:
    assert not tuned(amd, torch.bmm, f32(2, 64, 1280), f32(2, 1280, 512)).templates
