"""FlexAttention on a CPU as one C++ kernel: values against float64, memory watched."""

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
from perfuse.capture.observe import observing
from perfuse.target import machine_isas
from tests.harness.attention import PER_PROGRAM, attends, check, operands, results
from tests.harness.attention_functions import ALL, BATCH, HEADS, LENGTH, NAMED, Functions
from tests.harness.compare import assert_as_good_as_eager

ISAS = [isa for isa in ("avx512", "avx2", "scalar") if isa in machine_isas()]
WINDOW = Functions("window", None, lambda b, h, q, k: (q + 12 >= k) & (q - k < 20))


@pytest.fixture(autouse=True)
def watched() -> Iterator[None]:
    torch._dynamo.reset()
    with perfuse.config.patch({"verify": "memory", "cpu.opt_level": 1, "cpu.threads": 2}):
        yield


@pytest.mark.parametrize("first", range(0, len(ALL), PER_PROGRAM))
def test_functions_of_scores(first: int) -> None:
    some = ALL[first : first + PER_PROGRAM]
    parts = [attends(each) for each in some]
    given = operands(batch=BATCH if any(each.varies_by_batch for each in some) else 1)
    with perfuse.config.patch({"cpu.simd": ISAS[first // PER_PROGRAM % 2 % len(ISAS)]}):
        check(lambda q, k, v: [attend(q, k, v) for attend in parts], given)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((24, 40), torch.bfloat16), ((64, 17), torch.float16), ((5, 80), torch.float32)],
    ids=str,
)
def test_odd_sizes_and_shared_heads(isa: str, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """Lengths that no block divides, heads that are no whole vectors, four heads on two."""
    lengths = 41, 53
    attend = partial(attends(WINDOW, lengths), enable_gqa=True, return_lse=True)
    given = operands(heads=(4, 2), lengths=lengths, sizes=sizes, batch=1, dtype=dtype)
    with perfuse.config.patch({"cpu.simd": isa}):
        check(attend, given)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("queries", [1, 7])
def test_few_queries_share_the_keys(isa: str, queries: int) -> None:
    """Blocks of which some are full, and keys that are no whole vectors."""
    far = Functions("far", None, lambda b, h, q, k: (k < 200) & ((k >= 64) | (q == 0)))
    attend = partial(attends(far, (queries, 275)), enable_gqa=True, return_lse=True)
    given = operands(heads=(4, 2), lengths=(queries, 275), sizes=(24, 20))
    with perfuse.config.patch({"cpu.simd": isa}):
        check(attend, given)


@pytest.mark.parametrize("block", [(7, 5), (1, 300), (48, 20)], ids=str)
def test_blocks_of_any_size(block: tuple[int, int]) -> None:
    causal: Any = NAMED["causal"].mask
    blocks = create_block_mask(causal, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=block)
    check(lambda q, k, v: [flex_attention(q, k, v, block_mask=blocks)], operands(batch=1))


def test_many_blocks_and_panels() -> None:
    """More queries than a block of the template has, more keys than a tile."""
    lengths = 300, 333
    alibi = Functions("alibi", NAMED["alibi"].score, lambda b, h, q, k: q * 1.1 >= k)
    given = operands(lengths=lengths, sizes=(8, 8), batch=1)
    check(partial(attends(alibi, lengths), return_lse=True), given)


def test_dynamic_lengths() -> None:
    """One kernel for all lengths, few queries and many."""
    score, seen = NAMED["by_distance"].score, list[Any]()
    attend = lambda q, k, v: [flex_attention(q, k, v, score_mod=score)]  # noqa: E731
    run = torch.compile(attend, backend="perfuse", dynamic=True)
    with observing(seen.append):
        for lengths in ((40, 57), (2, 300), (133, 70)):
            given = operands(lengths=lengths)
            exact = attend(*(x.double() for x in given))
            assert_as_good_as_eager(run(*given), attend(*given), exact)
    assert len(seen) == 1


def test_views() -> None:
    """Heads of one projection, features that are not contiguous, keys that a batch shares."""

    def attend(x: Tensor, k: Tensor) -> list[Any]:
        q, v = (x[:, 1:, :, i].transpose(1, 2) for i in (0, 1))
        reversed_heads = q.transpose(2, 3).contiguous().transpose(2, 3)
        few = flex_attention(q[:, :, :2], reversed_heads, v)
        shared = flex_attention(q, k[:, :, 3:], k[:, :, 3:], block_mask=blocks)
        return [flex_attention(q, reversed_heads, v), few, shared]

    def every(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    blocks = create_block_mask(every, BATCH, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16)
    generator = torch.Generator().manual_seed(3)
    shapes = (BATCH, LENGTH + 1, 2, HEADS, 16), (1, HEADS, LENGTH + 3, 16)
    check(attend, [torch.randn(shape, generator=generator) for shape in shapes])


CAPTURED = {
    "halves": (torch.randn(LENGTH).bfloat16(), lambda s, t, q, k: s + t[k]),
    "float16": (torch.randn(LENGTH, LENGTH).half(), lambda s, t, q, k: s * t[q, k]),
    "bytes": (torch.randint(0, 9, (LENGTH,), dtype=torch.uint8), lambda s, t, q, k: s - t[q]),
    "ints": (torch.randperm(LENGTH, dtype=torch.int32), lambda s, t, q, k: s - (t[q] - t[k]).abs()),
    "truths": (torch.rand(LENGTH) > 0.5, lambda s, t, q, k: torch.where(t[q] & t[k], s, s - 2)),
    "every other": (
        torch.randn(LENGTH, 2 * LENGTH)[:, ::2].mT,
        lambda s, t, q, k: s + t[q, k],
    ),
    "an index of an index": (
        torch.randperm(LENGTH), lambda s, t, q, k: s + t[t[q]] * 0.1 - t[LENGTH - 1 - k] * 0.1,
    ),
    "a number": (torch.tensor(1.25), lambda s, t, q, k: s * t),
}  # fmt: skip


def test_captured_tensors() -> None:
    """Of several dtypes and strides, with queries as lanes and with keys as lanes."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> list[Any]:
        scores = [
            lambda s, b, h, i, j, fn=fn, t=t: fn(s, t, i, j)  # type: ignore[misc]
            for t, fn in CAPTURED.values()
        ]
        sides = [q if number % 2 else q[:, :, :1] for number in range(len(scores))]
        pairs = zip(sides, scores, strict=True)
        return [flex_attention(x, k, v, score_mod=score) for x, score in pairs]

    check(attend, operands(batch=1))


def test_numbers_that_are_not_finite() -> None:
    """NaN and infinities of scores, queries without keys, as eager has them."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        with_keys = lambda s, b, h, i, j: torch.where((i == 2) & (j == 2), float("inf"), s)  # noqa: E731
        without = lambda s, b, h, i, j: torch.where(i < 2, -float("inf"), s)  # noqa: E731
        return [
            flex_attention(x, k, v, score_mod=score, return_lse=True)
            for x in (q, q[:, :, 1:4])
            for score in (None, with_keys, without)
        ]

    q, k, v = operands(batch=1)
    q[0, 0, 1, 3] = float("nan")
    q[0, 1, 5, 3] = float("inf")
    got, eager = (fn(q, k, v) for fn in (torch.compile(attend, backend="perfuse"), attend))
    for one, other in zip(got, eager, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_heads_of_many_features() -> None:
    given = operands(lengths=(20, 20), sizes=(320, 300), batch=1)
    check(lambda q, k, v: [flex_attention(q, k, v)], given)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 3.0])
def test_scales(scale: float) -> None:
    attend = partial(attends(WINDOW), scale=scale, return_lse=True)
    check(attend, operands(batch=1))


def test_positions_that_are_checked() -> None:
    """An index from data that is out of bounds is an error, as in eager."""
    table, at = torch.randn(LENGTH), torch.arange(LENGTH)
    at[7] = LENGTH
    score = lambda s, b, h, q, k: s + table[at[k]]  # noqa: E731
    attend = torch.compile(lambda *x: flex_attention(*x, score_mod=score), backend="perfuse")
    with pytest.raises(IndexError):
        attend(*operands())


def test_what_no_kernel_computes_is_reported() -> None:
    """Doubles are PyTorch's own, some queries at a time, and a report says why."""
    given = [x.double() for x in operands()]
    attend = lambda q, k, v: flex_attention(q, k, v)  # noqa: E731
    report = perfuse.explain(attend, *given)
    (reason,) = [call.reason for graph in report.graphs for call in graph.calls]
    assert reason == "attention of mixed dtypes, or other than float16, bfloat16, float32"
    assert torch.equal(torch.compile(attend, backend="perfuse")(*given), attend(*given))


def test_no_queries_are_no_results() -> None:
    given = operands(lengths=(0, 8))
    attend = lambda q, k, v: flex_attention(q, k, v)  # noqa: E731
    made, expected = torch.compile(attend, backend="perfuse")(*given), attend(*given)
    assert made.shape == expected.shape == (BATCH, HEADS, 0, 16)
    assert made.stride() == expected.stride()


def test_memory_is_linear_in_the_length() -> None:
    """Nothing is allocated but the result."""
    given = operands(lengths=(2048, 2048), heads=(1, 1), batch=1)
    run = torch.compile(lambda q, k, v: flex_attention(q, k, v), backend="perfuse")
    run(*given)
    with perfuse.config.patch({"verify": False}):
        report = perfuse.explain(lambda q, k, v: flex_attention(q, k, v), *given)
    (graph,) = report.graphs
    assert len(graph.kernels) == 1 and not graph.calls


# -- gradients -----------------------------------------------------------------------------


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch refuses gradients of queries, keys and values on a CPU."""
    monkeypatch.setattr(flex, "_validate_device", lambda *operands: None)


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("isa", ISAS)
def test_gradients(isa: str) -> None:
    attend = attends(NAMED["soft_cap_causal"])
    with perfuse.config.patch({"cpu.simd": isa}):
        check(lambda q, k, v: [attend(q, k, v)], operands(batch=1), has_grad=True)


@pytest.mark.usefixtures("allowed")
def test_gradients_of_odd_sizes_and_shared_heads() -> None:
    lengths = 41, 153
    attend = partial(attends(WINDOW, lengths), enable_gqa=True, return_lse=True)
    given = operands(heads=(4, 2), lengths=lengths, sizes=(24, 40), dtype=torch.bfloat16)
    check(attend, given, has_grad=True)


@pytest.mark.usefixtures("allowed")
def test_gradients_of_dynamic_lengths_and_views() -> None:
    """More queries than a block of the template has; heads that are transposed."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> list[Any]:
        score = NAMED["by_distance"].score
        return [flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), score_mod=score)]

    run = torch.compile(attend, backend="perfuse", dynamic=True)
    for length in (40, 167):
        given = [x.transpose(1, 2).contiguous() for x in operands(lengths=(length, length))]
        got, eager = (results(fn, given, has_grad=True) for fn in (run, attend))
        exact = results(attend, [x.double() for x in given], has_grad=True)
        assert_as_good_as_eager(got, eager, exact)


def test_gradients_of_captured_tensors() -> None:
    """By head, by distance, by key: what several scores add is summed."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *captured: Tensor) -> list[Any]:
        slopes, table, of_keys = captured
        score = lambda s, b, h, i, j: (  # noqa: E731
            s + (i - j) * 0.1 * slopes[h] + table[h, i - j + LENGTH] + of_keys[j]
        )
        return [flex_attention(q, k, v, score_mod=score, block_mask=blocks)]

    causal: Any = NAMED["causal"].mask
    blocks = create_block_mask(causal, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=(32, 16))
    generator = torch.Generator().manual_seed(7)
    shapes = ((HEADS,), (HEADS, 2 * LENGTH), (LENGTH,))
    captured = [torch.randn(shape, generator=generator) for shape in shapes]
    fixed = operands(batch=1)
    seen = list[Any]()
    with observing(seen.append):
        check(lambda *given: attend(*fixed, *given), captured, has_grad=True)
    # Nobody asks for the gradients of keys and values.
    parts = [k.attention.part for each in seen for k in each.plan.kernels if k.attention]
    assert [str(part) for part in parts] == ["attention", "attention_query_gradient"]
