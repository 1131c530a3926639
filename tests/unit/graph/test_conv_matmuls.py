"""Convolutions of one point become matmuls: where they do, and that nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse.autotune.sites import sites_of
from perfuse.context import Context
from perfuse.graph.conv_matmuls import conv_matmuls
from tests.harness.compare import assert_as_good_as_eager
from tests.triton.contractions import context_for
from tests.unit.graph.tracing import calls, traced
from tests.unit.planning import plan_of

LAST = torch.channels_last


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    return made.to(dtype).contiguous(memory_format=LAST)


def selecting(backends: str = "ATEN,TRITON", name: str = "sm_90") -> Context:
    context = context_for(name)
    changes = {"max_autotune": True, "max_autotune_gemm_backends": backends}
    return replace(context, settings=context.settings.with_overrides(changes))


X, W = values(4, 3, 8, 8), values(16, 3, 1, 1)
BIAS = torch.linspace(-1, 1, 16).bfloat16()


@pytest.mark.parametrize("bias", [None, BIAS], ids=["plain", "bias"])
def test_a_convolution_of_one_point_is_a_matmul(bias: Tensor | None) -> None:
    given = (X, W) if bias is None else (X, W, bias)
    module = traced(F.conv2d, *given)
    made = conv_matmuls(module, selecting())
    names = [call.partition("(")[0] for call in calls(made)]
    assert "convolution" not in names and ("mm" if bias is None else "addmm") in names
    (got,), expected = [made(*given)], F.conv2d(*given)
    assert got.stride() == expected.stride()
    wide = F.conv2d(*(t.double() for t in given))
    assert_as_good_as_eager(got, expected, wide)


OTHERS: dict[str, Any] = {
    "three points": (X, values(16, 3, 3, 3), {}),
    "strided": (X, W, {"stride": 2}),
    "padded": (X, W, {"padding": 1}),
    "grouped": (values(4, 16, 8, 8), values(16, 1, 1, 1), {"groups": 16}),
    "channels first": (X.contiguous(), W.contiguous(), {}),
    "float32": (X.float(), W.float(), {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_convolutions_stay(name: str) -> None:
    x, w, how = OTHERS[name]
    module = traced(lambda x, w: F.conv2d(x, w, **how), x, w)
    assert calls(conv_matmuls(module, selecting())) == calls(module)


def test_float32_is_a_matmul_where_the_library_is_not_selected() -> None:
    module = traced(F.conv2d, X.float(), W.float())
    assert any("mm(" in call for call in calls(conv_matmuls(module, selecting("TRITON"))))


def test_only_where_matmuls_are_selected_on_a_gpu() -> None:
    module = traced(F.conv2d, X, W)
    assert conv_matmuls(module, context_for("sm_90")) is module
    assert conv_matmuls(module, Context.default()) is module


def test_templates_compete_for_it_with_what_follows() -> None:
    x, w = values(4, 32, 16, 16), values(64, 32, 1, 1)
    plan = plan_of(traced(lambda x, w: F.relu(F.conv2d(x, w)), x, w), selecting())
    (site,) = sites_of(plan)
    assert site.fused is not None and len(plan.steps) == 2
