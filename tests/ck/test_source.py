"""Generated sources: golden texts, and the same texts compiled against the stand-in and run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from perfuse.codegen.ck.instance import Instance, preselected_instances, shipped_instances
from perfuse.codegen.ck.legality import CK_RULES, Case, refusal
from perfuse.codegen.ck.problem import CkOperand
from perfuse.codegen.ck.source import CkEpilogue, ck_source, size_table
from perfuse.codegen.host.tables import HostCallRow
from perfuse.errors import PerfuseError
from perfuse.runtime.host_library import HostLibrary
from tests.ck.stand_in import PLAIN, library_of, problem, run

GOLDEN = Path(__file__).parent / "golden"


def first(a: str, b: str, c: str, layouts: str = "RC", *, is_batched: bool = False) -> Instance:
    """A padded instance of these types that takes small sizes."""
    return next(
        i
        for i in shipped_instances(is_batched=is_batched)
        if (i.a_dtype, i.b_dtype, i.c_dtype) == (a, b, c)
        and i.a_layout[0] + i.b_layout[0] == layouts
        and (i.padded, i.pipeline) == ("MNK", "v1" if not is_batched else i.pipeline)
    )


F16 = first("F16", "F16", "F16")
BF16 = first("BF16", "BF16", "BF16", "CR")
F8 = first("F8", "F8", "BF16")
BATCHED = first("BF16", "BF16", "BF16", is_batched=True)
BIAS = CkEpilogue("F16", 8, has_alpha=True)
SCALED = CkEpilogue(is_scaled=True)

SOURCES = {
    "plain": ck_source(F16, PLAIN, is_batched=False),
    "bias": ck_source(F16, BIAS, is_batched=False),
    "scaled_f8": ck_source(F8, SCALED, is_batched=False),
    "batched": ck_source(BATCHED, PLAIN, is_batched=True),
}


@pytest.mark.parametrize("name", SOURCES)
def test_golden(name: str) -> None:
    assert SOURCES[name] == (GOLDEN / f"{name}.cpp").read_text()


def test_only_used_names_are_spelled() -> None:
    assert "f8_t" not in SOURCES["plain"] and "bhalf_t" not in SOURCES["plain"]
    assert "Col" not in ck_source(first("F16", "F16", "F16", "RR"), PLAIN, is_batched=False)
    assert "f8_t" in SOURCES["scaled_f8"] and "F8>;  // pipeline" in SOURCES["scaled_f8"]


def assert_close(got: torch.Tensor, exact: torch.Tensor) -> None:
    """As exact as one rounding of the result, and sums in float32."""
    bound = 2 * torch.finfo(got.dtype).eps * exact.abs().max()
    assert float((got.double() - exact).abs().max()) <= float(bound)


def test_real_strides() -> None:
    """A is part of a wider matrix, C has gaps between its rows, which stay as they are."""
    a, b = torch.randn(48, 136).half()[:, :64], torch.randn(64, 64).half().t()
    memory = torch.full((48, 96), 7.0).half()
    of = replace(problem(48, 64, 64), a=CkOperand("Row", "F16", 136), c=CkOperand("Row", "F16", 96))
    run(library_of(F16), (a, b, memory), size_table(of))
    assert_close(memory[:, :64], a.double() @ b.double())
    assert bool((memory[:, 64:] == 7).all())


def test_bias_and_factors() -> None:
    a, b, bias = torch.randn(32, 64).half(), torch.randn(64, 64).half().t(), torch.randn(64).half()
    out = torch.empty(32, 64).half()
    of = replace(problem(32, 64, 64), d=CkOperand("Row", "F16", 0))
    run(library_of(F16, BIAS), (a, b, bias, out), size_table(of), (2.0, 0.5))
    assert_close(out, 2 * (a.double() @ b.double()) + 0.5 * bias.double())


def test_scaled_f8() -> None:
    """Each operand has one scale, which is read where the result is computed."""
    kind = torch.float8_e4m3fnuz
    a, b = torch.randn(32, 128).to(kind), torch.randn(64, 128).to(kind).t()
    scales = torch.tensor([0.5]), torch.tensor([3.0])
    out = torch.empty(32, 64, dtype=torch.bfloat16)
    of = replace(problem(32, 64, 128, dtype="F8"), c=CkOperand("Row", "BF16", 64))
    run(library_of(F8, SCALED), (a, b, *scales, out), size_table(of))
    assert_close(out, 1.5 * (a.double() @ b.double()))


@pytest.mark.parametrize("kind", ["bf16", "f32"])
def test_types_of_results(kind: str) -> None:
    """bfloat16 with both operands transposed; float32 as a result of float16."""
    if kind == "bf16":
        a, b = torch.randn(128, 64).bfloat16().t(), torch.randn(128, 64).bfloat16()
        instance, of = BF16, problem(64, 64, 128, "CRR", "BF16")
        out = torch.empty(64, 64, dtype=torch.bfloat16)
    else:
        a, b = torch.randn(64, 64).half(), torch.randn(64, 64).half().t()
        instance, out = replace(F16, c_dtype="F32", shuffle_dtype="F32"), torch.empty(64, 64)
        instance = replace(instance, a_compute_dtype="F16")
        of = replace(problem(64, 64, 64), c=CkOperand("Row", "F32", 64))
    run(library_of(instance), (a, b, out), size_table(of))
    assert_close(out, a.double() @ b.double())


def test_real_strides_of_a_batch() -> None:
    """Matrices that share memory with others: their distance is not that of contiguous ones."""
    a = torch.randn(3, 2, 32, 512).bfloat16()[:, 1]
    b = torch.randn(3, 64, 512).bfloat16().transpose(1, 2)
    out = torch.full((3, 40, 64), 7.0, dtype=torch.bfloat16)
    operands = (
        CkOperand("Row", "BF16", 512, 2 * 32 * 512),
        CkOperand("Col", "BF16", 512, 64 * 512),
    )
    of = replace(problem(32, 64, 512, dtype="BF16"), a=operands[0], b=operands[1], batch=3)
    of = replace(of, c=CkOperand("Row", "BF16", 64, 40 * 64))
    run(library_of(BATCHED, is_batched=True), (a, b, out), size_table(of))
    assert_close(out[:, :32], a.double() @ b.double())
    assert bool((out[:, 32:] == 7).all())


def test_why_a_split_is_never_used_with_a_bias() -> None:
    """The traps that legality excludes, seen in the stand-in as they are in CK."""
    a, b, bias = torch.randn(32, 256).half(), torch.randn(64, 256).half().t(), torch.ones(64).half()
    of = replace(problem(32, 64, 256), d=CkOperand("Row", "F16", 0))
    assert refusal(Case(F16, of, "gfx942", 2))
    out = torch.empty(32, 64).half()
    run(library_of(F16, BIAS), (a, b, bias, out), size_table(of, 2))
    extra = (out.double() - a.double() @ b.double()).mean()
    assert abs(float(extra) - 2) < 0.1  # the bias of ones is added twice


def test_the_stand_in_refuses_what_ck_refuses() -> None:
    """Our rules for CK against the check in the compiled launcher, over many sizes."""
    instance = preselected_instances()[1]  # pipeline v3, padded
    library = library_of(instance)
    for k in range(8, 520, 24):
        for n in (64, 100, 256):
            for k_batch in (1, 2, 3):
                of = problem(64, n, k)
                verdict = refusal(Case(instance, of, "gfx942", k_batch), CK_RULES)
                assert is_supported(library, size_table(of, k_batch)) == (not verdict), (
                    of,
                    verdict,
                )


def is_supported(library: HostLibrary, sizes: tuple[int, ...]) -> bool:
    try:
        return library.workspace_bytes(HostCallRow("ck0", (), (), sizes, (1.0, 1.0))) >= 0
    except PerfuseError:
        return False
