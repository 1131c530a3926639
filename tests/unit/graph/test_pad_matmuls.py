"""Products with unaligned rows are padded, and give what they gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from perfuse.config import ThresholdSettings
from perfuse.context import Context
from perfuse.gpu import KNOWN
from perfuse.graph.pad_matmuls import PaddingConditions, pad_matmuls, padded
from perfuse.torch_compat.graphs import tree_leaves
from tests.unit.graph.tracing import calls, traced

HALF = torch.bfloat16


def machine(thresholds: ThresholdSettings | None = None) -> PaddingConditions:
    """An H200 whose tensors are on the CPU."""
    return PaddingConditions(KNOWN["sm_90"], thresholds or ThresholdSettings(), device="cpu")


def values(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def turned(x: Tensor, y: Tensor) -> Tensor:
    return x @ y.t()


def summed(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.t()).exp().sum(1)


def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    product = x @ y.t()
    return product.view(2, -1, product.shape[1]), product.sum(1)


def down(x: Tensor, y: Tensor) -> Tensor:
    return x.t() @ y


def plain(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


def biased(x: Tensor, y: Tensor) -> Tensor:
    return torch.addmm(y[0], x, y)


def biased_turned(x: Tensor, y: Tensor) -> Tensor:
    return torch.addmm(y[:, 0], x, y.t())


def down_turned(x: Tensor, y: Tensor) -> Tensor:
    return x.t() @ y.t()


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, Tensor], bool]] = {
    "odd columns": (plain, (values(2048, 512), values(512, 1025)), True),
    "odd columns of the result alone": (turned, (values(2048, 512), values(1025, 512)), True),
    "the same, read by a loop": (summed, (values(2048, 512), values(1025, 512)), True),
    "the same, returned as well": (both, (values(2048, 512), values(1025, 512)), True),
    "odd depth": (plain, (values(2048, 513), values(513, 1024)), True),
    "odd depth, both run along it": (turned, (values(2048, 513), values(1024, 513)), True),
    "odd rows of a transposed operand": (down, (values(1025, 2049), values(1025, 512)), True),
    "odd columns with a bias": (biased, (values(2048, 512), values(512, 1025)), True),
    "too shallow for a copy": (turned, (values(8192, 16), values(8193, 16)), False),
    "all even": (plain, (values(2048, 512), values(512, 1024)), False),
    "odd rows of a plain operand": (plain, (values(2049, 512), values(512, 1024)), False),
    "small": (plain, (values(64, 63), values(63, 65)), False),
    "float32": (plain, (values(2048, 512).float(), values(512, 1025).float()), False),
}


def assert_same_values(after: GraphModule, before: GraphModule, inputs: Sequence[Tensor]) -> None:
    """The graphs are decided for halves and run in float32, which a CPU multiplies much faster."""
    wide = [torch.empty_strided(x.shape, x.stride()).copy_(x) for x in inputs]
    for ours, theirs in zip(tree_leaves(after(*wide)), tree_leaves(before(*wide)), strict=True):
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize("name", CASES)
def test_what_is_padded_and_what_it_gives(name: str) -> None:
    fn, inputs, is_padded = CASES[name]
    before = traced(fn, *inputs)
    after = padded(before, machine())
    assert any(call.startswith("constant_pad_nd(") for call in calls(after)) == is_padded
    assert_same_values(after, before, inputs)


WINDOW = values(2048, 517)[:, :512]

# A result that is kept as it is, and what becomes of it where it counts as large.
LARGE_CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, Tensor], str]] = {
    "kept": (turned, (values(2048, 512), values(1025, 512)), "filled"),
    "kept and read": (both, (values(2048, 512), values(1025, 512)), "filled"),
    "odd depth as well": (turned, (values(2048, 511), values(1027, 511)), "filled and padded"),
    "read by a loop alone": (summed, (values(2048, 512), values(1025, 512)), "padded"),
    "columns that lie side by side": (plain, (values(2048, 512), values(512, 1025)), "padded"),
    "a bias": (biased_turned, (values(2048, 512), values(1025, 512)), "padded"),
    "few columns": (turned, (values(8192, 512), values(257, 512)), "padded"),
    "rows that lie side by side": (down_turned, (values(1024, 1025), values(1025, 1024)), "padded"),
    "a window with unaligned rows": (turned, (WINDOW, values(1025, 512)), "padded"),
    "aligned columns": (turned, (values(2048, 512), values(1024, 512)), ""),
}


@pytest.mark.parametrize("name", LARGE_CASES)
def test_a_large_result_that_is_kept_is_filled(name: str) -> None:
    fn, inputs, wanted = LARGE_CASES[name]
    before = traced(fn, *inputs)
    after = padded(before, machine(ThresholdSettings(filled_matmul_elements=1 << 10)))
    found = calls(after)
    is_filled = any(call.startswith("aligned_matmul(") for call in found)
    is_padded = any(call.startswith("constant_pad_nd(") for call in found)
    kinds = ["filled"] * is_filled + ["padded"] * is_padded
    assert " and ".join(kinds) == wanted
    assert_same_values(after, before, inputs)


def test_small_ones_too_where_nothing_is_too_small() -> None:
    fn, inputs = plain, (values(512, 512), values(512, 65))
    limits = ThresholdSettings(padded_matmul_work=0, filled_matmul_elements=0)
    before = traced(fn, *inputs)
    after = padded(before, machine(limits))
    assert any(call.startswith("constant_pad_nd(") for call in calls(after))
    torch.testing.assert_close(after(*inputs), before(*inputs), rtol=2e-2, atol=2e-1)


def test_small_results_are_padded_and_cut_off() -> None:
    fn, inputs, _ = LARGE_CASES["kept"]
    after = padded(traced(fn, *inputs), machine())
    assert not any(call.startswith("aligned_matmul(") for call in calls(after))


def test_nothing_is_padded_on_a_cpu() -> None:
    fn, inputs, _ = CASES["odd columns"]
    module = traced(fn, *inputs)
    assert pad_matmuls(module, Context.default()) is module


def test_the_gpu_says_whether_padding_pays() -> None:
    fn, inputs, _ = CASES["odd columns"]
    module = traced(fn, *inputs)
    indifferent = replace(KNOWN["sm_90"], unaligned_operand_slowdown=1, unaligned_result_slowdown=1)
    assert padded(module, replace(machine(), gpu=indifferent)) is module
    assert padded(module, machine()) is not module
