"""FlexAttention on the GPU: results, gradients and memory, and that generated kernels run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from perfuse.counters import counters
from tests.harness.compare import norm_complaints

LENGTH = 1000
SIZES = [(64, torch.bfloat16), (128, torch.float16), (80, torch.bfloat16), (256, torch.bfloat16)]
SIZES += [(64, torch.float32)]


def by_distance(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.tanh(score / 10) * 10 - (q - k).abs() * 0.01 * (h + 1)


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < 300)


def results(run: Callable[..., Any], given: list[Tensor]) -> list[Tensor]:
    own = [x.detach().requires_grad_() for x in given]
    out = run(*own)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), own)]


@pytest.mark.parametrize(("head", "dtype"), SIZES, ids=str)
@pytest.mark.parametrize("length", [1024, LENGTH])
def test_a_training_step(head: int, dtype: torch.dtype, length: int, device: str) -> None:
    torch._dynamo.reset()
    blocks = create_block_mask(window, None, None, length, length, device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=by_distance, block_mask=blocks, enable_gqa=True)

    shapes = [(2, heads, length, head) for heads in (4, 2, 2)]
    given = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
    before = counters.snapshot()
    got = results(torch.compile(attend, backend="perfuse"), given)
    names = [n for n, count in counters.snapshot().items() if count != before.get(n, 0)]
    assert not [n for n in names if n.startswith("fallback.flex_attention")]
    eager = results(attend, given)
    exact = results(attend, [x.double() for x in given])
    assert not norm_complaints(got, eager, exact)


@pytest.mark.parametrize("length", [5000, 8192])
def test_decoding(length: int, device: str) -> None:
    torch._dynamo.reset()
    attend = lambda q, k, v: flex_attention(q, k, v, enable_gqa=True)  # noqa: E731
    shapes = [(1, 32, 1, 128), (1, 8, length, 128), (1, 8, length, 128)]
    given = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
    got = torch.compile(attend, backend="perfuse")(*given)
    exact = attend(*(x.double() for x in given))
    assert not norm_complaints([got], [attend(*given)], [exact])


def test_memory_is_linear_in_the_length(device: str) -> None:
    torch._dynamo.reset()
    given = [torch.randn(1, 8, 8192, 64, device=device, dtype=torch.bfloat16) for _ in range(3)]
    run = torch.compile(lambda q, k, v: flex_attention(q, k, v), backend="perfuse")
    run(*given)
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    run(*given)
    assert torch.cuda.max_memory_allocated() - start < 2 * given[0].nbytes
