"""`rank_for`: the templates of a function's matmuls, ranked for a GPU you do not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from perfuse.autotune.rank import Ranking, rank_templates
from perfuse.capture.cross_compile import cross_compile
from perfuse.capture.request import Request
from perfuse.context import Context
from perfuse.errors import ConfigError
from perfuse.pipeline import fused_plan
from perfuse.torch_compat.graphs import GraphKind

_DTYPES = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i8": torch.int8,
}  # fmt: skip
_SYNTAX = "expected [batch x] rows x columns x depth, dtype and layout: 4096x4096x1024:bf16:NT"


def rank_for(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: str,
    dynamic: bool | None = False,
) -> list[Ranking]:
    """Generate and compile the templates of each matmul of `fn` for a target such as "cuda:90".

    No such GPU is needed: registers, spills and shared memory are read from the machine code, and
    times come from a model.
    """
    found: dict[Any, Ranking] = {}

    def take(kind: GraphKind, graph: GraphModule, context: Context) -> None:
        if context.target.gpu is None:
            raise ConfigError(f"{target} is not a GPU", hint='name one, such as "cuda:90".')
        for ranking in rank_templates(fused_plan(graph, context), context):
            found.setdefault(ranking.question, ranking)

    cross_compile(Request.of(fn, None, None), args, kwargs or {}, target, dynamic, take)
    return list(found.values())


def matmul_inputs(text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands without memory for a matmul given as sizes, dtype and layout: 64x32x16:f16:NT."""
    sizes, *rest = text.split(":")
    dtypes = [_DTYPES[word.lower()] for word in rest if word.lower() in _DTYPES]
    layouts = [word.upper() for word in rest if word.upper() in ("NN", "NT", "TN", "TT")]
    numbers = [int(word) for word in sizes.split("x") if word.isdecimal()]
    is_known = len(numbers) == sizes.count("x") + 1 and len(numbers) in (3, 4)
    if not is_known or len(dtypes) + len(layouts) < len(rest) or 0 in numbers:
        raise ConfigError(f"{text!r} does not describe a matmul", hint=f"{_SYNTAX}.")
    *batch, rows, columns, depth = numbers
    layout, dtype = (layouts or ["NN"])[-1], (dtypes or [torch.bfloat16])[-1]
    shapes = ((rows, depth), (depth, columns))
    left, right = (
        _operand((*batch, *shape), dtype, is_transposed=letter == "T")
        for shape, letter in zip(shapes, layout, strict=True)
    )
    return left, right


def _operand(shape: tuple[int, ...], dtype: torch.dtype, *, is_transposed: bool) -> torch.Tensor:
    """An operand whose elements share memory: it is traced, and never read."""
    *batch, rows, columns = shape
    if not is_transposed:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty((*batch, columns, rows), dtype=dtype, device="meta").mT
