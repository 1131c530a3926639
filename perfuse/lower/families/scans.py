"""Running sums and products along one dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perfuse.ir import expr as ex
from perfuse.ir.program import Axis, Loop
from perfuse.lower.builder import Builder
from perfuse.lower.families.reductions import accumulate_dtype
from perfuse.lower.registry import lowers
from perfuse.lower.tensor import Tensor, cast_tensor, positions


def _scan(kind: str) -> Callable[..., Tensor]:
    def lower(builder: Builder, x: Tensor, dim: int, dtype: Any = None) -> Tensor:
        result = accumulate_dtype(x, dtype)
        if x.ndim == 0 or x.shape[dim] == 1 or any(size == 0 for size in x.shape):
            return cast_tensor(x, result)
        along = f"d{dim % x.ndim}"
        axes = [Axis(f"d{i}", size) for i, size in enumerate(x.shape) if size != 1]
        axes.sort(key=lambda axis: axis.name == along)
        buffer = builder.new_buffer(result, x.shape)
        index = buffer.index(positions(x.shape))
        value = ex.cast(x.value, result)
        builder.nodes.append(Loop(buffer.name, tuple(axes), kind, value, index, builder.origin))
        return builder.tensor_of(buffer)

    return lower


lowers("aten.cumsum.default")(_scan("cumsum"))
lowers("aten.cumprod.default")(_scan("cumprod"))
