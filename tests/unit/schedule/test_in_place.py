"""Which results are written over a call's, and that nothing is lost by it."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse.config import Settings
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.schedule import in_place
from perfuse.schedule.verify import verify_plan
from tests.harness.compare import assert_as_good_as_eager
from tests.unit.lower.samples import f32
from tests.unit.planning import CONTEXT, plans_of

X, W = f32(2, 3, 8, 8), f32(5, 3, 1, 1)
A, B = f32(24, 24), f32(24, 24)


def softmax_over_rows(x: Tensor, w: Tensor) -> Tensor:
    y = F.conv2d(x, w)
    return torch.softmax(y, -1) * y.sigmoid()


def values_of_a_sparse_result(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.conv2d(x, w)
    rows = torch.arange(2).view(1, 2)
    return torch.sparse_coo_tensor(rows, y, y.shape, check_invariants=False), F.relu(y)


def returned_and_read_again(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.relu(F.conv2d(x, w))
    return y, y * (y.flatten(1) @ y.flatten(1).t()).sum()


# The function of an image and a kernel, and how many results lie where its convolution's was.
CASES: dict[str, tuple[Callable[..., Any], int]] = {
    "relu": (lambda x, w: F.relu(F.conv2d(x, w)), 1),
    "several sweeps over a row": (softmax_over_rows, 1),
    "between two": (lambda x, w: F.conv2d(F.relu(F.conv2d(x, w)), w[:4, :1].repeat(1, 5, 1, 1)), 1),
    "a result itself": (lambda x, w: ((y := F.conv2d(x, w)), F.relu(y)), 0),
    "read once more": (lambda x, w: F.conv2d(F.relu(y := F.conv2d(x, w)), y[:, :, :1, :1]), 0),
    "read elsewhere too": (lambda x, w: (y := F.conv2d(x, w)) + y.flip(-1), 0),
    "read transposed": (lambda x, w: F.relu(F.conv2d(x, w)).mT.contiguous(), 0),
    "of another type": (lambda x, w: F.conv2d(x, w) > 0, 0),
    "two results of one": (lambda x, w: ((y := F.conv2d(x, w)).relu(), y.exp()), 1),
    "of another shape": (lambda x, w: F.relu(F.conv2d(x, w)).flatten(1) + 1, 1),
    "returned and read again": (returned_and_read_again, 1),
    "held by a result": (values_of_a_sparse_result, 0),
    "of a call that may return its argument": (lambda x, w: F.relu(torch.fft.fft(x).real), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_lies_over_the_convolution(name: str) -> None:
    fn, wanted = CASES[name]
    (plan,) = plans_of(fn, X, W)
    assert len(plan.over) == wanted
    assert not plan.over.keys() & plan.places.keys()


def test_also_within_a_budget() -> None:
    context = Context(CONTEXT.target, Settings(memory_budget=0.5), Counters())
    (plan,) = plans_of(CASES["relu"][0], X, W, context=context)
    assert len(plan.over) == 1
    verify_plan(plan)


def chain_of_scatters(a: Tensor, b: Tensor) -> Tensor:
    places = torch.arange(24).flip(0) % 7
    for _ in range(3):
        a = a.index_add(0, places, b)
    return a


def three_index_puts(a: Tensor, b: Tensor) -> Tensor:
    rows = (b[0] > 0).long()
    for step in range(3):
        a = torch.index_put(a + step, (rows,), b, accumulate=True)
    return torch.index_put(a, (rows,), b[0]) @ b


def scatters_of_several_kinds(a: Tensor, b: Tensor) -> Tensor:
    places = (b > 0).long()
    a = a.scatter_add(0, places, b).scatter(1, places, 2.0).scatter_add(1, places, b)
    return a.scatter_reduce(0, places, b, "sum").scatter_add(0, places, a) @ b


def sums_scattered_and_scanned(a: Tensor, b: Tensor) -> Tensor:
    places = torch.arange(24) // 5
    y = torch.relu(a @ b).index_add(0, places, b).cumsum(1)
    return y.index_add(1, places, b).softmax(-1).index_add(0, places, y) @ b


def read_beside_the_writer(a: Tensor, b: Tensor) -> Tensor:
    """A product is kept for the writer from the first sweep, and a sum reads it again."""
    product, rows = a @ b, 1 + b[:, :1].abs()
    scaled = product * rows / 3
    scale = torch.rsqrt(scaled.square().mean(-1, keepdim=True) + 1)
    normed = (scaled * scale).square()
    slope = (normed * scale + (normed * scaled).mean(1, keepdim=True) * scaled) / 3
    result = (slope * rows) @ b
    return result + (slope * product).mean(1, keepdim=True)


# Of square matrices: how many results lie where another temporary of the arena was.
ARENA_CASES: dict[str, tuple[Callable[..., Any], int]] = {
    "between products": (lambda a, b: F.relu(a @ b) @ b, 1),
    "one after another": (lambda a, b: ((y := F.gelu(a @ b)) + y @ b).relu() @ b, 2),
    "the product is read again": (lambda a, b: F.relu(y := a @ b) @ y, 0),
    "read transposed": (lambda a, b: F.relu(a @ b).mT.contiguous() @ b, 0),
    "a row of statistics first": (lambda a, b: torch.softmax(a @ b, -1) @ b, 1),
    "of another type": (lambda a, b: (a @ b).half() @ b.half(), 0),
    "a result": (lambda a, b: F.relu(a @ b), 0),
    "chain of scatters": (chain_of_scatters, 0),  # one buffer, which all of them update
    "three index_puts": (three_index_puts, 2),
    "scatters of several kinds": (scatters_of_several_kinds, 0),  # two, of which one is read last
    "sums scattered and scanned": (sums_scattered_and_scanned, 2),
    "read beside the writer": (read_beside_the_writer, 0),
}


@pytest.mark.parametrize("name", ARENA_CASES)
def test_lies_over_a_temporary_of_the_arena(name: str) -> None:
    fn, wanted = ARENA_CASES[name]
    (plan,) = plans_of(fn, A, B)
    assert len(plan.over) == wanted
    # All that follow each other share the first one's place, and its argument in a kernel.
    assert not set(plan.over.values()) & plan.over.keys()
    assert all(plan.places[new] == plan.places[old] for new, old in plan.over.items())
    verify_plan(plan)


@pytest.mark.parametrize("name", ARENA_CASES)
def test_keeps_the_values_of_temporaries(name: str) -> None:
    fn = ARENA_CASES[name][0]
    compiled = torch.compile(fn, backend="perfuse")
    for a in (A, A + 1):
        assert_as_good_as_eager(compiled(a, B), fn(a, B), fn(a.double(), B.double()))


@pytest.mark.parametrize("name", CASES)
def test_keeps_the_values(name: str) -> None:
    fn = CASES[name][0]
    compiled = torch.compile(fn, backend="perfuse")
    with torch.no_grad():
        first, second = compiled(X, W), compiled(2 * X, W)
        torch.testing.assert_close(first, fn(X, W))
        torch.testing.assert_close(second, fn(2 * X, W))


def head_with_a_loss(x: Tensor, w: Tensor, b: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The sum with the bias is returned and read again, in another shape than the matmul's."""
    logits = F.linear(x, w, b)
    return F.cross_entropy(logits.flatten(0, 1), places.flatten()), logits


def residual_block(x: Tensor, w: Tensor, b: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w, b)
    return (y * torch.sigmoid(y)).softmax(-1) + y, y.amax(-1)


@pytest.mark.parametrize("fn", [head_with_a_loss, residual_block])
@pytest.mark.parametrize("seed", range(4))
def test_of_random_sizes(fn: Callable[..., Any], seed: int) -> None:
    """Results of an earlier call keep their values, and no kernel reads what it has overwritten."""
    rng = random.Random(seed)
    batch, length, width, inner = (rng.randint(1, 70) for _ in range(4))
    x, w, b = f32(batch, length, inner), f32(width, inner), f32(width)
    places = torch.tensor([rng.randrange(width) for _ in range(batch * length)])
    args = (w, b, places.view(batch, length))
    compiled = torch.compile(fn, backend="perfuse", options={"verify": "memory"})
    with torch.no_grad():
        found = [(compiled(k * x, *args), k * x) for k in (1, 2)]
        for results, given in found:
            exact = fn(given.double(), w.double(), b.double(), args[2])
            for each in zip(results, fn(given, *args), exact, strict=True):
                assert_as_good_as_eager(*each)


def sums_with_one_product(a: Tensor, b: Tensor, *others: Tensor) -> Tensor:
    y = a @ b
    sums = [y + other for other in others]  # kernels of a batch, which all read `y`
    return torch.stack([s @ b for s in sums])


def test_no_part_of_a_batch_overwrites_what_another_part_reads() -> None:
    context = Context(CONTEXT.target, Settings(max_fusion_size=1), Counters())
    args = (A, B, *(f32(24, 24) for _ in range(6)))
    (plan,) = plans_of(sums_with_one_product, *args, context=context)
    assert any(kernel.batch is not None for kernel in plan.kernels) and not plan.over
    options = {"max_fusion_size": 1}
    compiled = torch.compile(sums_with_one_product, backend="perfuse", options=options)
    exact = sums_with_one_product(*(x.double() for x in args))
    assert_as_good_as_eager(compiled(*args), sums_with_one_product(*args), exact)


def test_parts_of_a_batch_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of hundreds of parameters, comparing all pairs would take minutes."""
    compared: list[tuple[str, str]] = []

    def pairs(new: list[str], old: list[str]) -> list[tuple[str, str]]:
        compared.extend(product(new, old))
        return compared[len(compared) - len(new) * len(old) :]

    monkeypatch.setattr(in_place, "product", pairs)
    args = [f32(5) for _ in range(40)]
    (plan,) = plans_of(lambda *xs: [x.sin() for x in xs], *args)
    assert any(kernel.batch is not None for kernel in plan.kernels)
    assert len(compared) <= len(args)
