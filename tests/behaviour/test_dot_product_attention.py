"""scaled_dot_product_attention on a CPU as a generated kernel: values against float64.

Memory is watched; results have eager's strides; where the library computes it, a report says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import perfuse
from perfuse.capture.observe import observing
from perfuse.counters import counters
from perfuse.graph import attention_choice
from perfuse.graph.attention_choice import AttentionProblem, library_reason
from perfuse.lower.families import dot_product_attention
from perfuse.target import machine_isas
from tests.harness.attention import operands, results
from tests.harness.compare import assert_as_good_as_eager

ISAS = [isa for isa in ("avx512", "avx2", "scalar") if isa in machine_isas()]
attend = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def watched() -> Iterator[None]:
    torch._dynamo.reset()
    settings = {"verify": "memory", "cpu.opt_level": 1, "cpu.threads": 2, "cpu.attention": "kernel"}
    with perfuse.config.patch(settings):
        yield


def by_position(given: Sequence[Tensor]) -> list[Tensor]:
    """Operands as a projection makes them: the heads of a position side by side."""
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]


def check(
    fn: Callable[..., Any], given: Sequence[Tensor], *, has_grad: bool = True, **how: Any
) -> None:
    """Compare results and gradients, and check that generated kernels computed them."""
    before = counters.snapshot()
    got = results(torch.compile(fn, backend="perfuse", **how), given, has_grad=has_grad)
    names = [n for n, count in counters.snapshot().items() if count != before.get(n, 0)]
    assert not [n for n in names if n.startswith("fallback.aten._scaled_dot")]
    eager = results(fn, given, has_grad=has_grad)
    exact = results(fn, [x.double() for x in given], has_grad=has_grad)
    for one, other, wide in zip(got, eager, exact, strict=True):
        assert steps(one) == steps(other)
        assert_as_good_as_eager(one, other, wide)


def steps(x: Tensor) -> list[int]:
    """Strides, without those that are never walked."""
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def masked(mask: Tensor) -> Callable[..., list[Tensor]]:
    """Attention with a mask, of the dtype of the operands if it is added."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        added = mask if mask.dtype is torch.bool else mask.to(q.dtype)
        return [attend(q, k, v, attn_mask=added)]

    return run


DOUBLES = "attention of mixed dtypes, or other than float16, bfloat16, float32"
SHAPES = [
    ((16, 40), 32, torch.float16),
    ((70, 53), 24, torch.bfloat16),
    ((150, 201), 16, torch.float32),
    ((9, 80), 5, torch.float32),
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("lengths", "size", "dtype"), SHAPES, ids=str)
def test_plain_and_causal(
    isa: str, lengths: tuple[int, int], size: int, dtype: torch.dtype
) -> None:
    """Blocks on, before and behind the diagonal, and heads that are no whole vectors."""

    def both(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [attend(q, k, v), attend(q, k, v, is_causal=True, scale=0.3)]

    given = operands(lengths=lengths, sizes=(size, size), batch=1, dtype=dtype)
    with perfuse.config.patch({"cpu.simd": isa}):
        check(both, by_position(given))


@pytest.mark.parametrize(
    ("queries", "dtype"), [(1, torch.float32), (5, torch.bfloat16), (41, torch.float32)], ids=str
)
def test_masks(queries: int, dtype: torch.dtype) -> None:
    """Boolean masks with a row that hides all, and added ones, of several shapes."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(queries, 67), (2, 1, 1, 67), (2, 1, queries, 67), (1, 2, queries, 67)]
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    hidden = drawn[2] > -1
    hidden[0, 0, 0] = False
    given = by_position(operands(lengths=(queries, 67), heads=(2, 2), batch=2, dtype=dtype))
    masks = [*drawn, hidden, drawn[0] > 0, drawn[1] > 0]
    check(lambda q, k, v: [masked(m)(q, k, v)[0] for m in masks], given)


def test_masks_that_are_computed() -> None:
    """A cheap mask is computed where it is added; an expensive one is stored once."""

    def both(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
        cheap = torch.where(distance > 3, 0.0, -1.5).to(q.dtype)
        expensive = torch.sin(distance.to(q.dtype) * 0.1).exp() + torch.cos(distance * 0.3)
        return [attend(q, k, v, attn_mask=m.to(q.dtype)) for m in (cheap, expensive)]

    check(both, operands(lengths=(20, 37), batch=1))


@pytest.mark.parametrize(("queries", "dtype"), [(1, torch.bfloat16), (30, torch.float32)], ids=str)
def test_shared_heads(queries: int, dtype: torch.dtype) -> None:
    given = operands(heads=(4, 2), lengths=(queries, 45), dtype=dtype)
    fn = lambda q, k, v: [attend(q, k, v, enable_gqa=True)]  # noqa: E731
    check(fn, given, has_grad=queries > 1)


def test_projections() -> None:
    """Operands are windows on one projection, and the result is read by another."""

    def block(x: Tensor, w: Tensor, out: Tensor) -> list[Tensor]:
        q, k, v = (x @ w).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4).unbind(0)
        return [attend(q * 1.5, k, v, is_causal=True).transpose(1, 2).flatten(2) @ out]

    generator = torch.Generator().manual_seed(2)
    shapes = (2, 33, 32), (32, 192), (64, 8)
    check(block, [torch.randn(shape, generator=generator) for shape in shapes])


def test_the_bias_of_a_projection_is_added_by_the_matmul() -> None:
    """The kernel reads its operands from memory, where nothing but the matmul stores them."""

    def block(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        q = F.linear(x, weight, bias).unflatten(-1, (4, 64)).transpose(1, 2)
        return attend(q, q, q)

    given = torch.randn(2, 64, 256), torch.randn(256, 256), torch.randn(256)
    (graph,) = perfuse.explain(block, *given).graphs
    (kernel,) = graph.kernels
    assert "attention" in str(kernel.members)


def test_dynamic_lengths() -> None:
    """One program for all lengths, few queries and many."""

    def both(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [attend(q, k, v), attend(q, k, v, is_causal=True)]

    seen = list[Any]()
    run = torch.compile(both, backend="perfuse", dynamic=True)
    with observing(seen.append):
        for lengths in ((40, 57), (2, 300), (133, 70)):
            given = by_position(operands(lengths=lengths))
            exact = both(*(x.double() for x in given))
            assert_as_good_as_eager(run(*given), both(*given), exact)
    assert len(seen) == 1


def test_numbers_that_are_not_finite() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [attend(q, k, v), attend(q[:, :, :3], k, v), attend(q, k, v, is_causal=True)]

    q, k, v = operands(batch=1)
    q[0, 0, 1, 3] = float("nan")
    v[0, 1, 5, 3] = float("inf")
    got, eager = (fn(q, k, v) for fn in (torch.compile(both, backend="perfuse"), both))
    for one, other in zip(got, eager, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_one_half_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both save the same sums: either backward follows either forward."""
    given = by_position(operands())
    fn = lambda q, k, v: [attend(q, k, v, is_causal=True)]  # noqa: E731
    exact = results(fn, [x.double() for x in given], has_grad=True)
    eager = results(fn, given, has_grad=True)
    checked = dot_product_attention._check
    for first in (0, 1):
        torch._dynamo.reset()
        calls = iter(("kernel", "library") if first else ("library", "kernel"))

        def by_turns(*given: Any, calls: Iterator[str] = calls, **how: Any) -> None:
            if next(calls) == "library":
                raise dot_product_attention.CannotLower("the turn of the library")
            checked(*given, **how)

        monkeypatch.setattr(dot_product_attention, "_check", by_turns)
        with perfuse.config.patch({"cache.enabled": False}):
            got = results(torch.compile(fn, backend="perfuse"), given, has_grad=True)
        for one, other, wide in zip(got, eager, exact, strict=True):
            assert_as_good_as_eager(one, other, wide)


@pytest.mark.parametrize(
    ("wanted", "dtype", "reason"),
    [
        ("library", torch.float32, "cpu.attention asks for the library"),
        ("auto", torch.float64, DOUBLES),
    ],
)
def test_why_the_library_computes_it(wanted: str, dtype: torch.dtype, reason: str) -> None:
    given = operands(dtype=dtype)
    with perfuse.config.patch({"cpu.attention": wanted}):
        report = perfuse.explain(lambda q, k, v: attend(q, k, v), *given)
        (told,) = [call.reason for graph in report.graphs for call in graph.calls]
        assert told == reason
        got = torch.compile(attend, backend="perfuse")(*given)
    assert torch.equal(got, attend(*given))


def test_halves_stay_with_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "has_matrix_units", lambda: True)
    fn = lambda q, k, v: attend(q, k, v)  # noqa: E731
    with perfuse.config.patch({"cpu.attention": "auto", "cpu.simd": "avx2"}):
        counts = [
            [len(graph.calls) for graph in perfuse.explain(fn, *operands(dtype=dtype)).graphs]
            for dtype in (torch.bfloat16, torch.float32)
        ]
    assert counts == [[1], [0]]


RULES = [
    ("avx512", AttentionProblem(is_half=False, has_mask=True, is_gradient=True), True),
    ("avx2", AttentionProblem(is_half=False, queries=64), True),
    ("avx2", AttentionProblem(is_half=False, has_mask=True, queries=1), True),
    ("avx2", AttentionProblem(is_half=False, has_mask=True, queries=64), False),
    ("avx2", AttentionProblem(is_half=False, is_gradient=True), False),
    ("neon", AttentionProblem(is_half=False), False),
]


@pytest.mark.parametrize(("isa", "problem", "is_ours"), RULES, ids=str)
def test_rules(isa: str, problem: AttentionProblem, is_ours: bool) -> None:
    settings = perfuse.config.snapshot().with_overrides({"cpu.attention": "auto"})
    assert (library_reason(settings, isa, problem) is None) == is_ours


def test_a_report_names_the_kernel() -> None:
    report = perfuse.explain(lambda q, k, v: attend(q, k, v), *by_position(operands()))
    (graph,) = report.graphs
    assert not graph.calls
    (kernel,) = graph.kernels
    assert "attention" in str(kernel.members)


@pytest.mark.parametrize("queries", [1, 5, 33])
@pytest.mark.parametrize("size", [1e3, 1e6, 1e10, 1e19])
def test_large_scores(queries: int, size: float) -> None:
    """Weights of a single key: the scale of 80 features is not a power of two, and rounds."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 3, queries, 80), (2, 3, 64, 80), (2, 3, 64, 80))
    operands = [torch.randn(shape, generator=generator) for shape in shapes]
    operands[0] *= size
    torch._dynamo.reset()
    compiled = torch.compile(F.scaled_dot_product_attention, backend="perfuse")
    got, eager = compiled(*operands), F.scaled_dot_product_attention(*operands)
    exact = F.scaled_dot_product_attention(*(x.double() for x in operands))
    assert_as_good_as_eager(got, eager, exact)
    for x in operands:
        x.requires_grad_()
    compiled(*operands).sum().backward()
    for x in operands:
        assert x.grad is not None and bool(x.grad.isfinite().all())


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_of_large_scores(is_causal: bool) -> None:
    """The forward saves sums that are as large as scores: no factor may round them."""
    generator = torch.Generator().manual_seed(4)
    shapes = ((1, 2, 20, 16), (1, 2, 37, 16), (1, 2, 37, 16))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    fn = lambda q, k, v: [attend(q, k, v, is_causal=is_causal)]  # noqa: E731
    check(fn, by_position([1e9 * q, k, v]))


def test_gradients_of_rows_under_the_least_number() -> None:
    """A row that adds the least finite number to all scores hides none of them."""
    mask = torch.zeros(20, 37)
    mask[4], mask[6, :30] = (torch.finfo(torch.float32).min,) * 2
    check(masked(mask), by_position(operands(lengths=(20, 37), batch=1)))
