"""A compile that fails: told with what was compiled, or run eagerly with one warning."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph

import perfuse
from perfuse import pipeline
from perfuse.capture.failure import CompileWarning
from perfuse.graph import simplify
from perfuse.graph.rewrite import Rule
from perfuse.lower.registry import LOWERINGS


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with perfuse.testing.fresh_cache():
        yield


def function(x: Tensor) -> Tensor:
    return x.exp().sum(-1)


def break_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("no such luck")

    monkeypatch.setattr(pipeline, "fuse", broken)


def test_the_error_names_graph_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    break_schedule(monkeypatch)
    with pytest.raises(Exception, match="no such luck") as caught:
        torch.compile(function, backend="perfuse")(torch.randn(3, 4))
    text = str(caught.value)
    assert "inference graph" in text
    assert "test_failure.py" in text
    assert "on_error" in text


@pytest.mark.parametrize("stage", ["lowering", "rule"])
def test_the_error_names_the_op_whatever_its_frames_hold(
    monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        node = Graph().placeholder("misleading")
        raise ValueError(f"no such luck with {node.name}")

    if stage == "lowering":
        monkeypatch.setitem(LOWERINGS, torch.ops.aten.exp.default, broken)
    else:
        monkeypatch.setitem(simplify._INDEXED, "exp", [Rule("broken", ("exp",), broken)])
    with pytest.raises(Exception, match=r"failed on aten\.exp\.default: ValueError: no such"):
        torch.compile(function, backend="perfuse")(torch.randn(3, 4))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_eager_instead(monkeypatch: pytest.MonkeyPatch, needs_grad: bool) -> None:
    break_schedule(monkeypatch)
    x = torch.randn(3, 4, requires_grad=needs_grad)
    candidate = torch.compile(function, backend="perfuse")
    with perfuse.config.patch(on_error="eager"), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        got = candidate(x)
        assert torch.equal(got, function(x))
        if needs_grad:
            got.sum().backward()
            assert torch.equal(x.grad, x.detach().exp())
        candidate(x)
    told = [w for w in seen if issubclass(w.category, CompileWarning)]
    assert len(told) == (2 if needs_grad else 1)  # one for each graph


@pytest.mark.parametrize(
    ("wrong", "given"),
    [
        (lambda x: x.max(), torch.zeros(0, 3)),
        (lambda x: x.min(0), torch.zeros(0, 3)),
        (lambda x: x - x.flip(0), torch.tensor([True, False])),
    ],
    ids=["max_of_nothing", "min_of_nothing", "bool_minus_bool"],
)
def test_what_eager_refuses_is_refused_alike(wrong: Callable[[Tensor], Any], given: Tensor) -> None:
    with pytest.raises((RuntimeError, IndexError)) as eager:
        wrong(given)
    candidate = torch.compile(wrong, backend="perfuse", dynamic=True)
    with pytest.raises(type(eager.value), match=re.escape(str(eager.value))):
        candidate(given)


def test_a_bad_index_is_an_index_error_and_the_next_call_is_right() -> None:
    table = torch.randn(5, 3)
    candidate = torch.compile(lambda i, t: F.embedding(i, t) * 2, backend="perfuse")
    good, bad = torch.tensor([1, 4]), torch.tensor([1, 7])
    assert torch.equal(candidate(good, table), table[good] * 2)
    for _ in range(2):
        with pytest.raises(IndexError, match="index 7 is out of bounds for a dimension of size 5"):
            candidate(bad, table)
        assert torch.equal(candidate(good, table), table[good] * 2)


@pytest.mark.parametrize("index", [7, -6, 2**62, -(2**62)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_bad_index_is_named_as_it_was_given(index: int, dynamic: bool) -> None:
    torch._dynamo.reset()
    candidate = torch.compile(lambda x, i: x[i] + 1, backend="perfuse", dynamic=dynamic)
    text = f"index {index} is out of bounds for a dimension of size 5"
    with pytest.raises(IndexError, match=text):
        candidate(torch.randn(5, 3), torch.tensor([1] * 20 + [index]))
