"""Integer division by zero, overflow, and shifts by wild amounts: eager's values and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import perfuse
from perfuse.target import machine_isas
from tests.harness.backend import compiled

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
Division = Callable[[Any, Any], Tensor]
DIVISIONS: dict[str, Division] = {
    "floor_divide": lambda a, b: a // b,
    "remainder": lambda a, b: a % b,
    "fmod": torch.fmod,
    "div_floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "div_trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
}
MESSAGE = r"^ZeroDivisionError$"


def all_of(a: Any, b: Any) -> tuple[Tensor, ...]:
    return tuple(division(a, b) for division in DIVISIONS.values())


def numbers(dtype: torch.dtype, count: int = 37) -> Tensor:
    """The least number, the greatest, and what is between, none of them zero."""
    info = torch.iinfo(dtype)
    edges = [info.min or 1, info.max, 1, 3] + ([-1, -7, info.min + 1] if info.min else [])
    return torch.tensor((edges * count)[:count], dtype=dtype)


def check_raises(function: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> None:
    torch._dynamo.reset()
    for candidate in (function, compiled(function, dynamic=dynamic)):
        with pytest.raises(RuntimeError, match=MESSAGE):
            candidate(*args)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_values(dtype: torch.dtype) -> None:
    """Every pair of edges, the least number divided by -1 too, in vectors and in their tails."""
    torch._dynamo.reset()
    a, b = numbers(dtype)[:, None], numbers(dtype, 21)
    *got, truncated = compiled(all_of)(a, b)
    names = list(DIVISIONS)[:-1]
    assert all(torch.equal(mine, DIVISIONS[n](a, b)) for n, mine in zip(names, got, strict=True))
    # Eager's own division towards zero traps at the least number by -1: there it is negated.
    overflows = (a == torch.iinfo(dtype).min) & (b.long() == -1)
    theirs = torch.div(a, torch.where(overflows, 1, b), rounding_mode="trunc")
    assert torch.equal(truncated, theirs)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("name", DIVISIONS)
def test_zero_among_many(name: str, dtype: torch.dtype) -> None:
    a, b = numbers(dtype), numbers(dtype)
    b[-1] = 0  # in the tail of the last vector
    check_raises(DIVISIONS[name], a, b)


@pytest.mark.parametrize("name", DIVISIONS)
def test_zero_given_otherwise(name: str) -> None:
    """As a Python number, as a tensor of one element, as a size that varies."""
    division, a = DIVISIONS[name], numbers(torch.int64)
    check_raises(lambda x: division(x, 0), a)
    check_raises(division, a, torch.tensor(0))
    check_raises(division, a, torch.zeros(1, dtype=torch.int32))
    check_raises(lambda x, y: division(x, y - y), a, a, dynamic=True)


OUTER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "where": lambda a, b: torch.where(b == 0, a, a // b),
    "slice": lambda a, b: (a // b)[:2],
    "sum": lambda a, b: (a % b).sum(),
    "float": lambda a, b: (a // b).float().exp(),
    "pad": lambda a, b: torch.nn.functional.pad(a // b, (1, 1)),
}


@pytest.mark.parametrize("name", OUTER)
def test_eager_evaluates_all(name: str) -> None:
    a, b = numbers(torch.int64, 19), numbers(torch.int64, 19)
    torch._dynamo.reset()
    assert torch.equal(compiled(OUTER[name])(a, b), OUTER[name](a, b))
    b[7] = 0
    check_raises(OUTER[name], a, b)


def test_nothing_to_divide() -> None:
    torch._dynamo.reset()
    got = compiled(all_of)(torch.empty(0, dtype=torch.int64), torch.tensor(0))
    assert all(part.shape == (0,) for part in got)


def test_a_call_after_an_error_is_right() -> None:
    torch._dynamo.reset()
    divide, a = compiled(DIVISIONS["floor_divide"]), numbers(torch.int32)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=MESSAGE):
            divide(a, a - a)
        assert torch.equal(divide(a, a), torch.ones_like(a))


def test_constants() -> None:
    """An error in what could be folded is raised by the call, not by the compiler."""
    check_raises(lambda x: x + torch.arange(3) // torch.zeros(3, dtype=torch.int64), torch.ones(3))


@pytest.mark.parametrize("isa", [i for i in ("avx512", "avx2", "scalar") if i in machine_isas()])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_wild_shifts(dtype: torch.dtype, isa: str) -> None:
    torch._dynamo.reset()
    amounts = torch.tensor([0, 1, 7, 8, 31, 32, 63, 64, 100, 127], dtype=dtype)
    if dtype.is_signed:
        amounts = torch.cat([amounts, -amounts, amounts[:1] - 128])
    values = numbers(dtype)[:, None]

    def shifts(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return a << b, a >> b, a << 100, a >> 100, a >> 8

    with perfuse.config.patch({"cpu.simd": isa}):
        got = compiled(shifts)(values, amounts)
    for mine, theirs in zip(got, shifts(values, amounts), strict=True):
        assert torch.equal(mine, theirs)
