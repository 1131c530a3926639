"""Each rule by what is left of a small graph, and by values, signs of zero and NaN included."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from perfuse.graph.canonicalize import canonicalize, schema_spelling
from perfuse.graph.dead_code import eliminate_dead_code
from perfuse.graph.fold_constants import fold_constants
from perfuse.graph.passes import ATEN_PASSES
from perfuse.graph.simplify import simplify
from tests.unit.graph.tracing import after_passes, assert_same_values, calls, traced

SPECIAL = torch.tensor([[0.0, -0.0, 1.5], [float("nan"), float("inf"), -float("inf")]])
INTS = torch.arange(-3, 3).view(2, 3)
HALF = SPECIAL.to(torch.bfloat16)
bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64

Case = tuple[Callable[..., Any], Tensor, list[str]]
SIN = "sin(x_1)"
CASES: list[Case] = [
    (lambda x: (x + 0).sin(), INTS, [SIN]),
    (lambda x: (x + 0).sin(), SPECIAL, ["add(x_1, 0)", "sin(add)"]),
    (lambda x: (x - 0).sin(), SPECIAL, [SIN]),
    (lambda x: (x - (-0.0)).sin(), SPECIAL, ["sub(x_1, -0.0)", "sin(sub)"]),
    (lambda x: (x * 1).sin(), SPECIAL, [SIN]),
    (lambda x: (x * 0).sin(), SPECIAL, ["mul(x_1, 0)", "sin(mul)"]),
    (lambda x: (x / 1).sin(), SPECIAL, [SIN]),
    (lambda x: (x / 1).sin(), INTS, ["div(x_1, 1)", "sin(div)"]),
    (lambda x: (x * 1.0).sin(), INTS, ["mul(x_1, 1.0)", "sin(mul)"]),
    (lambda x: x**1 + 1, SPECIAL, ["add(x_1, 1)"]),
    (lambda x: x**2, SPECIAL, ["mul(x_1, x_1)"]),
    (lambda x: x**0.5, SPECIAL, ["sqrt(x_1)"]),
    (lambda x: x.neg().neg().sin(), SPECIAL, [SIN]),
    (lambda x: x.relu().relu(), SPECIAL, ["relu(x_1)"]),
    (lambda x: x.t().t().sin(), SPECIAL, [SIN]),
    (lambda x: x.permute(1, 0).transpose(0, 1).sin(), SPECIAL, [SIN]),
    (lambda x: x.view(6).view(3, 2).sin(), SPECIAL, ["view(x_1, [3, 2])", "sin(view_default)"]),
    (lambda x: x.view(6).view(2, 3).sin(), SPECIAL, [SIN]),
    (lambda x: x.expand(2, 3).sin(), SPECIAL, [SIN]),
    (lambda x: x.clone().sin(), SPECIAL, [SIN]),
    (lambda x: x[:].sin(), SPECIAL, [SIN]),
    (lambda x: x.to(f64).to(f32).sin(), SPECIAL, [SIN]),
    (lambda x: x.to(f32).to(bf16).sin(), HALF, [SIN]),
    (lambda x: x.to(bf16).to(f32), SPECIAL, ["_to_copy(x_1, dtype=torch.bfloat16)"] + ["_to_copy"]),
    (lambda x: x.to(f32).to(f64), HALF, ["_to_copy(x_1, dtype=torch.float64)"]),
    (lambda x: torch.cat([x]).sin(), SPECIAL, [SIN]),
    (lambda x: x.view(2, 1, 3).sum(1).sin(), INTS, ["view", "squeeze", "sin"]),
    (lambda x: x.view(2, 1, 3).sum(1).sin(), SPECIAL, ["view", "sum", "sin"]),
    (lambda x: torch.where(torch.ones(2, 3, dtype=torch.bool), x, x * 2).sin(), SPECIAL, [SIN]),
    (lambda x: torch.where(x > 0, x, x).sin(), SPECIAL, [SIN]),
    (lambda x: (x * torch.ones(())).sin(), SPECIAL, [SIN]),
    # A result must be new memory: these copies are what makes it so.
    (lambda x: x.clone(), SPECIAL, ["clone(x_1)"]),
    (lambda x: x * 1, SPECIAL, ["mul(x_1, 1)"]),
]


def clean(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    return eliminate_dead_code(simplify(canonicalize(gm)))


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_what_is_left(case: Case) -> None:
    fn, x, expected = case
    gm = traced(fn, x, decompose=True)
    text = calls(gm)
    result = clean(gm)
    assert calls(gm) == text, "the input was modified"
    got = calls(result)
    assert len(got) == len(expected), got
    for line, start in zip(got, expected, strict=True):
        assert line.startswith(start), got
    assert_same_values(gm, result, x)


def test_values_keep_their_meta() -> None:
    gm = clean(traced(lambda x: (x.t().t() ** 2).sum(), SPECIAL))
    for node in gm.graph.nodes:
        assert node.op == "output" or "val" in node.meta


def test_spelling_follows_the_schema() -> None:
    aten = torch.ops.aten
    args, kwargs = schema_spelling(aten.sum.dim_IntList, (1,), {"keepdim": False, "dim": [0]})
    assert (args, kwargs) == ((1, [0]), {})
    args, kwargs = schema_spelling(aten.add.Tensor, (1, 2), {"alpha": 1})
    assert (args, kwargs) == ((1, 2), {})
    args, kwargs = schema_spelling(aten.add.Tensor, (1, 2), {"alpha": 1.0})
    assert kwargs == {"alpha": 1.0}


def test_other_names_for_a_tensor_go() -> None:
    gm = canonicalize(traced(lambda x: x.detach().sin(), SPECIAL))
    assert calls(gm) == [SIN]


def test_constants_become_one_full_or_a_table() -> None:
    def f(x: Tensor) -> Tensor:
        uniform = torch.ones(3) * 2 + torch.zeros(3)
        table = torch.arange(3) * 2.0 + 1
        return x * uniform + table

    gm = traced(f, SPECIAL, decompose=True)
    folded = eliminate_dead_code(fold_constants(gm))
    assert [line.split("(")[0] for line in calls(folded)] == ["full", "mul", "add"]
    assert len(folded.graph.find_nodes(op="get_attr")) == 1
    assert_same_values(gm, folded, SPECIAL)


def test_large_constants_stay() -> None:
    gm = traced(lambda x: x + torch.ones(2000) * 2, torch.randn(2000), decompose=True)
    assert calls(fold_constants(gm)) == calls(gm)


def test_effects_stay_and_unused_values_go() -> None:
    def f(x: Tensor) -> Tensor:
        torch.rand_like(x)
        x.sin()
        x.add_(1)
        return x.cos()

    got = calls(eliminate_dead_code(traced(f, torch.randn(3))))
    assert [line.split("(")[0] for line in got] == ["add_", "cos"]


def test_every_pass_is_recorded() -> None:
    rows: list[tuple[str, int, int, float]] = []
    gm = traced(lambda x: x.sin() + x.sin(), SPECIAL)
    result = after_passes(gm, record=lambda *row: rows.append(row))
    assert [row[0] for row in rows] == [name for name, _ in ATEN_PASSES]
    assert calls(result) == ["sin(x_1)", "add(sin, sin)"]


def test_products_with_frozen_weights_are_batched() -> None:
    weights = [torch.randn(8, 8) for _ in range(3)]

    def f(x: Tensor) -> Tensor:
        a, b, c = (torch.mm(x, w) for w in weights)
        return (a.sin() + b) * c

    x = torch.randn(4, 8)
    gm = make_fx(f, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    result = after_passes(gm)
    assert [line.split("(")[0] for line in calls(result)].count("bmm") == 1
    torch.testing.assert_close(result(x), f(x))


UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x * 1,
    lambda x: x + 0,
    lambda x: -x,
    lambda x: x.t(),
    lambda x: x.clone(),
    lambda x: x.to(f64).to(x.dtype),
    lambda x: x.reshape(9).reshape(3, 3),
    lambda x: x**2,
    lambda x: torch.where(x > 0, x, x),
    lambda x: x * torch.ones(3, 3),
)
STEPS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 99), st.integers(0, 99)), max_size=16)


@settings(max_examples=25, deadline=None)
@given(STEPS)
def test_random_graphs_keep_their_values(steps: list[tuple[int, int, int]]) -> None:
    def f(x: Tensor) -> list[Tensor]:
        values = [x]
        for op, i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            values.append(UNARY[op](a) if op < len(UNARY) else a - b)
        return [v.contiguous() for v in values[-3:]]

    x = torch.randn(3, 3)
    gm = traced(f, x, decompose=True)
    assert_same_values(gm, after_passes(gm), x)


VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.view(2, 2, 4).transpose(0, 1).reshape(4, 4),  # a copy, reshaped
    lambda x: x.reshape(2, 8).reshape(4, 4),
    lambda x: x.view(16).view(4, 4),
    lambda x: x[:],
    lambda x: x.clone(),
    lambda x: x.view(4, 1, 4).squeeze(1),
    lambda x: x * 2,
    lambda x: x + 0,
)


def shared(values: list[Tensor]) -> list[tuple[int, int]]:
    starts = [v.untyped_storage().data_ptr() for v in values]
    return [(i, j) for j, start in enumerate(starts) for i in range(j) if starts[i] == start]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(VIEWS) - 1), st.integers(0, 3)), max_size=8))
@example([(6, 0), (0, 0), (2, 0)])
def test_results_go_on_sharing_memory(steps: list[tuple[int, int]]) -> None:
    """Equal copies may become one, reshaped twice: lowering stores them apart."""

    def f(x: Tensor) -> list[Tensor]:
        values = [x]
        for op, back in steps:
            values.append(VIEWS[op](values[max(len(values) - 1 - back, 0)]))
        return [v for v in values[1:] if v is not x]

    x = torch.arange(16).view(4, 4)
    gm = traced(f, x, decompose=True)
    result = after_passes(gm)
    assert_same_values(gm, result, x)
    assert {*shared([x, *result(x)])} >= {*shared([x, *gm(x)])}
