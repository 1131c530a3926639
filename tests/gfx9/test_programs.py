"""Perfuse's Triton kernels, compiled for gfx942 and executed, against eager.

`pytest -m slow tests/gfx9` runs every small program of `tests/gpu/programs.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from perfuse.codegen.triton.templates.template import POINTERS, Template
from tests.behaviour.row import Behaviour
from tests.gfx9.errors import BadAddress, KernelFailed
from tests.gfx9.launcher import ARCH, interpreted_gfx942
from tests.gpu.programs import SMALL, at_the_limits, check_limits
from tests.harness.compare import assert_as_good_as_eager
from tests.triton.contractions import Problem, run
from tests.triton.test_compile import FNUZ
from tests.triton.test_templates import ONE_ROW, ONE_ROW_SPLIT, PLAIN, PROBLEMS, SPLIT, SWAPPED
from tests.unit.lower.samples import bf16

BACKEND = "perfuse"
# Every kind of kernel: flat, rows, columns, split, scans, lookups, atomics, batches, 8-bit floats.
OFTEN = """add_f32 add_bf16_broadcast gelu_bias_bf16_fb swish_f16_fb float64 integers bytes rounding
foreach sum_all sum_rows sum_columns argmax softmax masked_softmax softmax_bf16_fb layer_norm_fb
rms_norm_bf16_fb cross_entropy_fb cumsum transpose_add gather embedding_fb index_put scatter_add
norm_amax_quantise_e4m3_float16 quantise_rows_e4m3 adam dynamic_softmax""".split()
PROGRAMS = [
    pytest.param(program, marks=() if program.name in OFTEN else pytest.mark.slow, id=program.name)
    for program in (*SMALL, *FNUZ)
]
# A program, and an instruction without which it would not have run what it is here for.
EXPECTED = {
    "scatter_add": "global_atomic_add_f32",
    "sum_all": "v_readlane_b32",
    "float64": "v_fma_f64",
    "swish_f16_fb": "v_cvt_f16_f32",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_matches_eager(program: Behaviour) -> None:
    with interpreted_gfx942() as backend:
        program.check("cpu", BACKEND)
        ran = backend.executed()
        assert all(kernel.executed for kernel in backend.kernels())
    assert program.name not in EXPECTED or EXPECTED[program.name] in ran


def test_infinities_are_eagers() -> None:
    with interpreted_gfx942():
        check_limits(torch.compile(at_the_limits, backend=BACKEND, dynamic=False))


LARGER = Template(POINTERS, 64, 64, 32, 4, 2)
SMALLER = Template(POINTERS, 16, 16, 32, 4, 2)
TEMPLATES = [
    ("mm", PLAIN, "v_mfma_f32_32x32x8_bf16"),
    ("f16", LARGER, "v_mfma_f32_32x32x8_f16"),
    ("f32", PLAIN, "v_mfma_f32_32x32x2_f32"),
    ("gelu", PLAIN, "v_exp_f32"),
    ("gelu", SMALLER, "v_mfma_f32_16x16x16_bf16"),
    ("gelu", SPLIT, "v_mfma_f32_32x32x8_bf16"),
    ("gate and up", SWAPPED, "v_mfma_f32_16x16x16_bf16"),
    ("bmm", PLAIN, "v_mfma_f32_32x32x8_bf16"),
    ("strided", PLAIN, "v_mfma_f32_32x32x8_bf16"),
    ("one row relu", ONE_ROW, "ds_bpermute_b32"),
    ("one row", ONE_ROW_SPLIT, "ds_bpermute_b32"),
]
BY_NAME = {problem.name: problem for problem in PROBLEMS}


def check(problem: Problem, template: Template) -> None:
    results = run(problem, template, device=ARCH)
    eager = problem.fn(*problem.inputs)
    exact = problem.fn(*(x.double() for x in problem.inputs))
    assert_as_good_as_eager(results, [eager], [exact])


@pytest.mark.parametrize(("name", "template", "instruction"), TEMPLATES, ids=str)
def test_templates_match_eager(name: str, template: Template, instruction: str) -> None:
    with interpreted_gfx942() as backend:
        check(BY_NAME[name], template)
        assert instruction in backend.executed()


def test_bytes_are_summed_exactly() -> None:
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((40, 64), (64, 48)))
    with interpreted_gfx942() as backend:
        (got,) = run(Problem("int8", torch._int_mm, (a, b)), PLAIN, device=ARCH)
        assert "v_mfma_i32_32x32x16_i8" in backend.executed()
    assert torch.equal(got, a.int() @ b.int())


# A program, what is wrong with its kernel, in Triton or in assembly, and how that is noticed.
WRONG = [
    ("softmax", "column < 70", "column < 69", AssertionError, "[0-9]"),
    ("softmax", "v_pk_add_f32", "v_pk_mul_f32", AssertionError, "[0-9]"),
    ("sum_columns", "row < 130", "row < 131", BadAddress, "kernel0, .*global_load"),
    ("sum_columns", "tl.store(a1 + (x1)", "tl.store(a1 + (x1 + 1)", BadAddress, "global_store"),
    ("gelu", "last0 = 70", "last0 = 64", AssertionError, "[0-9]"),
    ("gelu", "in_rows & in_columns)", "in_columns)", BadAddress, "outside the arguments"),
]


@pytest.mark.parametrize(("name", "right", "wrong", "error", "told"), WRONG)
def test_a_wrong_kernel_is_caught(
    name: str, right: str, wrong: str, error: type[Exception], told: str
) -> None:
    seen: list[bool] = []

    def alter(text: str) -> str:
        seen.append(right in text)
        return text.replace(right, wrong)

    rows: dict[str, Callable[[], Any]] = {
        **{row.name: lambda row=row: row.check("cpu", BACKEND) for row in SMALL},  # type: ignore[misc]
        "gelu": lambda: check(BY_NAME["gelu"], PLAIN),
    }
    with interpreted_gfx942(alter), pytest.raises(error, match=told):
        rows[name]()
    assert any(seen), "nothing was altered"


def test_an_assertion_of_a_kernel_is_reported() -> None:
    function = torch.compile(F.embedding, backend=BACKEND, dynamic=False)
    with interpreted_gfx942(), pytest.raises(KernelFailed, match="assertion"):
        function(torch.tensor([1, 50]), bf16(50, 24))
