"""Candidates for a contraction: what is legal, what fits, and what is tried first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfuse.codegen.triton.templates.propose import (
    MOST,
    ContractionFacts,
    Model,
    proposed,
    registers,
    shared_bytes,
    why_too_large,
)
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
from perfuse.ir.dtype import DType

GPU, OLD, AMD = (gpu_of_name(name) for name in ("sm_90", "sm_80", "gfx942"))


def facts(rows: int, columns: int, depth: int, **changes: object) -> ContractionFacts:
    made = ContractionFacts(
        batch=1,
        rows=rows,
        columns=columns,
        depths=(depth,),
        num_accumulators=1,
        dtype=DType.BF16,
        is_static=True,
        is_mappable=True,
        is_joined=True,
        along_depth=True,
        stored_bytes=2,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


LARGE = facts(4096, 4096, 4096)
PROBLEMS = [
    LARGE,
    facts(1, 4096, 14336),
    facts(1, 4096, 14336, along_depth=False),
    facts(16, 14336, 4096),
    facts(512, 512, 4096),
    facts(100, 30, 7, is_mappable=False),
    facts(1024, 1024, 1024, dtype=DType.F32),
    facts(512, 512, 512, dtype=DType.I8),
    facts(4096, 14336, 4096, num_accumulators=2),
    facts(2048, 1536, 64, depths=(64, 64), num_accumulators=2, dtype=DType.F32),
    facts(300, 200, 100, batch=7),
]


@pytest.mark.parametrize("gpu", [GPU, OLD, AMD], ids=lambda gpu: gpu.arch)
@pytest.mark.parametrize("wanted", PROBLEMS, ids=lambda p: f"{p.rows}x{p.columns} {p.dtype}")
def test_a_few_that_fit(wanted: ContractionFacts, gpu: object) -> None:
    assert gpu in (GPU, OLD, AMD)
    found = proposed(wanted, gpu, ("ieee",))  # type: ignore[arg-type]
    assert 1 <= len(found) <= MOST and len(set(found)) == len(found)
    for template in found:
        assert Template.of(template.choice) == template
        assert not why_too_large(template, wanted, gpu)  # type: ignore[arg-type]
    if gpu is not GPU:
        assert not {PERSISTENT, MAPPED, *SPECIALISED} & {template.kind for template in found}


def test_large_ones_are_persistent_and_one_row_needs_no_matrix_units() -> None:
    assert proposed(LARGE, GPU, ("",))[0].kind == PING_PONG
    assert {PERSISTENT, COOPERATIVE} <= {made.kind for made in proposed(LARGE, GPU, ("",))}
    assert proposed(facts(1, 4096, 14336), GPU, ("",))[0].kind == VECTOR
    assert proposed(facts(1, 4096, 14336, along_depth=False), GPU, ("",))[0].splits > 1
    few = proposed(facts(16, 14336, 4096), GPU, ("",))
    assert any(template.is_swapped for template in few)
    assert all(template.rows <= 64 for template in few)


def test_roles_need_the_right_gpu_and_operands_side_by_side() -> None:
    gate = facts(4096, 14336, 4096, num_accumulators=2)
    assert proposed(gate, GPU, ("",))[0].columns == 64
    for other in (replace(gate, is_joined=False), facts(512, 512, 512, batch=4)):
        assert not {t.kind for t in proposed(other, GPU, ("",), most=99)} & set(SPECIALISED)
    newer = gpu_of_name("sm_100")
    assert not {t.kind for t in proposed(LARGE, newer, ("",), most=99)} & set(SPECIALISED)
    few = proposed(facts(1024, 1024, 1024), GPU, ("",), most=99)
    assert PING_PONG not in {t.kind for t in few}, "one tile a program: no turns are taken"
    assert COOPERATIVE in {t.kind for t in few}


def test_few_tiles_share_their_depth() -> None:
    found = proposed(facts(512, 512, 4096), GPU, ("",))
    assert any(template.splits > 1 for template in found)
    dynamic = proposed(facts(512, 512, 4096, is_static=False), GPU, ("",))
    assert all(template.splits == 1 for template in dynamic)


def test_every_precision_is_tried() -> None:
    wanted = facts(1024, 1024, 1024, dtype=DType.F32)
    found = proposed(wanted, GPU, ("ieee", "bf16x6", "tf32x3"))
    assert {template.precision for template in found} == {"ieee", "bf16x6", "tf32x3"}


def test_what_does_not_fit_is_named() -> None:
    wide = Template(POINTERS, 256, 256, 64, 4, 2)
    assert registers(wide, LARGE, GPU) > 255
    assert "registers" in why_too_large(wide, LARGE, GPU)
    deep = Template(PERSISTENT, 128, 256, 128, 8, 4, programs=132)
    assert shared_bytes(deep, LARGE) > GPU.shared_bytes
    assert "shared memory" in why_too_large(deep, LARGE, GPU)


def test_nothing_to_compute_has_no_candidates() -> None:
    assert not proposed(facts(0, 10, 10), GPU, ("",))


def test_the_model_predicts_what_was_measured() -> None:
    """Milliseconds on an H200: 0.194 for 4096^3, 1.62 for 8192^3."""
    template = Template(PERSISTENT, 128, 256, 64, 8, 4, programs=132, parts=2)
    model = Model.of(GPU)
    assert model.seconds(template, LARGE) == pytest.approx(0.194e-3, rel=0.15)
    large = facts(8192, 8192, 8192)
    assert model.seconds(template, large) == pytest.approx(1.62e-3, rel=0.15)
