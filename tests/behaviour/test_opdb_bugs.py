"""Bugs that the operator database found: a minimal row for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse import config, counters
from perfuse.lower.registry import LOWERINGS
from tests.behaviour.row import Behaviour, randn
from tests.harness.backend import compiled


def fold_repeated_element(x: Tensor) -> Tensor:
    return x + torch.tensor(0.5).expand(1)


def positions_across_lanes(x: Tensor, target: Tensor) -> Tensor:
    return F.multilabel_margin_loss(x, target)


def least_integer(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.iinfo(torch.int64).min)


def soft_margin_far_out(x: Tensor) -> Tensor:
    return F.soft_margin_loss(x, torch.ones(3), reduction="sum")


def storage_before_a_window(x: Tensor) -> Tensor:
    return x.as_strided((2, 2), (1, 2), 0)


def sum_of_bools(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.add(x, y, alpha=False), torch.add(x[:1], y, alpha=True)


def labels(*shape: int) -> Tensor:
    return torch.randint(0, shape[-1], shape, generator=torch.Generator().manual_seed(3))


ROWS = [
    Behaviour("call_with_effect", torch.linalg.inv, lambda: [torch.eye(4) + 1]),
    Behaviour("slope_near_one", torch.tanh, lambda: [torch.linspace(7, 9, 64).requires_grad_()]),
    Behaviour("storage_before_a_window", storage_before_a_window, lambda: [torch.arange(10.0)[5:]]),
    Behaviour("least_integer", least_integer, lambda: [torch.arange(-9, 9)]),
    Behaviour(
        "soft_margin_far_out",
        soft_margin_far_out,
        lambda: [torch.tensor([-40.0, 14.0, 15.0], requires_grad=True)],
    ),
    Behaviour("sum_of_bools", sum_of_bools, lambda: [randn(70) > 0, randn(70) < 1]),
    Behaviour("fold_repeated_element", fold_repeated_element, lambda: [randn(3)]),
    Behaviour(
        "positions_across_lanes", positions_across_lanes, lambda: [randn(10, 5), labels(10, 5)]
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_matches_eager(row: Behaviour) -> None:
    row.check()


WINDOWS: list[Any] = [
    lambda x, n: x.chunk(2),
    lambda x, n: x.hsplit(2),
    lambda x, n: (x[:, 1:n], x[:n]),
    lambda x, n: x.as_strided((2, 2), (1, n * n), 4),
]


@pytest.mark.parametrize("function", WINDOWS)
def test_windows_on_inputs_of_any_size(function: Any) -> None:
    """A number may be negative where a size may not; a result that is a window stays one."""
    torch._dynamo.reset()
    for x in (randn(8, 6), randn(12, 10)):
        got = compiled(function, dynamic=True)(x, -2)
        for mine, theirs in zip(got, function(x, -2), strict=True):
            assert torch.equal(mine, theirs)
            assert mine.data_ptr() == theirs.data_ptr()


def test_an_effect_is_kept() -> None:
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="singular"):
        compiled(torch.linalg.inv)(torch.zeros(3, 3))


def broken(builder: Any, *args: Any, **kwargs: Any) -> Any:
    raise TypeError("a bug of ours")


def test_a_broken_lowering_leaves_the_op_to_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOWERINGS, torch.ops.aten.atan.default, broken)
    torch._dynamo.reset()
    x = randn(7)
    with config.patch({"verify": False, "cache.enabled": False}):
        assert torch.equal(compiled(torch.atan)(x), x.atan())
    assert counters.snapshot()["lower.error.aten.atan.default"] >= 1
    torch._dynamo.reset()
    with (
        config.patch({"verify": True, "cache.enabled": False}),
        pytest.raises(Exception, match="a bug of ours"),
    ):
        compiled(torch.atan)(x)
