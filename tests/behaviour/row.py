"""A behaviour as a row: a function, its inputs, and all that eager lets a user see of the call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.harness.backend import compiled, eager_random
from tests.harness.compare import complaints

F32 = torch.float32


@dataclass(frozen=True, slots=True)
class Behaviour:
    name: str
    function: Callable[..., Any]
    inputs: Callable[[], list[Any]]
    num_calls: int = 1  # on the same inputs: what one call changed, the next one sees
    dynamic: bool = False

    def __str__(self) -> str:
        return self.name

    def check(self) -> None:
        torch._dynamo.reset()
        eager = observe(self.function, self.inputs(), self.num_calls)
        with eager_random():
            candidate = compiled(self.function, dynamic=self.dynamic)
            got = observe(candidate, self.inputs(), self.num_calls)
        assert got["aliases"] == eager["aliases"], "outputs share memory with other tensors"
        exact = exact_of(self)
        found = complaints(got["values"], eager["values"], exact)
        assert not found, "\n".join(found)


def observe(function: Callable[..., Any], inputs: list[Any], num_calls: int) -> dict[str, Any]:
    """Outputs of each call, the inputs afterwards, gradients, and which of them share memory."""
    torch.manual_seed(0)
    values: list[Any] = []
    outputs: Any = None
    for _ in range(num_calls):
        outputs = function(*inputs)
        values.append(pytree.tree_map(snapshot, outputs))
    values.append(pytree.tree_map(snapshot, inputs))
    values.append(gradients(outputs, inputs))
    return {"values": values, "aliases": aliases(outputs, inputs)}


def exact_of(row: Behaviour) -> Any:
    """The same calls in float64, or nothing where the row is about dtypes."""
    inputs = row.inputs()
    given = [x for x in inputs if isinstance(x, Tensor)]
    if not given or any(x.dtype != F32 for x in given if x.is_floating_point() or x.is_complex()):
        return None
    wide = [x.detach().double().requires_grad_(x.requires_grad) if is_f32(x) else x for x in inputs]
    try:
        return observe(row.function, wide, row.num_calls)["values"]
    except RuntimeError:
        return None


def is_f32(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == F32


def snapshot(x: Any) -> Any:
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def gradients(outputs: Any, inputs: list[Any]) -> list[Tensor | None]:
    roots = [o for o in pytree.tree_leaves(outputs) if isinstance(o, Tensor) and o.requires_grad]
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    if not roots or not wanted:
        return []
    seeds = [torch.ones_like(r) for r in roots]
    return list(torch.autograd.grad(roots, wanted, seeds, allow_unused=True))


def aliases(outputs: Any, inputs: list[Any]) -> list[tuple[int, int]]:
    """Pairs that live in the same storage, of outputs and inputs in one list."""
    every = [x for x in pytree.tree_leaves((outputs, inputs)) if isinstance(x, Tensor)]
    places = [x.untyped_storage().data_ptr() if x.numel() else -i for i, x in enumerate(every)]
    return [
        (i, j)
        for i in range(len(every))
        for j in range(i + 1, len(every))
        if places[i] == places[j]
    ]


def randn(*shape: int, dtype: torch.dtype = F32, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 17)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


def twice(module: torch.nn.Module) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The module and an equal one, for eager and for the compiler."""
    return module, copy.deepcopy(module)
