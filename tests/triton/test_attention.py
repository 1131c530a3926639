"""FlexAttention as kernels: values in Triton's interpreter against float64, and code for GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import perfuse
from perfuse import graph_cache
from perfuse.autotune.sites import sites_of
from perfuse.schedule.plan import Plan
from perfuse.testing import fresh_cache
from tests.harness.attention import PER_PROGRAM, attends, check, operands
from tests.harness.attention_functions import ALL, BATCH, BLOCK, HEADS, LENGTH, NAMED, Functions
from tests.harness.compare import assert_as_good_as_eager

CAUSAL: Any = NAMED["causal"].mask
ALIBI, BY_DISTANCE = NAMED["alibi"].score, NAMED["by_distance"].score


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # PyTorch refuses gradients of FlexAttention on a CPU, where the interpreter runs.
    monkeypatch.setattr(flex, "_validate_device", lambda *operands: None)
    torch._dynamo.reset()
    with fresh_cache(), perfuse.config.patch({"gpu.interpret": True, "verify": True}):
        yield


@pytest.mark.parametrize("first", range(0, len(ALL), PER_PROGRAM))
def test_functions_of_scores(first: int) -> None:
    """Several in one program, which is traced and loaded once."""
    some = ALL[first : first + PER_PROGRAM]
    parts = [attends(each) for each in some]
    given = operands(batch=BATCH if any(each.varies_by_batch for each in some) else 1)
    check(lambda q, k, v: [attend(q, k, v) for attend in parts], given, has_grad=False)


@pytest.mark.parametrize("name", ["relative_table", "soft_cap_causal"])
def test_gradients(name: str) -> None:
    attend = attends(NAMED[name])
    check(lambda q, k, v: [attend(q, k, v)], operands(batch=1), has_grad=True)


@pytest.mark.parametrize(
    ("sizes", "dtype"), [((24, 40), torch.bfloat16), ((64, 16), torch.float16)], ids=str
)
def test_odd_sizes_and_shared_heads(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """Lengths that no block divides, heads that are no power of two, four heads on two."""
    lengths = 41, 53
    window = Functions("window", None, lambda b, h, q, k: (q + 12 >= k) & (q - k < 20))
    attend = partial(attends(window, lengths), enable_gqa=True, return_lse=True)
    given = operands(heads=(4, 2), lengths=lengths, sizes=sizes, batch=1, dtype=dtype)
    check(attend, given, has_grad=dtype is torch.bfloat16)


def test_dynamic_lengths() -> None:
    attend = lambda q, k, v: [flex_attention(q, k, v, score_mod=BY_DISTANCE)]  # noqa: E731
    run = torch.compile(attend, backend="perfuse", dynamic=True)
    for length in (40, 57):
        given = operands(lengths=(length, length))
        got, exact = run(*given)[0], attend(*(x.double() for x in given))[0]
        assert_as_good_as_eager(got, attend(*given)[0], exact)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=str)
def test_few_queries_share_the_keys(heads: tuple[int, int]) -> None:
    far = Functions("far", None, lambda b, h, q, k: (k < 200) & ((k >= 64) | (q == 0)))
    attend = partial(attends(far, (3, 256)), enable_gqa=True, return_lse=True)
    check(attend, operands(heads=heads, lengths=(3, 256), batch=1), has_grad=False)


def test_gradients_of_captured_tensors() -> None:
    """One element for a head, one for a distance; what several scores add is summed."""

    def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, table: Tensor) -> list[Any]:
        score = lambda s, b, h, i, j: s + (i - j) * 0.1 * slopes[h] + table[h, i - j + LENGTH]  # noqa: E731
        return [flex_attention(q, k, v, score_mod=score, block_mask=blocks)]

    blocks = create_block_mask(
        lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK
    )
    generator = torch.Generator().manual_seed(7)
    shapes = ((HEADS,), (HEADS, 2 * LENGTH))
    captured = [torch.randn(shape, generator=generator) for shape in shapes]
    check(attend, [*operands(batch=1), *captured], has_grad=True)


def test_transposed_operands() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> list[Any]:
        return [flex_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)]

    given = [x.transpose(1, 2).contiguous() for x in operands(batch=1)]
    check(attend, given, has_grad=False)


# -- code ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "head"), [("cuda:90", 64), ("hip:gfx942", 16)])
def test_one_kernel_each_way(target: str, head: int) -> None:
    """A kernel forward; backward the sum of a row, the gradient of queries, that of the rest."""
    length = 4 * head
    shapes = {"lengths": (length, length), "sizes": (head, head)}
    half = [x.bfloat16().requires_grad_() for x in operands(**shapes)]  # type: ignore[arg-type]
    blocks = create_block_mask(CAUSAL, None, None, length, length, "cpu", BLOCK_SIZE=2 * head)
    with perfuse.config.patch({"gpu.interpret": False}):
        made = perfuse.codegen_for(
            partial(flex_attention, score_mod=ALIBI, block_mask=blocks), half, target=target
        )
    counts = {graph.kind: len(graph.objects) for graph in made.graphs}
    assert counts == {"forward": 1, "backward": 3}
    assert target != "cuda:90" or all(kernel.stack_bytes == 0 for kernel in made.objects)


def test_what_no_kernel_computes_is_reported() -> None:
    """Doubles run as PyTorch's own attention, and a report says why."""
    given = [x.double() for x in operands()]
    report = perfuse.explain(lambda q, k, v: flex_attention(q, k, v), *given)
    (reason,) = [call.reason for graph in report.graphs for call in graph.calls]
    assert reason == "attention of mixed dtypes, or other than float16, bfloat16, float32"


def test_attention_is_no_epilogue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A projection that attention reads is a site of its own for templates."""
    plans: list[Plan] = []
    compile_graph = graph_cache.compile_graph

    def keep(*args: Any, **kwargs: Any) -> Any:
        made = compile_graph(*args, **kwargs)
        plans.append(made.plan)
        return made

    def project(x: Tensor, weight: Tensor) -> Any:
        q = (x @ weight).view(1, 1, LENGTH, 64)
        return flex_attention(q, q, q)

    monkeypatch.setattr(graph_cache, "compile_graph", keep)
    wide = [torch.randn(LENGTH, 64), torch.randn(64, 64)]
    with perfuse.config.patch({"thresholds.gpu_loop_matmul_work": 0}):
        torch.compile(project, backend="perfuse")(*wide)
    (site,) = sites_of(plans[0])
    assert site.fused is None and len(site.alone) == 1
