"""Attention of random operands by a compiled function, held to float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from perfuse.counters import counters
from tests.harness.attention_functions import BATCH, BLOCK, HEADS, LENGTH, Functions
from tests.harness.compare import assert_as_good_as_eager

PER_PROGRAM = 4


def operands(
    *, heads: tuple[int, int] = (HEADS, HEADS), lengths: tuple[int, int] = (LENGTH, LENGTH),
    sizes: tuple[int, int] = (16, 16), batch: int = BATCH, dtype: torch.dtype = torch.float32,
) -> list[Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    shapes = [(heads[0], lengths[0], sizes[0]), (heads[1], lengths[1], sizes[0])]
    shapes.append((heads[1], lengths[1], sizes[1]))
    return [torch.randn(batch, *shape, generator=generator).to(dtype) for shape in shapes]


def results(run: Callable[..., Any], given: Sequence[Tensor], *, has_grad: bool) -> list[Tensor]:
    """The results of a call, and the gradients of its operands."""
    own = [x.clone().requires_grad_(has_grad) for x in given]
    outs = [out for out in run(*own) if out is not None]
    if not has_grad:
        return [out.detach() for out in outs]
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in outs]
    return [*(out.detach() for out in outs), *torch.autograd.grad(outs, own, weights)]


@contextmanager
def uncompiled() -> Iterator[None]:
    """Call PyTorch's attention without Dynamo, which it uses outside of a compiled function too.

    Its gradients need that.
    """
    name = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    before = getattr(flex, name)
    setattr(flex, name, True)
    try:
        yield
    finally:
        setattr(flex, name, before)


def check(
    fn: Callable[..., Any], given: Sequence[Tensor], *, has_grad: bool = False, **how: Any
) -> None:
    """Compare with float64, and check that generated kernels computed it."""
    before = counters.snapshot()
    got = results(torch.compile(fn, backend="perfuse", **how), given, has_grad=has_grad)
    names = [n for n, count in counters.snapshot().items() if count != before.get(n, 0)]
    assert not [n for n in names if n.startswith("fallback.flex_attention")]
    with uncompiled() if not has_grad else nullcontext():
        eager = results(fn, given, has_grad=has_grad)
        exact = results(fn, [x.double() for x in given], has_grad=has_grad)
    for one, other, wide in zip(got, eager, exact, strict=True):
        assert_as_good_as_eager(one, other, wide)


def attends(each: Functions, lengths: tuple[int, int] = (LENGTH, LENGTH)) -> Callable[..., Any]:
    """The function that attends with a score function and a block mask."""
    is_by_head = each.name == "by_head_mask"
    blocks = None if each.mask is None else create_block_mask(
        each.mask, BATCH if each.varies_by_batch else None, HEADS if is_by_head else None,
        *lengths, device="cpu", BLOCK_SIZE=BLOCK,
    )  # fmt: skip
    return partial(flex_attention, score_mod=each.score, block_mask=blocks)
