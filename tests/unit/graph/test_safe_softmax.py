"""Softmax in which rows that see nothing are 0, as attention's own is."""

from __future__ import annotations

import pytest
import torch

from perfuse.graph.decompose_softmax import safe_softmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, -1])
def test_it_is_eagers(dtype: torch.dtype, dim: int) -> None:
    x = torch.randn(4, 5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[:, 2] = -torch.inf
    x[1] = -torch.inf
    x[0, 0, 3] = torch.nan
    eager = torch.ops.aten._safe_softmax(x, dim)
    torch.testing.assert_close(safe_softmax(x, dim), eager, equal_nan=True)


def test_of_nothing() -> None:
    assert safe_softmax(torch.empty(3, 0), -1).shape == (3, 0)
