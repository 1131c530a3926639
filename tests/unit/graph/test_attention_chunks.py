"""FlexAttention that no kernel computes: some queries at a time, few scores in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from perfuse.graph import attention_chunks

LENGTH = 70


def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
    causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, "cpu")
    score = lambda s, b, h, i, j: s - (i - j) * 0.1  # noqa: E731
    return flex_attention(q, k, v, score_mod=score, block_mask=causal, return_lse=True)


def test_chunks_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    dense = torch.ops.higher_order.flex_attention

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return dense(*args)

    # A kernel computes other dtypes.
    given = [torch.randn(1, LENGTH, 2, 16).double().transpose(1, 2) for _ in range(3)]
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="perfuse")
    expected = attend(*given)
    compiled(*given)
    monkeypatch.setattr(attention_chunks, "SCORE_BYTES", 2 * LENGTH * 4 * 20)
    monkeypatch.setattr(torch.ops.higher_order, "flex_attention", counted)
    out, sums = compiled(*given)
    assert torch.equal(out, expected[0]) and out.stride() == expected[0].stride()
    torch.testing.assert_close(sums, expected[1].float())  # traced as float32
    assert calls == 4
