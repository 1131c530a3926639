"""How far a result moves when every step on the way rounds at random: Monte Carlo arithmetic.

Moving the inputs by a rounding (`compare.moved`) tells what a backward-stable algorithm may cost.
Not every formula of PyTorch is one: the gradient of a product of reflectors divides by what has
cancelled. Where a result is outside of its limit, such formulas are told from wrong kernels by
running the program in float64 with each operation's result off by a random rounding of the narrow
type, operations taken apart into the ones of the core ATen set, as a compiler takes them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

NUM_DRAWS = 3
PARTS = torch._decomp.core_aten_decompositions()


class RandomRounding(TorchDispatchMode):
    """Results of operations on float64 are off by up to half of `eps`, each by its own draw."""

    def __init__(self, eps: float, seed: int) -> None:
        super().__init__()
        self.eps = eps
        self.seed = seed
        self.draws: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in PARTS:
            with self:
                return PARTS[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func.is_view or not is_arithmetic(func):
            return result
        if func._schema.is_mutable:
            for value in pytree.tree_leaves(result):
                if isinstance(value, Tensor):
                    value.copy_(self.rounded(value))
            return result
        return pytree.tree_map(self.rounded, result)

    def rounded(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype != torch.float64:
            return x
        draw = torch.rand(x.shape, generator=self.generator(x.device), device=x.device)
        return x * (1 + (draw - 0.5) * self.eps)

    def generator(self, device: torch.device) -> torch.Generator:
        if device not in self.draws:
            self.draws[device] = torch.Generator(device).manual_seed(self.seed)
        return self.draws[device]


def is_arithmetic(func: Any) -> bool:
    """It computes numbers; what only moves or makes them does not round."""
    return not func.overloadpacket.__name__.startswith(MOVING)


MOVING = ("clone", "copy", "_to_copy", "empty", "new_", "zeros", "zero_", "ones", "full", "cat",
          "index", "gather", "select", "where", "rand", "constant_pad", "fill", "scalar_tensor",
          "arange", "embedding", "flip", "repeat", "sort", "topk", "max_pool", "relu", "neg",
          "abs", "sign", "clamp", "maximum", "minimum", "amax", "amin", "scatter", "detach",
          "lift", "_unsafe_view", "slice_scatter", "triu", "tril", "diag")  # fmt: skip


def rounded_at_random(evaluate: Callable[[], Any], eps: float) -> list[Any]:
    """Results of a float64 program whose steps round, a few draws; none if it cannot run."""
    found = []
    for seed in range(NUM_DRAWS):
        with RandomRounding(eps, seed):
            found.append(evaluate())
    return [result for result in found if result is not None]
