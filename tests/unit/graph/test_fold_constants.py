"""Constants of a GPU program that the CPU would compute in every call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from perfuse.graph import fold_constants
from perfuse.graph.dead_code import eliminate_dead_code
from tests.unit.graph.tracing import assert_same_values, calls, traced


def buckets(x: Tensor) -> Tensor:
    distance = (torch.arange(64)[:, None] - torch.arange(64)).abs()
    far = (torch.log1p(distance.float()) * 4).clamp(max=9)
    return x + far.to(torch.int32)


def test_what_is_moved_becomes_an_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cast stands for the copy to a GPU, which is not here."""
    module, x = traced(buckets, torch.ones(64, 64)), torch.randn(64, 64)
    stays = calls(fold_constants.fold_constants(module))  # too large to keep on a CPU
    assert any(call.startswith("log1p(") for call in stays)

    def is_cast_to_int(node: Node) -> bool:
        return node.kwargs.get("dtype") == torch.int32

    monkeypatch.setattr(fold_constants, "_is_moving", is_cast_to_int)
    folded = eliminate_dead_code(fold_constants.fold_constants(module))
    assert [call.split("(")[0] for call in calls(folded)] == ["add"]
    assert_same_values(module, folded, x)
