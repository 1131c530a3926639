"""Calls that are no ATen ops: custom ops that write, functions of functions, nested tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from tests.behaviour.row import Behaviour, randn
from tests.harness.backend import compiled


@torch.library.custom_op("perfuse_tests::count_up", mutates_args=("x", "others"))
def count_up(x: Tensor, others: list[Tensor], by: float = 1.0) -> None:
    for written in (x, *others):
        written.add_(by)


@torch.library.custom_op("perfuse_tests::signs", mutates_args=())
def signs(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    return x.abs(), [x + 1, x[x > 0], x.sum()]


@signs.register_fake
def _(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    chosen = x.new_empty(torch.library.get_ctx().new_dynamic_size())
    return torch.empty_like(x), [torch.empty_like(x), chosen, x.new_empty(())]


def reads_a_list(x: Tensor) -> Tensor:
    absolute, (more, chosen, total) = signs(x)
    return torch.cat([absolute * 2, more + total, chosen.exp()])


def writes_inputs(x: Tensor, y: Tensor) -> Tensor:
    count_up(x[0], [y], 2.0)
    return x * 3 + y


def writes_temporaries(x: Tensor, y: Tensor) -> Tensor:
    made = x * 2
    count_up(made, [])
    return (made * y).sum(0)


def attention_with_a_function(q: Tensor, k: Tensor) -> Tensor:
    found = flex_attention(q, k, k, score_mod=lambda score, b, h, i, j: score + (i - j) * 0.1)
    assert isinstance(found, Tensor)
    return found.sin()


def chosen_by_data(x: Tensor) -> Tensor:
    chosen: Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    return chosen * 2


def matrices() -> list[Tensor]:
    return [randn(4, 5), randn(4, 5)]


def heads() -> list[Tensor]:
    return [randn(1, 2, 16, 8), randn(1, 2, 16, 8)]


ROWS = (
    Behaviour("writes_inputs", writes_inputs, matrices, num_calls=2),
    Behaviour("writes_temporaries", writes_temporaries, matrices, dynamic=True),
    Behaviour("flex_attention", attention_with_a_function, heads),
    Behaviour("cond", chosen_by_data, lambda: [randn(7)]),
)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_call(row: Behaviour) -> None:
    row.check()


def test_a_list_among_the_results_of_a_call() -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        candidate = compiled(reads_a_list)
        for size in (7, 4, 9):
            x = randn(size)
            torch.testing.assert_close(candidate(x), reads_a_list(x))


def test_a_nested_tensor_is_computed_and_trained() -> None:
    torch._dynamo.reset()
    parts = [randn(2, 3), randn(4, 3)]
    results = []
    for run in (activation, compiled(activation)):
        given = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        made = run(given).values()
        made.sum().backward()
        results.append((made.detach(), given.grad.values()))
    torch.testing.assert_close(results[1], results[0])


def activation(x: Tensor) -> Tensor:
    return F.gelu(x * 2) + x.sin()
