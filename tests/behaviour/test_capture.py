"""Programs that do more than compute: mutate, alias, take odd layouts and dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.behaviour.row import Behaviour, randn


def add_in_place(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


def write_slice(x: Tensor, y: Tensor) -> Tensor:
    x[:, ::2] = y[:, ::2] * 3
    return x.sum()


def only_mutates(x: Tensor) -> None:
    x.mul_(2).tanh_()


def mutate_through_view(x: Tensor) -> Tensor:
    x.t()[0].zero_()
    return x + 1


def mutate_then_return_view(x: Tensor) -> tuple[Tensor, Tensor]:
    x.add_(1)
    return x[1:], x.exp()


def swap(x: Tensor, y: Tensor) -> None:
    old = x.clone()
    x.copy_(y)
    y.copy_(old)


def read_before_and_after(x: Tensor) -> tuple[Tensor, Tensor]:
    before = x.exp()
    x.fill_(0.5)
    return before, x.exp()


def alias_chain(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x.exp()
    return y, y.t(), y[0]


def many(x: Tensor) -> dict[str, Any]:
    return {"sum": x.sum(), "rows": [x.amax(0), x.argmax(1)], "same": x, "number": 3, "none": None}


def set_grad_regions(x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        fixed = x.exp()
    return fixed, (x * fixed).sum()


def aliased_inputs() -> list[Any]:
    base = randn(6, 4)
    return [base[:4], base[2:]]


def write_first(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    return x + y


def plain() -> list[Any]:
    return [randn(6, 5)]


def pair() -> list[Any]:
    return [randn(6, 5), randn(6, 5) * 2]


def channels_last() -> list[Any]:
    return [randn(2, 4, 3, 5).to(memory_format=torch.channels_last).requires_grad_()]


MUTATION = (
    Behaviour("in_place_input", add_in_place, plain, num_calls=3),
    Behaviour("write_slice", write_slice, pair),
    Behaviour("only_mutates", only_mutates, plain, num_calls=2),
    Behaviour("mutate_through_view", mutate_through_view, plain),
    Behaviour("mutate_then_return_view", mutate_then_return_view, plain),
    Behaviour("swap", swap, pair, num_calls=3),
    Behaviour("read_before_and_after", read_before_and_after, plain),
    Behaviour("mutate_non_contiguous", add_in_place, lambda: [randn(8, 6)[::2].t()]),
    Behaviour("mutate_int", lambda x: x.add_(2), lambda: [torch.arange(7)]),
    Behaviour("aliased_inputs", write_first, aliased_inputs, num_calls=2),
    Behaviour("same_input_twice", lambda x, y: x.add_(1) + y, lambda: [x := randn(4), x]),
)
ALIASING = (
    Behaviour("returns_input", lambda x: x, plain),
    Behaviour("returns_view_of_input", lambda x: x.t(), plain),
    Behaviour("returns_two_views", lambda x: (x[0], x[:, 1:]), plain),
    Behaviour("alias_chain", alias_chain, plain),
    Behaviour("same_output_twice", lambda x: [x.exp()] * 2, plain),
    Behaviour("detached", lambda x: (x * 2).detach(), lambda: [randn(3, grad=True)]),
    Behaviour("many_outputs", many, plain),
    Behaviour("set_grad_regions", set_grad_regions, lambda: [randn(4, 3, grad=True)]),
    Behaviour("no_tensor_work", lambda x: (x.shape[0], 2.5, "a"), plain),
)
LAYOUTS = (
    Behaviour("transposed", lambda x: x.softmax(-1), lambda: [randn(7, 9).t()]),
    Behaviour("stepped", lambda x: x.exp().sum(0), lambda: [randn(9, 12)[1::2, ::3]]),
    Behaviour("expanded", lambda x: (x * 2, x.sum(0)), lambda: [randn(1, 9).expand(7, 9)]),
    Behaviour("overlapping", lambda x: x.cumsum(1), lambda: [randn(20).as_strided((6, 5), (2, 1))]),
    Behaviour("negative_flip", lambda x: x.flip(0) - x, plain),
    Behaviour(
        "channels_last", F.relu, lambda: [randn(2, 3, 4, 5).to(memory_format=torch.channels_last)]
    ),
    Behaviour(
        "group_norm_channels_last",
        lambda x: F.group_norm(x, 2, x.new_tensor([1, 2, 3, 4]), x.new_tensor([4, 3, 2, 1])),
        channels_last,
    ),
    Behaviour("roll_channels_last", lambda x: x.roll((1, -2), (1, -1)), channels_last),
    Behaviour("roll_channels_last_dynamic", lambda x: x.roll(2, 3), channels_last, dynamic=True),
    Behaviour("offset_view", lambda x: x.exp(), lambda: [randn(40)[3:36].view(3, 11)]),
    Behaviour("zero_size", lambda x: (x.exp(), x.sum(0), x.sum(1)), lambda: [randn(0, 5)]),
    Behaviour("zero_size_cat", lambda x, y: torch.cat([x, y]), lambda: [randn(0, 5), randn(3, 5)]),
    Behaviour("zero_rows_softmax", lambda x: x.softmax(0), lambda: [randn(4, 0)]),
    Behaviour("zero_dim", lambda x, y: x * y + x.exp(), lambda: [randn(), randn(4)]),
    Behaviour("zero_dim_only", lambda x: (x.sum(), x.amax(), x + 1), lambda: [randn()]),
    Behaviour("size_one", lambda x: x.softmax(-1) + x.mean(0), lambda: [randn(1, 1, 1)]),
    Behaviour("large_row", lambda x: x.softmax(-1), lambda: [randn(2, 65_537)]),
    Behaviour("scalars", lambda x, a, b: x * a + b, lambda: [randn(5), 2, 0.1]),
)


def half(*shape: int) -> Tensor:
    return randn(*shape, dtype=torch.float16)


def of_special_values(x: Tensor) -> tuple[Tensor, ...]:
    return x.exp(), x.clamp(-1, 1), x.maximum(x.flip(0)), x.isnan(), x.relu(), x.sign(), x.amax()


def special_values() -> list[Any]:
    infinity = float("inf")
    return [torch.tensor([float("nan"), infinity, -infinity, 0.0, -0.0, 1e-42, 1e38])]


def extrema_with_nan(x: Tensor) -> tuple[Tensor, ...]:
    """Along rows with a tail, down columns, and of everything."""
    short = x.view(-1, 4, 3).amax(1)
    return x.amax(1), x.amin(1), x.amax(0), x.amin(0), short, x.amax(), x.amin()


def rows_with_and_without_nan() -> list[Any]:
    x = randn(76, 72)
    x[torch.arange(72), torch.arange(72)] = float("nan")
    x[::7] = float("-inf")
    return [x]


def dtype_rows(dtype: torch.dtype) -> tuple[Behaviour, ...]:
    def inputs() -> list[Any]:
        return [(randn(6, 9) * 3).to(dtype), (randn(9) * 2).to(dtype)]

    name = str(dtype).removeprefix("torch.")
    rows = [Behaviour(f"{name}_where", lambda x, y: torch.where(x == y, x, y), inputs)]
    if dtype != torch.bool:
        rows += [Behaviour(f"{name}_arithmetic", lambda x, y: (x + y, x * y, x - 1), inputs)]
        rows += [Behaviour(f"{name}_sum", lambda x, y: (x.sum(), x.sum(1)), inputs)]
    if dtype.is_floating_point:
        rows += [Behaviour(f"{name}_norm", lambda x, y: F.layer_norm(x, (9,), y), inputs)]
    if not dtype.is_complex and dtype != torch.bool:
        rows += [Behaviour(f"{name}_amax", lambda x, y: (x.amax(1), x.argmax(1)), inputs)]
    return tuple(rows)


DTYPES = tuple(
    row
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.bool)
    + (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    for row in dtype_rows(dtype)
) + (
    Behaviour("promotion", lambda x, y: x + y, lambda: [torch.arange(5), half(5)]),
    Behaviour("integer_division", lambda x: (x / 2, x // 3, x % 3), lambda: [torch.arange(-5, 6)]),
    Behaviour("special_values", of_special_values, special_values),
    Behaviour("extrema_with_nan", extrema_with_nan, rows_with_and_without_nan),
)


@pytest.mark.parametrize("row", (*MUTATION, *ALIASING, *LAYOUTS, *DTYPES), ids=str)
def test_looks_like_eager(row: Behaviour) -> None:
    row.check()
