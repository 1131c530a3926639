"""Losses over a vocabulary by chunks of rows: every form of the loss, against eager and float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import perfuse
from perfuse.testing import fresh_cache
from tests.harness.compare import assert_as_good_as_eager

BATCH, LENGTH, HIDDEN, WORDS = 4, 12, 24, 120
CHUNK = 8 * WORDS * 4  # eight rows of float32
COUNT = "graph.chunked_heads"

Loss = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def small_chunks() -> Iterator[None]:
    torch._dynamo.reset()
    perfuse.counters.clear()
    # A graph that is found in the cache has been rewritten before, and is not counted.
    with fresh_cache(), perfuse.config.patch(logits_chunk_bytes=CHUNK, verify=True):
        yield


def flat(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, WORDS), target.view(-1), **options)


def mean(h: Tensor, w: Tensor, _: Tensor, target: Tensor) -> Tensor:
    return flat(F.linear(h, w), target)


def with_bias(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    return flat(F.linear(h, w, b), target)


def summed(h: Tensor, w: Tensor, _: Tensor, target: Tensor) -> Tensor:
    return flat(h @ w.t(), target, reduction="sum") * 0.3


def smoothed(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    return flat(F.linear(h, w, b), target, label_smoothing=0.1)


def weighted(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 2, WORDS).to(h.dtype)
    return flat(F.linear(h, w, b), target, weight=weights, label_smoothing=0.1)


def soft_capped(h: Tensor, w: Tensor, _: Tensor, target: Tensor) -> Tensor:
    return flat(torch.tanh(F.linear(h, w) / 30) * 30, target)


def z_loss(h: Tensor, w: Tensor, _: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(h, w)
    return flat(logits, target) + 1e-2 * torch.logsumexp(logits, -1).square().mean()


def shifted(h: Tensor, w: Tensor, _: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(h, w)
    logits = logits.float() if logits.dtype is not torch.float64 else logits
    later = F.pad(target, (0, 1), value=-100)[..., 1:].contiguous()
    return flat(logits, later, reduction="sum") / 7


def not_linear(h: Tensor, w: Tensor, _: Tensor, target: Tensor) -> Tensor:
    """The factor of the gradient is known when the loss is."""
    return flat(F.linear(h, w), target).sigmoid() + h.square().mean()


LOSSES = (mean, with_bias, summed, smoothed, weighted, soft_capped, z_loss, shifted, not_linear)


def inputs(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    h = torch.randn(BATCH, LENGTH, HIDDEN).to(dtype).requires_grad_()
    w = (0.3 * torch.randn(WORDS, HIDDEN)).to(dtype).requires_grad_()
    b = torch.randn(WORDS).to(dtype).requires_grad_()
    target = torch.randint(0, WORDS, (BATCH, LENGTH))
    target[0, :3] = -100
    return h, w, b, target


def wide(args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    given = [x.detach().double().requires_grad_() for x in args[:-1]]
    return (*given, args[-1])


def results(fn: Loss, args: tuple[Tensor, ...], factor: float = 0.75) -> list[Tensor | None]:
    for x in args[:-1]:
        x.grad = None
    loss = fn(*args)
    (loss * factor).backward()
    return [loss.detach(), *(x.grad for x in args[:-1])]


def compiled(fn: Loss) -> Loss:
    return torch.compile(fn, backend="perfuse", dynamic=False)


def check(fn: Loss, args: tuple[Tensor, ...], factor: float = 0.75) -> None:
    ours = torch.compile(fn, backend="perfuse", dynamic=False)
    got = results(ours, args, factor)
    assert_as_good_as_eager(got, results(fn, args, factor), results(fn, wide(args), factor))


@pytest.mark.parametrize("fn", LOSSES)
def test_loss_and_gradients(fn: Loss) -> None:
    check(fn, inputs())
    assert perfuse.counters[COUNT] == 1


@pytest.mark.parametrize("fn", (with_bias, shifted, soft_capped))
def test_bfloat16(fn: Loss) -> None:
    with perfuse.config.patch(logits_chunk_bytes=CHUNK // 2):
        check(fn, inputs(torch.bfloat16))
    assert perfuse.counters[COUNT] == 1


def test_without_gradients() -> None:
    args = tuple(x.detach() for x in inputs())
    ours = torch.compile(smoothed, backend="perfuse", dynamic=False)
    assert_as_good_as_eager(ours(*args), smoothed(*args), smoothed(*wide(args)).detach())
    assert perfuse.counters[COUNT] == 1


def test_any_gradient_of_the_loss_and_backward_twice() -> None:
    args = inputs()
    ours = torch.compile(mean, backend="perfuse", dynamic=False)
    for factor in (1.0, -3.0, 0.0, 1e-3):
        got, eager = results(ours, args, factor), results(mean, args, factor)
        assert_as_good_as_eager(got, eager, results(mean, wide(args), factor))
    h = args[0]
    loss = ours(*args)
    once = torch.autograd.grad(loss, h, retain_graph=True)[0].clone()
    twice = torch.autograd.grad(2 * loss, h)[0]
    assert torch.equal(2 * once, twice)


def test_all_targets_ignored() -> None:
    h, w, b, target = inputs()
    args = (h, w, b, torch.full_like(target, -100))
    ours = torch.compile(mean, backend="perfuse", dynamic=False)
    got, eager = results(ours, args), results(mean, args)
    assert got[0] is not None and got[0].isnan()
    assert_as_good_as_eager(got, eager)


def test_memory_is_checked_while_it_runs() -> None:
    with perfuse.config.patch(verify="memory"):
        check(with_bias, inputs())


@pytest.mark.parametrize("budget", (0.5, 0.9))
def test_memory_budget(budget: float) -> None:
    with perfuse.config.patch(memory_budget=budget, over_budget="warn"):
        check(mean, inputs())


def test_checkpoint_levels() -> None:
    with perfuse.config.patch(recompute_level=3):
        check(mean, inputs())


def returned(h: Tensor, w: Tensor, _: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(h, w)
    return flat(logits, target), logits


def unreduced(h: Tensor, w: Tensor, _: Tensor, target: Tensor) -> Tensor:
    return flat(F.linear(h, w), target, reduction="none")


@pytest.mark.parametrize("fn", (returned, unreduced))
def test_left_alone(fn: Callable[..., Any]) -> None:
    """Logits that the caller gets, and a loss whose gradient is not one number."""
    args = inputs()
    out = torch.compile(fn, backend="perfuse", dynamic=False)(*args)
    torch.testing.assert_close(out, fn(*args))
    assert perfuse.counters[COUNT] == 0


def by_bits(h: Tensor, w: Tensor, _: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(h, w)
    is_large = (logits.view(torch.int32) & 0x7FFFFFFF) > 0x3F800000
    return flat(torch.where(is_large, logits, -logits), target)


def bias_with_rows(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    rows = b + torch.arange(BATCH * LENGTH, dtype=h.dtype)[:, None] * b.flip(0)
    return flat(torch.addmm(rows, h.flatten(0, 1), w.t()), target)


def channels_last(h: Tensor, w: Tensor, _: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(h, w).view(BATCH, LENGTH, 10, 12)
    logits = logits.contiguous(memory_format=torch.channels_last)
    return F.cross_entropy(logits.reshape(-1, WORDS), target.view(-1))


@pytest.mark.parametrize("fn", (by_bits, bias_with_rows, channels_last))
def test_other_heads_are_right(fn: Loss) -> None:
    args = inputs()
    assert_as_good_as_eager(results(compiled(fn), args), results(fn, args))


def test_matmul_for_a_gradient_is_no_head() -> None:
    """Its rows are those of a gradient, which no loss is computed of."""

    def squares(x: Tensor, scale: Tensor, factor: Tensor, w: Tensor) -> Tensor:
        return ((x * (scale[:, None] * factor)) @ w).square().mean()

    x, w = torch.randn(48, WORDS), torch.randn(WORDS, HIDDEN)
    given = [torch.randn(48, requires_grad=True), torch.randn((), requires_grad=True)]
    got, eager = (torch.autograd.grad(f(x, *given, w), given) for f in (compiled(squares), squares))
    assert_as_good_as_eager(list(got), list(eager))


def test_targets_at_the_end_of_a_long_chain() -> None:
    def chained(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(h, w)
        for i in range(500):
            b = torch.sin(b + i)
        return flat(logits * b, target)

    args = inputs()
    torch.testing.assert_close(compiled(chained)(*args), chained(*args))


def test_float16_is_left_alone() -> None:
    """A scaled loss keeps small gradients of logits representable: the factor belongs inside."""
    with perfuse.config.patch(logits_chunk_bytes=CHUNK // 2):
        results(torch.compile(mean, backend="perfuse", dynamic=False), inputs(torch.float16))
    assert perfuse.counters[COUNT] == 0


def test_refused_by_the_setting() -> None:
    with perfuse.config.patch(logits_chunk_bytes=0):
        check(mean, inputs())
    assert perfuse.counters[COUNT] == 0


def test_unknown_number_of_rows_is_left_alone() -> None:
    h, w, b, target = inputs()
    ours = torch.compile(mean, backend="perfuse", dynamic=True)
    for rows in (BATCH, BATCH - 1):
        some = (h[:rows].detach().requires_grad_(), w, b, target[:rows])
        assert_as_good_as_eager(results(ours, some), results(mean, some))
    assert perfuse.counters[COUNT] == 0


def test_explain_shows_chunks() -> None:
    text = str(perfuse.explain(mean, *inputs()))
    assert "loss by chunks of logits" in text


@given(
    rows=st.integers(5, 40),
    words=st.integers(2, 70),
    ignored=st.sampled_from(("none", "some", "all")),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
)
@settings(max_examples=6, deadline=None, derandomize=True)
def test_any_size(rows: int, words: int, ignored: str, dtype: torch.dtype) -> None:
    def loss(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(h @ w.t(), target, reduction="sum")

    torch._dynamo.reset()
    torch.manual_seed(rows * words)
    h = torch.randn(rows, 16).to(dtype).requires_grad_()
    w = torch.randn(words, 16).to(dtype).requires_grad_()
    target = torch.randint(0, words, (rows,))
    if ignored != "none":
        target[:: 1 if ignored == "all" else 3] = -100
    perfuse.counters.clear()
    with perfuse.config.patch(logits_chunk_bytes=rows * words * dtype.itemsize // 5):
        check(loss, (h, w, target))
    assert perfuse.counters[COUNT] == 1
