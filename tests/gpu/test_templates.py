"""Matmul templates on the device: each kind against eager, and matmuls under max-autotune."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import perfuse
from perfuse.codegen.triton.templates.template import (
    COOPERATIVE,
    MAPPED,
    PERSISTENT,
    PING_PONG,
    POINTERS,
    VECTOR,
    Template,
)
from tests.harness.compare import DIRECTIONS, assert_as_good_as_eager, moved
from tests.triton.contractions import Problem, run

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def cuda(device: str) -> str:
    if device != "cuda":
        pytest.skip("templates are a GPU's")
    return device


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, strides: Any = None) -> Tensor:
    """The same numbers in every run, on the CPU; the test moves them."""
    generator = torch.Generator().manual_seed(sum(shape))
    if strides is None:
        return torch.randn(shape, generator=generator).to(dtype)
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return torch.randn(span, generator=generator).to(dtype).as_strided(shape, strides)


# -- each template, told to compute a problem ----------------------------------------------

A, W, BIAS = normal(500, 320), normal(400, 320), normal(400)
F32 = torch.float32
PROBLEMS = {
    "mm": Problem("mm", lambda a, w: a @ w.t(), (A, W)),
    "transposed": Problem(
        "transposed", lambda a, b: a.t() @ b, (normal(320, 504), normal(320, 400))
    ),
    "residual": Problem("residual", lambda a, w, r: r + F.linear(a, w), (A, W, normal(500, 400))),
    "joined": Problem(
        "joined", lambda a, g, u: F.silu(a @ g) * (a @ u), (A, normal(320, 400), normal(320, 400))
    ),
    "gelu": Problem("gelu", lambda a, w, c: F.gelu(F.linear(a, w, c)), (A, W, BIAS)),
    "two results": Problem("two results", lambda a, w: ((y := a @ w.t()), y.float() * 2), (A, W)),
    "f16": Problem("f16", lambda a, w: F.relu(a @ w.t()), (A.half(), W.half())),
    "gate": Problem(
        "gate", lambda a, g, u: F.silu(a @ g.t()) * (a @ u.t()), (A, W, normal(400, 320))
    ),
    "bmm": Problem(
        "bmm", lambda a, b: F.relu(torch.bmm(a, b)), (normal(5, 100, 64), normal(5, 64, 72))
    ),
    "odd": Problem("odd", lambda a, b: a @ b, (normal(77, 51), normal(51, 93))),
    "strided": Problem(
        "strided", lambda a, b: a @ b, (normal(257, 300, strides=(1, 304)), normal(300, 96))
    ),
    "one row": Problem(
        "one row", lambda a, w: F.relu(a @ w.t()), (normal(1, 2048), normal(100, 2048))
    ),
    "one row, wide": Problem(
        "one row, wide", lambda a, b: a @ b, (normal(1, 2048), normal(2048, 200))
    ),
    "few rows": Problem(
        "few rows", lambda a, w: F.relu(a @ w.t()), (normal(7, 512), normal(300, 512))
    ),
    "sum of two": Problem(
        "sum of two",
        lambda a, b, c, d: a @ b + c @ d,
        (normal(128, 64, dtype=F32), normal(64, 96, dtype=F32)) * 2,
    ),
    "float32": Problem(
        "float32",
        lambda a, b: F.relu(a @ b),
        (normal(200, 300, dtype=F32), normal(300, 100, dtype=F32)),
    ),
}
PLAIN = Template(POINTERS, 64, 64, 32, 4, 3)
SPLIT = replace(PLAIN, splits=4)
SWAPPED = Template(POINTERS, 16, 64, 128, 4, 4, is_swapped=True)
ROW = Template(VECTOR, 1, 2, 1024, 4, 1)
ROW_SPLIT = Template(VECTOR, 1, 128, 64, 4, 1, splits=8)
TILE = Template(MAPPED, 64, 128, 64, 4, 4)
TILE_SPLIT = Template(MAPPED, 64, 64, 64, 4, 3, splits=2)
SWAPPED_TILE = Template(MAPPED, 16, 64, 128, 4, 4, is_swapped=True)
LOOP = Template(PERSISTENT, 128, 128, 64, 8, 3, programs=5, parts=2)
WIDE_LOOP = Template(PERSISTENT, 128, 256, 64, 8, 3, programs=3, parts=2)
TURNS = Template(PING_PONG, 64, 128, 64, 4, 4, programs=3)
TURNS_OF_TWO = Template(PING_PONG, 128, 64, 64, 4, 4, programs=3)
TURNS_IN_PARTS = Template(PING_PONG, 128, 128, 64, 4, 4, programs=3, parts=2)
SHARED = Template(COOPERATIVE, 128, 128, 64, 8, 4, programs=3)
SHARED_IN_PARTS = Template(COOPERATIVE, 128, 256, 64, 8, 3, programs=3, parts=2)
MAPPABLE = ("mm", "transposed", "gelu", "two results", "f16", "gate")
RUNS = [
    *((name, PLAIN) for name in PROBLEMS),
    *((name, SPLIT) for name in ("mm", "gelu", "bmm", "strided", "sum of two")),
    *((name, SWAPPED) for name in ("few rows", "one row", "odd")),
    *((name, template) for name in ("one row", "one row, wide") for template in (ROW, ROW_SPLIT)),
    *((name, template) for name in (*MAPPABLE, "bmm") for template in (TILE, TILE_SPLIT)),
    *((name, SWAPPED_TILE) for name in ("few rows", "mm")),
    *((name, LOOP) for name in MAPPABLE),
    *((name, TURNS) for name in (*MAPPABLE, "residual")),
    *((name, SHARED) for name in (*MAPPABLE, "residual", "joined")),
    *((name, TURNS_IN_PARTS) for name in ("mm", "gelu", "two results", "residual")),
    *((name, TURNS_OF_TWO) for name in ("gate", "joined", "residual")),
    *((name, SHARED_IN_PARTS) for name in ("mm", "transposed", "gelu", "residual")),
    # The wide tile has no shared memory for a second result or operand.
    *((name, WIDE_LOOP) for name in MAPPABLE if name not in ("gate", "two results")),
    *(("sum of two", replace(PLAIN, precision=how)) for how in ("ieee", "bf16x6", "tf32x3")),
]


@pytest.mark.parametrize(("name", "template"), RUNS, ids=str)
def test_each_template_matches_eager(name: str, template: Template, cuda: str) -> None:
    problem = PROBLEMS[name]
    given = tuple(x.to(cuda) for x in problem.inputs)
    here = replace(problem, inputs=given)
    eager, exact = problem.fn(*given), problem.fn(*(x.double() for x in given))
    spreads = [_tupled(problem.fn(*(_moved(x, way) for x in given))) for way in DIRECTIONS]
    for _ in range(2):  # counters of shared tiles are left as they were found
        got = run(here, template, device=cuda)
        assert_as_good_as_eager(_tupled(got), _tupled(eager), _tupled(exact), spreads)


def _moved(x: Tensor, direction: str) -> Tensor:
    return moved(x, torch.finfo(x.dtype).eps, direction)


def _tupled(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


# -- max-autotune --------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuned:
    """A function compiled with max-autotune, and whether its sizes are dynamic."""

    name: str
    fn: Callable[..., Any]
    inputs: Callable[[], tuple[Tensor, ...]]
    dynamic: bool = False

    def __str__(self) -> str:
        return self.name


def on_cuda(*shapes: tuple[int, ...], dtype: torch.dtype = F32) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randn(shape, device="cuda").to(dtype) for shape in shapes)


def cat_of_addmm(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.cat([torch.addmm(a, b, c), torch.addmm(b, c, a)], 1)


def relu_mul(x: Tensor, w: Tensor, bias: Tensor, factor: Tensor) -> Tensor:
    return F.relu(torch.matmul(x.t(), w.t()) + bias) * factor


TUNED = [
    Tuned("mm", torch.mm, on_cuda((100, 10), (10, 100))),
    Tuned("mm, dynamic", torch.mm, on_cuda((100, 10), (10, 100)), dynamic=True),
    Tuned("mm of no rows", torch.mm, on_cuda((0, 10), (10, 100))),
    Tuned("addmm", torch.addmm, on_cuda((100,), (100, 10), (10, 100))),
    Tuned("addmm of no rows", torch.addmm, on_cuda((100,), (0, 10), (10, 100))),
    Tuned(
        "addmm, bfloat16",
        torch.addmm,
        on_cuda((768,), (512, 256), (256, 768), dtype=torch.bfloat16),
    ),
    Tuned("bmm", torch.bmm, on_cuda((4, 100, 64), (4, 64, 100), dtype=torch.bfloat16)),
    Tuned(
        "sum of two",
        lambda a, b, c, d: a @ b + c @ d,
        on_cuda((2048, 64), (64, 1536), (2048, 64), (64, 1536)),
    ),
    Tuned("cat of addmm", cat_of_addmm, on_cuda((4, 4), (4, 4), (4, 4))),
    Tuned(
        "mlp",
        lambda x, a, b: F.gelu(x @ a) @ b,
        on_cuda((256, 512), (512, 1024), (1024, 512), dtype=torch.bfloat16),
    ),
    Tuned(
        "dynamic epilogue",
        relu_mul,
        on_cuda((4, 5), (3, 4), (3,), (5, 3), dtype=torch.half),
        dynamic=True,
    ),
    Tuned(
        "gate and up",
        lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u),
        on_cuda((1024, 512), (1024, 512), (1024, 512), dtype=torch.bfloat16),
    ),
]


@pytest.mark.parametrize("row", TUNED, ids=str)
def test_max_autotune_matches_eager(row: Tuned, cuda: str) -> None:
    inputs = row.inputs()
    candidate = torch.compile(
        row.fn, backend="perfuse", mode="max-autotune-no-cudagraphs", dynamic=row.dynamic
    )
    eager, exact = row.fn(*inputs), row.fn(*(x.double() for x in inputs))
    for _ in range(2):
        assert_as_good_as_eager(candidate(*inputs), eager, exact)


def test_decisions_name_every_rival(cuda: str) -> None:
    x, w, bias = (torch.randn(s, device=cuda).bfloat16() for s in ((512, 512), (512, 512), (512,)))

    def fn(x: Tensor) -> Tensor:
        return F.gelu(F.linear(x, w, bias))

    candidate = torch.compile(fn, backend="perfuse", mode="max-autotune-no-cudagraphs")
    told = perfuse.explain(candidate, x)
    decision = told.graphs[0].decisions[0]
    assert decision.rivals[0].choice.source == "library"
    assert len(decision.rivals) > 5 and any(r.median_us for r in decision.rivals[1:])
    assert "Measured" in str(told)


@pytest.mark.parametrize("kind", ["mm", "addmm", "bmm"])
def test_rows_of_50304_in_a_matrix_of_50257(kind: str, cuda: str) -> None:
    x = torch.randn(50304 * 32768, device=cuda, dtype=torch.bfloat16)
    x = x.as_strided((50257, 32768), (1, 50304))
    y, b = (torch.randn(s, device=cuda, dtype=torch.bfloat16) for s in ((32768, 768), (768,)))
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "mm": lambda x, y: x @ y,
        "addmm": lambda x, y: torch.addmm(b, x, y),
        "bmm": lambda x, y: torch.bmm(x[None], y[None]),
    }
    fn = functions[kind]
    candidate = torch.compile(fn, backend="perfuse", mode="max-autotune-no-cudagraphs")
    got, rows = candidate(x, y), slice(50200, 50257)
    exact = x[rows].float() @ y.float() + (b if kind == "addmm" else 0)
    assert_as_good_as_eager(got.view(50257, 768)[rows], fn(x, y).view(50257, 768)[rows], exact)


def test_dropout_after_a_matmul(cuda: str) -> None:
    a, b = torch.randn(128, 128, device=cuda), torch.randn(128, 128, device=cuda)
    fn = lambda a, b: F.dropout(a @ b, 0.1)  # noqa: E731
    candidate = torch.compile(fn, backend="perfuse", mode="max-autotune-no-cudagraphs")
    got, plain = candidate(a, b), a @ b
    kept = got != 0
    assert 0.8 < float(kept.float().mean()) < 0.98
    assert torch.allclose(got[kept], (plain / 0.9)[kept], atol=1e-3, rtol=1e-3)
