"""Scaled matmuls of eight-bit floats on the device: max-autotune against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import perfuse
from tests.harness.compare import assert_as_good_as_eager

pytestmark = pytest.mark.usefixtures("own_cache")


def scaled(is_fast: bool) -> Callable[..., Tensor]:
    def fn(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor) -> Tensor:
        out = bias.dtype
        made = torch._scaled_mm(x, w.t(), of_x, of_w, bias, out_dtype=out, use_fast_accum=is_fast)
        return F.relu(made)

    return fn


@pytest.mark.parametrize("is_fast", [False, True], ids=["full", "fast"])
@pytest.mark.parametrize("of_rows", [False, True], ids=["tensor", "row"])
@pytest.mark.parametrize("rows", [16, 1024])
def test_max_autotune(device: str, rows: int, of_rows: bool, is_fast: bool) -> None:
    if device != "cuda" or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 matmuls are those of newer GPUs")
    x, w = (torch.randn(n, 2048, device=device).to(torch.float8_e4m3fn) for n in (rows, 1536))
    shapes = ((rows, 1), (1, 1536)) if of_rows else ((), ())
    of_x, of_w = (torch.rand(shape, device=device) + 0.5 for shape in shapes)
    bias = torch.randn(1536, device=device).bfloat16()
    fn, given = scaled(is_fast), (x, w, of_x, of_w, bias)
    with perfuse.config.patch(max_autotune=True):
        got = torch.compile(fn, backend="perfuse")(*given)
    exact = ((x.double() @ w.double().t()) * of_x.double() * of_w.double() + bias.double()).relu()
    assert_as_good_as_eager(got, fn(*given), exact)
