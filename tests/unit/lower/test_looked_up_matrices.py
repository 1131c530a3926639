"""Batches of matmuls with one vector each, of matrices that are looked up: no copy of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import perfuse
from tests.harness.compare import assert_as_good_as_eager


def by_columns(rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    return torch.bmm(weights[chosen], rows.unsqueeze(-1)).squeeze(-1)


def by_rows(rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    return torch.bmm(rows.unsqueeze(1), weights[chosen].transpose(1, 2)).squeeze(1)


def transposed(rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    matrices = weights.transpose(1, 2).contiguous()[chosen]
    return torch.bmm(rows.unsqueeze(1), matrices).squeeze(1)


FORMS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function for function in (by_columns, by_rows, transposed)
}


def gradients(
    function: Callable[..., Tensor], rows: Tensor, weights: Tensor, chosen: Tensor
) -> list[Tensor]:
    given = [rows.clone().requires_grad_(), weights.clone().requires_grad_()]
    result = function(*given, chosen)
    return [result.detach(), *torch.autograd.grad(result.square().sum(), given)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_results_and_gradients(form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, weights = torch.randn(40, 21, dtype=dtype), torch.randn(4, 35, 21, dtype=dtype)
    chosen = torch.randint(0, 3, (40,))  # nobody chooses the last one
    function = FORMS[form]
    compiled = torch.compile(function, backend="perfuse", options={"verify": "memory"})
    eager = gradients(function, rows, weights, chosen)
    exact = gradients(function, rows.double(), weights.double(), chosen)
    found = gradients(compiled, rows, weights, chosen)
    for got, want, wide in zip(found, eager, exact, strict=True):
        assert_as_good_as_eager(got, want, wide)


def test_dynamic_numbers_of_rows() -> None:
    compiled = torch.compile(by_columns, backend="perfuse", dynamic=True)
    weights = torch.randn(4, 35, 21)
    for count in (5, 64):
        rows, chosen = torch.randn(count, 21), torch.randint(0, 4, (count,))
        expected = by_columns(rows, weights, chosen)
        exact = by_columns(rows.double(), weights.double(), chosen)
        assert_as_good_as_eager(compiled(rows, weights, chosen), expected, exact)


def test_a_place_out_of_range_is_an_error() -> None:
    compiled = torch.compile(by_columns, backend="perfuse")
    with pytest.raises(IndexError):
        compiled(torch.randn(3, 21), torch.randn(4, 35, 21), torch.tensor([0, 4, 1]))


def test_matrices_are_neither_copied_nor_saved() -> None:
    rows = torch.randn(64, 32, requires_grad=True)
    weights = torch.randn(2, 48, 32, requires_grad=True)
    report = perfuse.explain(by_columns, rows, weights, torch.randint(0, 2, (64,)))
    plan = "\n".join(str(report.stage(name)) for name in ("program", "plan"))
    assert "aten.bmm" not in plan
    assert "[64, 48, 32]" not in plan


def test_matrices_in_memory_are_left_to_the_library() -> None:
    report = perfuse.explain(torch.bmm, torch.randn(8, 16, 24), torch.randn(8, 24, 1))
    assert "aten.bmm" in str(report.stage("plan"))
