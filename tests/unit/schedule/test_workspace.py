"""Workspace: what the table says a call takes is what it is seen to take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from perfuse.ir.dtype import from_torch
from perfuse.ir.program import Buffer, Extern, View, contiguous_strides
from perfuse.schedule.workspace import workspace_of_call
from perfuse.testing import peak_memory

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention_for_cpu


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def image(*shape: int) -> Tensor:
    """Channels innermost."""
    return noise(*shape).contiguous(memory_format=torch.channels_last)


def convolved(x: Tensor, weight: Tensor, step: int, pad: int, transposed: bool = False) -> Any:
    shape = ([step, step], [pad, pad], [1, 1], transposed, [0, 0], 1)
    return aten.convolution.default, (x, weight, None, *shape)


def convolved_back(
    g: Tensor, x: Tensor, weight: Tensor, step: int, pad: int, of_input: bool = True
) -> Any:
    shape = ([step, step], [pad, pad], [1, 1], False, [0, 0], 1, [of_input, True, False])
    return aten.convolution_backward.default, (g, x, weight, None, *shape)


def attended_back(g: Tensor, *operands: Tensor) -> Any:
    out, sums = FLASH.default(*operands)
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return back, (g, *operands, out, sums, 0.0, False)


def heads(length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return noise(2, length, 4, 64, dtype=dtype).transpose(1, 2)


ROWS: dict[str, Callable[[], Any]] = {
    "product": lambda: (aten.mm.default, (noise(256, 256), noise(256, 256).t())),
    "product of every other": lambda: (aten.mm.default, (noise(256, 512)[:, ::2], noise(256, 256))),
    "convolution": lambda: convolved(noise(4, 32, 32, 32), noise(64, 32, 3, 3), 1, 1),
    "of few channels": lambda: convolved(noise(4, 3, 64, 64), noise(32, 3, 3, 3), 1, 1),
    "of patches": lambda: convolved(noise(4, 3, 128, 128), noise(192, 3, 16, 16), 16, 0),
    "channels last": lambda: convolved(image(4, 32, 32, 32), image(64, 32, 3, 3), 1, 1),
    "transposed": lambda: convolved(noise(4, 64, 16, 16), noise(64, 32, 2, 2), 2, 0, True),
    "backward": lambda: convolved_back(
        noise(4, 64, 32, 32), noise(4, 32, 32, 32), noise(64, 32, 3, 3), 1, 1
    ),
    "backward of steps": lambda: convolved_back(
        noise(4, 64, 16, 16), noise(4, 32, 32, 32), noise(64, 32, 3, 3), 2, 1
    ),
    "backward of patches": lambda: convolved_back(
        noise(4, 192, 8, 8), noise(4, 3, 128, 128), noise(192, 3, 16, 16), 16, 0, False
    ),
    "attention": lambda: (FLASH.default, (heads(256), heads(256), heads(256))),
    "attention of halves": lambda: (
        FLASH.default,
        tuple(heads(256, torch.bfloat16) for _ in "qkv"),
    ),
    "attention's backward": lambda: attended_back(*(heads(800) for _ in "gqkv")),
    "with a gradient to copy": lambda: attended_back(
        heads(256).contiguous(), *(heads(256) for _ in "qkv")
    ),
    "one of the smallest": lambda: (aten.kthvalue.default, (noise(256, 1024), 3, 1)),
}


def said(op: Any, args: tuple[Any, ...], results: tuple[Tensor, ...]) -> int:
    buffers: dict[str, Buffer] = {}

    def named(tensor: Tensor) -> str:
        name = f"b{len(buffers)}"
        shape, strides = tuple(tensor.shape), contiguous_strides(tuple(tensor.shape))
        buffers[name] = Buffer(name, from_torch(tensor.dtype), shape, strides, "extern")
        return name

    given = tuple(
        View(named(a), tuple(a.shape), tuple(a.stride())) if isinstance(a, Tensor) else a
        for a in args
    )
    step = Extern(str(op), tuple(map(named, results)), given, (), "")
    return workspace_of_call(step, buffers, {}, "cpu", torch.get_num_threads())


@pytest.mark.parametrize("name", ROWS)
def test_as_measured(name: str) -> None:
    torch.manual_seed(0)
    op, args = ROWS[name]()
    made = op(*args)
    results = tuple(t for t in (made if isinstance(made, tuple) else (made,)) if t is not None)
    own = sum(t.untyped_storage().nbytes() for t in results)
    guess = said(op, args, results)
    del made, results
    peak = peak_memory(lambda: op(*args))
    assert abs(own + guess - peak) <= 0.1 * peak, (own, guess, peak)
