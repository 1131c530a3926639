"""Matmuls of groups of rows: transformers' op for the experts of a mixture."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import perfuse

pytest.importorskip("transformers.integrations.moe")

CASES = {
    "all rows": (6, [2, 4, 6]),
    "empty groups": (6, [0, 6, 6]),
    "rows behind the last group": (7, [1, 3, 5]),
    "no group": (4, [0, 0, 0]),
}


def experts(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    matrices = weights.transpose(-2, -1)
    hidden = torch.ops.transformers.grouped_mm_fallback(rows * 2, matrices, offs=offsets)
    back = torch.ops.transformers.grouped_mm_fallback(hidden.sin(), weights, offs=offsets)
    return back + rows


def gradients(function, rows: Tensor, weights: Tensor, offsets: Tensor) -> list[Tensor]:
    given = [rows.clone().requires_grad_(), weights.clone().requires_grad_()]
    result = function(*given, offsets)
    return [result.detach(), *torch.autograd.grad(result.square().sum(), given)]


@pytest.mark.parametrize("name", CASES)
def test_rows_and_matrices_of_groups(name: str) -> None:
    num_rows, ends = CASES[name]
    torch.manual_seed(0)
    rows, weights = torch.randn(num_rows, 5), torch.randn(3, 8, 5)
    offsets = torch.tensor(ends, dtype=torch.int32)
    compiled = torch.compile(experts, backend="perfuse")
    expected = gradients(experts, rows, weights, offsets)
    for _ in range(2):  # the second call finds the memory of the first
        found = gradients(compiled, rows, weights, offsets)
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want)
            assert got.stride() == want.stride()


def test_results_are_written_into_memory_of_the_program() -> None:
    rows, weights = torch.randn(6, 5), torch.randn(3, 8, 5)
    report = perfuse.explain(experts, rows, weights, torch.tensor([2, 4, 6]))
    host = str(report.stage("host"))
    assert host.count("op_perfuse_grouped_matmul_out(") == 2
    assert "op_transformers" not in host
