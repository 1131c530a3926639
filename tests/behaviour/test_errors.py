"""A user's mistake looks as it does in eager: the same kind of error, eager's words in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.behaviour.row import randn
from tests.harness.backend import compiled

MISTAKES: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "add_shapes": (lambda x, y: x + y, [randn(3, 4), randn(5)]),
    "matmul_shapes": (lambda x, y: x @ y, [randn(3, 4), randn(5, 6)]),
    "cat_shapes": (lambda x, y: torch.cat([x, y]), [randn(3, 4), randn(3, 5)]),
    "reshape": (lambda x: x.reshape(5, 7), [randn(3, 4)]),
    "dimension": (lambda x: x.sum(dim=3), [randn(3, 4)]),
    "index": (lambda x: x[torch.tensor([9])], [randn(3, 4)]),
    "embedding": (torch.nn.functional.embedding, [torch.tensor([7]), randn(3, 4)]),
    "python": (lambda x: x.no_such_method(), [randn(3)]),
    "raised": (lambda x: (_ for _ in ()).throw(KeyError("mine")), [randn(3)]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_raises_like_eager(name: str) -> None:
    function, args = MISTAKES[name]
    torch._dynamo.reset()
    with pytest.raises(Exception) as eager:
        function(*args)
    with pytest.raises(Exception) as mine:
        compiled(function)(*args)
    # Dynamo may report a mistake it sees while tracing as its own kind of RuntimeError.
    assert isinstance(mine.value, (eager.type, RuntimeError))


def test_works_again_after_a_mistake() -> None:
    torch._dynamo.reset()
    candidate = compiled(lambda x, y: x + y)
    with pytest.raises(Exception):  # noqa: B017
        candidate(randn(3, 4), randn(5))
    assert torch.equal(candidate(torch.ones(3), torch.ones(3)), torch.full((3,), 2.0))
