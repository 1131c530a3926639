"""Values that eager's kernels refuse: a compiled function must refuse them too.

Each row is a function with inputs that it takes and inputs that differ in one value only, which
it does not. The variant "dynamic" asks for dynamic shapes from the first call on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sweep.practices import DYNAMIC
from tests.sweep.subject import Call, Compile, NotMade, Subject, accepted, noise

Function = Callable[..., Tensor]
REFUSED = (RuntimeError, IndexError, ZeroDivisionError)

ROW, TABLE = noise(6), noise(5, 4)
HALF = torch.tensor([0.5, 0.25, 0.75])
ABOVE, BELOW = torch.tensor([0.5, 1.5, 0.75]), torch.tensor([0.5, -0.25, 0.75])
SPREAD = torch.tensor([0.5, 0.1, 0.9])
PLACES = torch.tensor([1, 4, 0])
OUTSIDE, NEGATIVE, FAR = torch.tensor([1, 7, 0]), torch.tensor([1, -1, 0]), torch.tensor([1, -7, 0])
COUNTS, DIVISORS, ZERO = torch.tensor([7, 8, 9]), torch.tensor([1, 2, 4]), torch.tensor([1, 0, 4])
SQUARE = torch.eye(3) + 0.1 * noise(3, 3)
SYMMETRIC = SQUARE @ SQUARE.mT

# A function, the inputs that stay, the last input as it should be and as it should not be.
REFUSALS: dict[str, tuple[Function, tuple[Tensor, ...], Tensor, Tensor]] = {
    "probability": (lambda t, x: F.binary_cross_entropy(x, t), (SPREAD,), HALF, ABOVE),
    "probability_below": (lambda t, x: F.binary_cross_entropy(x, t), (SPREAD,), HALF, BELOW),
    "label": (lambda x, t: F.binary_cross_entropy(x, t), (SPREAD,), HALF, ABOVE),
    "chance": (lambda x: torch.bernoulli(x) * 2, (), HALF, ABOVE),
    "rate": (lambda x: torch.poisson(x) * 2, (), HALF, BELOW),
    "deviation": (lambda m, x: torch.normal(m, x) * 2, (SPREAD,), HALF, BELOW),
    "weights": (lambda x: torch.multinomial(x, 2) * 2.0, (), HALF, BELOW),
    "index": (lambda x, i: x[i] * 2, (ROW,), PLACES, OUTSIDE),
    "index_far_below": (lambda x, i: x[i] * 2, (ROW,), PLACES, FAR),
    "index_select": (lambda x, i: x.index_select(0, i) * 2, (ROW,), PLACES, NEGATIVE),
    "index_add": (lambda x, i: x.index_add(0, i, x[:3]) * 2, (ROW,), PLACES, OUTSIDE),
    "index_copy": (lambda x, i: x.index_copy(0, i, x[:3]) * 2, (ROW,), PLACES, OUTSIDE),
    "index_fill": (lambda x, i: x.index_fill(0, i, 1.0) * 2, (ROW,), PLACES, OUTSIDE),
    "index_put": (lambda x, i: x.index_put((i,), x[:3]) * 2, (ROW,), PLACES, OUTSIDE),
    "gather": (lambda x, i: x.gather(0, i) * 2, (ROW,), PLACES, NEGATIVE),
    "take": (lambda x, i: x.take(i) * 2, (ROW,), PLACES, OUTSIDE),
    "scatter": (lambda x, i: x.scatter(0, i, x[:3]) * 2, (ROW,), PLACES, NEGATIVE),
    "scatter_add": (lambda x, i: x.scatter_add(0, i, x[:3]) * 2, (ROW,), PLACES, OUTSIDE),
    "embedding": (lambda x, i: F.embedding(i, x) * 2, (TABLE,), PLACES, OUTSIDE),
    "embedding_below": (lambda x, i: F.embedding(i, x) * 2, (TABLE,), PLACES, NEGATIVE),
    "word": (lambda x, i: F.cross_entropy(x, i), (noise(3, 5),), PLACES, OUTSIDE),
    "one_hot": (lambda i: F.one_hot(i, 5) * 2.0, (), PLACES, OUTSIDE),
    "count": (lambda i: torch.bincount(i, minlength=9) * 2.0, (), PLACES, NEGATIVE),
    "floor_divide": (lambda x, y: (x // y) * 2.0, (COUNTS,), DIVISORS, ZERO),
    "remainder": (lambda x, y: (x % y) * 2.0, (COUNTS,), DIVISORS, ZERO),
    "cholesky": (lambda x: torch.linalg.cholesky(x) * 2, (), SYMMETRIC, -SYMMETRIC),
    "inverse": (lambda x: torch.linalg.inv(x) * 2, (), SQUARE, torch.zeros(3, 3)),
}


class Refusal(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.function = REFUSALS[name][0]

    def __deepcopy__(self, memo: Any) -> Refusal:
        return Refusal(self.name)

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def names() -> list[str]:
    return list(REFUSALS)


def make(name: str, variant: str) -> Subject:
    _, kept, right, wrong = REFUSALS[name]

    def run(model: nn.Module, call: Call, compile_it: Compile) -> list[Tensor]:
        """The result for what is right, and whether what is wrong is refused."""
        *args, right, wrong = call[0]
        torch.manual_seed(0)
        with torch.no_grad(), torch._dynamo.config.patch(DYNAMIC if variant == "dynamic" else {}):
            compiled = compile_it(model)
            results = [compiled(*args, right)]
            try:
                compiled(*args, wrong)
                return [*results, torch.zeros(())]
            except REFUSED:
                return [*results, torch.ones(())]

    subject = accepted(Subject(Refusal(name), ((*kept, right, wrong), {}), run=run))
    if not run(subject.model, subject.call, lambda function: function)[-1]:
        raise NotMade("eager takes these values too")
    return subject
