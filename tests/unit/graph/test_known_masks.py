"""Masks that are known before the first call: what is said instead, and what must stay as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.nn.functional import scaled_dot_product_attention as attend

from perfuse.graph.known_masks import use_known_masks

ROWS = 9


def operands() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, ROWS, 16, generator=generator) for _ in range(3))
    return q, k, v


def said(fn: Callable[..., Any], *args: Any, dynamic: bool = False) -> list[dict[str, Any]]:
    """The keywords of every attention after the pass, which must not change the result."""
    found: list[dict[str, Any]] = []

    def backend(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        made = use_known_masks(gm)
        found.extend(
            {k: v for k, v in n.kwargs.items() if k in ("attn_mask", "is_causal", "dropout_p")}
            for n in made.graph.nodes
            if "scaled_dot_product" in str(n.target)
        )
        return made.forward

    torch._dynamo.reset()
    got = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    torch.testing.assert_close(got, fn(*args))
    return found


def causal_by_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    positions = torch.arange(ROWS, device=q.device)
    packed = (torch.diff(positions[None], prepend=positions[None, :1] - 1) != 1).cumsum(-1)
    batch = torch.arange(1)[:, None, None, None]
    rows, columns = positions[None, None, :, None], positions[None, None, None, :]
    seen = rows.new_ones((), dtype=torch.bool) & (columns <= rows)
    seen = seen & (packed[batch, rows] == packed[batch, columns])
    return attend(q, k, v, seen.expand(2, -1, ROWS, ROWS), 0.0)


def causal_by_tril(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, attn_mask=torch.ones(ROWS, ROWS, dtype=torch.bool).tril(), scale=0.3)


def causal_by_minus_infinity(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, torch.full((ROWS, ROWS), float("-inf")).triu(1))


def causal_by_least_float(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    least = torch.finfo(torch.float32).min
    return attend(q, k, v, torch.full((ROWS, ROWS), least).triu(1)[None, None])


@pytest.mark.parametrize(
    "fn",
    [causal_by_positions, causal_by_tril, causal_by_minus_infinity, causal_by_least_float],
)
def test_a_causal_mask_is_said_as_such(fn: Callable[..., Tensor]) -> None:
    (kwargs,) = said(fn, *operands())
    assert kwargs["is_causal"] is True and "attn_mask" not in kwargs


def test_a_mask_that_hides_nothing_is_none() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        padding = torch.ones(2, ROWS, device=q.device).bool()
        return attend(q, k, v, padding[:, None, None, :].expand(2, 1, ROWS, ROWS), 0.0)

    assert said(fn, *operands()) == [{"dropout_p": 0.0, "is_causal": False}]


def shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, torch.ones(ROWS, ROWS, dtype=torch.bool).tril(1))


def weighted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, torch.ones(ROWS, ROWS).tril())


def more_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = torch.cat([k, k], 2), torch.cat([v, v], 2)
    return attend(q, k, v, torch.ones(ROWS, 2 * ROWS, dtype=torch.bool).tril())


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool)
    mask[:, ROWS // 2 :] = False
    return attend(q, k, v, mask)


def written_through_a_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(ROWS, ROWS)
    mask.view(-1)[: ROWS // 2].sub_(3.0)
    return attend(q, k, v, mask + 0)


def random(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.rand(ROWS, ROWS) < 2
    return attend(q, k, v, mask)


@pytest.mark.parametrize(
    "fn", [shifted, weighted, more_keys, written, written_through_a_view, random]
)
def test_every_other_mask_stays(fn: Callable[..., Tensor]) -> None:
    (kwargs,) = said(fn, *operands())
    assert kwargs.get("is_causal") is not True


def test_operators_may_be_methods() -> None:
    graph = Graph()
    query = graph.placeholder("query")
    rows = graph.call_function(torch.arange, (ROWS,))
    columns = graph.call_method("unsqueeze", (rows, 0))
    mask = graph.call_method("__le__", (columns, graph.call_method("unsqueeze", (rows, 1))))
    mask.meta["example_value"] = torch.empty(ROWS, ROWS, dtype=torch.bool)
    graph.output(graph.call_function(attend, (query, query, query, mask)))
    made = use_known_masks(GraphModule(torch.nn.Module(), graph))
    (call,) = (node for node in made.graph.nodes if node.target is attend)
    assert call.kwargs["is_causal"] is True


def test_a_mask_gets_dense_rows_for_a_gpu() -> None:
    graph = Graph()
    query, mask = (graph.placeholder(name) for name in ("query", "mask"))
    with FakeTensorMode():
        fake = torch.empty(2, 3, ROWS, 16, dtype=torch.bfloat16, device="cuda")
        query.meta["example_value"] = fake
        mask.meta["example_value"] = fake.new_empty(1, ROWS, ROWS, 3).permute(0, 3, 1, 2)
    calls = [graph.call_function(attend, (query,) * 3, {"attn_mask": mask}) for _ in range(2)]
    graph.output(tuple(calls))
    made = use_known_masks(GraphModule(torch.nn.Module(), graph))
    masks = [n.kwargs["attn_mask"] for n in made.graph.nodes if n.target is attend]
    assert [n.target for n in masks] == ["contiguous", "contiguous"]


def test_a_mask_of_the_caller_stays() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attend(q, k, v, attn_mask=mask & torch.ones(ROWS, ROWS).tril().bool())

    (kwargs,) = said(fn, *operands(), torch.ones(ROWS, ROWS, dtype=torch.bool))
    assert kwargs["attn_mask"] is not None


def test_a_mask_of_unknown_size_stays() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, attn_mask=torch.ones(q.shape[2], q.shape[2]).bool().tril())

    (kwargs,) = said(fn, *operands(), dynamic=True)
    assert kwargs["attn_mask"] is not None
