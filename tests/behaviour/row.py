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
from tests.harness.compare import DIRECTIONS, complaints, moved
from tests.harness.devices import all_onto

F32 = torch.float32
SMALL = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Behaviour:
    name: str
    function: Callable[..., Any]
    inputs: Callable[[], list[Any]]
    num_calls: int = 1  # on the same inputs: what one call changed, the next one sees
    dynamic: bool = False
    widens: bool = False  # small floats too have a float64 reference: no dtype is written in it

    def __str__(self) -> str:
        return self.name

    def check(self, device: str = "cpu", backend: str | None = None) -> None:
        torch._dynamo.reset()
        eager = observe(self.function, all_onto(self.inputs(), device), self.num_calls)
        with eager_random(backend):
            candidate = compiled(self.function, backend, dynamic=self.dynamic)
            got = observe(candidate, all_onto(self.inputs(), device), self.num_calls)
        assert got["aliases"] == eager["aliases"], "outputs share memory with other tensors"
        exact, *spreads = (exact_of(self, device, way) for way in ("", *DIRECTIONS))
        found = complaints(got["values"], eager["values"], exact, spreads)
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


def exact_of(row: Behaviour, device: str, direction: str) -> Any:
    """The same calls in float64, inputs moved by one rounding; nothing where the row is about
    dtypes."""
    inputs = all_onto(row.inputs(), device)
    given = [x for x in inputs if isinstance(x, Tensor)]
    small = SMALL if row.widens else (F32,)
    floats = [x for x in given if x.is_floating_point() or x.is_complex()]
    if not given or any(x.dtype not in small for x in floats):
        return None
    wide = [
        moved(x, torch.finfo(x.dtype).eps, direction)
        if isinstance(x, Tensor) and x.dtype in small
        else x
        for x in inputs
    ]
    try:
        return observe(row.function, wide, row.num_calls)["values"]
    except RuntimeError:
        return None


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
