"""Matmuls of groups of rows: transformers' op for the experts of a mixture."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import perfuse
from perfuse.autotune import known_groups
from perfuse.context import Context
from perfuse.testing import fresh_cache
from tests.harness.compare import assert_as_good_as_eager

pytest.importorskip("transformers.integrations.moe")

CASES = {
    "all rows": (6, [2, 4, 6]),
    "empty groups": (6, [0, 6, 6]),
    "rows behind the last group": (7, [1, 3, 5]),
    "no group": (4, [0, 0, 0]),
    "no rows": (0, [0, 0, 0]),
    "few and many rows": (90, [13, 14, 90]),
    "many rows in one group": (200, [0, 200, 200]),
}


@pytest.fixture(params=["library", "kernel"])
def computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """By calls for each group, or by the kernel that is known to win on some CPUs."""
    is_kernel = request.param == "kernel"
    monkeypatch.setattr(known_groups, "is_amd_avx512", lambda target: is_kernel)
    monkeypatch.setattr(known_groups, "is_intel_with_pairs", lambda target: False)
    with fresh_cache():  # whose keys do not say which CPU this seems to be
        yield str(request.param)


def experts(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    matrices = weights.transpose(-2, -1)
    hidden = torch.ops.transformers.grouped_mm_fallback(rows * 2, matrices, offs=offsets)
    back = torch.ops.transformers.grouped_mm_fallback(hidden.sin(), weights, offs=offsets)
    return back + rows


def gradients(
    function: Callable[..., Tensor], rows: Tensor, weights: Tensor, offsets: Tensor
) -> list[Tensor]:
    given = [rows.clone().requires_grad_(), weights.clone().requires_grad_()]
    result = function(*given, offsets)
    return [result.detach(), *torch.autograd.grad(result.square().sum(), given)]


def check(compiled: Callable[..., Tensor], num_rows: int, ends: list[int], seed: int = 0) -> None:
    """The result and the gradients are as good as eager's, and stored as eager stores them."""
    torch.manual_seed(seed)
    rows, weights = torch.randn(num_rows, 37), torch.randn(3, 50, 37)
    offsets = torch.tensor(ends, dtype=torch.int32)
    eager = gradients(experts, rows, weights, offsets)
    exact = gradients(experts, rows.double(), weights.double(), offsets)
    for _ in range(2):  # the second call finds the memory of the first
        found = gradients(compiled, rows, weights, offsets)
        for got, want, wide in zip(found, eager, exact, strict=True):
            assert_as_good_as_eager(got, want, wide)
            assert got.stride() == want.stride()


@pytest.mark.parametrize("name", CASES)
def test_rows_and_matrices_of_groups(name: str, computed_by: str) -> None:
    options = {"verify": "memory"}
    check(torch.compile(experts, backend="perfuse", options=options), *CASES[name])


def test_dynamic_numbers_of_rows(computed_by: str) -> None:
    compiled = torch.compile(experts, backend="perfuse", dynamic=True)
    for seed, (num_rows, ends) in enumerate(
        ((9, [3, 5, 9]), (40, [0, 40, 40]), (77, [20, 60, 77]))
    ):
        check(compiled, num_rows, ends, seed)


def test_groups_that_overlap_are_computed_in_order(computed_by: str) -> None:
    check(torch.compile(experts, backend="perfuse"), 40, [30, 10, 40])


def test_results_are_written_into_memory_of_the_program(computed_by: str) -> None:
    rows, weights = torch.randn(6, 5), torch.randn(3, 8, 5)
    report = perfuse.explain(experts, rows, weights, torch.tensor([2, 4, 6]))
    host = str(report.stage("host"))
    num_calls = 0 if computed_by == "kernel" else 2
    assert host.count("op_perfuse_grouped_matmul_out(") == num_calls
    assert "op_transformers" not in host


def multiplied(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    return torch._grouped_mm(rows.sin(), weights.transpose(-2, -1), offs=offsets) * 2


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("no rows", "no group")])
def test_atens_op_of_bfloat16(name: str, computed_by: str) -> None:
    """Result and gradients; rows of no group are not defined in eager."""
    has_pairs = Context.default().target.has_bf16_pairs
    if computed_by == "kernel" and not has_pairs:
        pytest.skip("this CPU does not multiply pairs of bfloat16")
    num_rows, ends = CASES[name]
    rows, weights = torch.randn(num_rows, 40).bfloat16(), torch.randn(3, 48, 40).bfloat16()
    offsets = torch.tensor(ends, dtype=torch.int32)
    call = torch.compile(multiplied, backend="perfuse", options={"verify": "memory"})
    per_row = torch.repeat_interleave(offsets.diff(prepend=offsets.new_zeros(1)))
    own = weights[per_row].double()
    exact = torch.einsum("rk,rnk->rn", rows[: ends[-1]].double().sin(), own) * 2
    for _ in range(2):
        with torch.no_grad():
            got, eager = (f(rows, weights, offsets)[: ends[-1]] for f in (call, multiplied))
        assert_as_good_as_eager(got, eager, exact)


def test_atens_op_becomes_one_kernel(computed_by: str) -> None:
    if not Context.default().target.has_bf16_pairs:
        pytest.skip("this CPU does not multiply pairs of bfloat16")
    given = (torch.randn(9, 40).bfloat16(), torch.randn(3, 48, 40).bfloat16())
    plan = perfuse.explain(multiplied, *given, torch.tensor([3, 3, 9], dtype=torch.int32))
    assert ("aten._grouped_mm" in str(plan.stage("plan"))) == (computed_by == "library")


def test_atens_op_in_training(computed_by: str) -> None:
    torch.manual_seed(0)
    rows, weights = torch.randn(24, 40).bfloat16(), torch.randn(3, 48, 40).bfloat16()
    offsets = torch.tensor([5, 5, 24], dtype=torch.int32)
    call = torch.compile(multiplied, backend="perfuse")
    got, eager = (gradients(f, rows, weights, offsets) for f in (call, multiplied))
    for mine, theirs in zip(got, eager, strict=True):
        # Sums of bfloat16 in another order: each rounding moves a value by half a unit.
        gap = (mine - theirs).float().norm() / theirs.float().norm()
        assert mine.stride() == theirs.stride() and float(gap) <= torch.finfo(torch.bfloat16).eps
