"""Formulas of sizes that depend on data: in shapes, arguments of calls, results and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import UserError

import perfuse

Function = Callable[[Tensor], Any]


@pytest.fixture(autouse=True)
def captured() -> Iterator[None]:
    torch._dynamo.reset()
    wanted = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(wanted):
        yield


def positive(x: Tensor) -> tuple[Tensor, int]:
    kept = x[x > 0]
    return kept, kept.shape[0]


def first_half(x: Tensor) -> Tensor:
    kept, n = positive(x)
    return kept[: n // 2].exp()


def both_halves(x: Tensor) -> Tensor:
    kept, n = positive(x)
    return torch.cat([kept[: n // 2].exp(), kept[n // 2 :].sin()])


def rest(x: Tensor) -> tuple[Any, ...]:
    """Where it begins is neither an argument nor the result of a call."""
    n = int(x[0].item())
    once = x[1:][n:]
    twice = once[n:]
    return once.cos(), twice.sin(), x[:-n].exp(), x[n:], once.storage_offset()


def counted_from_end(x: Tensor) -> tuple[Any, ...]:
    n = int(x[0].item())
    rows = x[1:5].view(2, 2).t()
    row = rows.select(1, -n)
    changed = (x * 2).select_scatter(x[3] * x[-n], 0, -n)
    return x[-n].exp(), row.exp(), row.storage_offset(), changed


def selected_twice(x: Tensor) -> tuple[Any, ...]:
    """Each selection has a size of its own, though both are equal."""
    first, second = x[x > 0], x[x > 0]
    return first[1:].exp(), second[:-1] * second.shape[0], x[x > 0][2] + x[x > 0].shape[0]


def numbers(x: Tensor) -> tuple[Any, ...]:
    kept, n = positive(x)
    more = n * (n + 1) // 2, n % 3, -n, n == 3, abs(n - 5), int(n * 0.5), n**0.5
    return kept * 2, torch.sym_max(n, 4), *more


def shorter_of_two(x: Tensor) -> Tensor:
    above, below = x[x > 0], x[x <= 0]
    n = torch.sym_min(above.shape[0], below.shape[0])
    return above[:n] * below[:n]


def stacked(x: Tensor) -> tuple[Tensor, int]:
    above, below = x[x > 0], x[x < 0]
    longest = max(above.shape[0], below.shape[0])
    made = x.new_zeros(2, longest)
    made[0, : above.shape[0]] = above
    made[1, : below.shape[0]] = below
    return made, longest


def padded_rows(x: Tensor) -> Tensor:
    kept, n = positive(x)
    return F.pad(kept, (0, (n + 7) // 8 * 8 - n)).view(-1, 8).softmax(-1)


def whole_rows(x: Tensor) -> tuple[Tensor, ...]:
    kept, n = positive(x)
    rows = kept[: n // 4 * 4].reshape(-1, 4)
    return rows.t() @ rows, rows.mean(0), F.layer_norm(rows, (4,))


def scaled(x: Tensor) -> Tensor:
    kept, n = positive(x)
    return kept / math.sqrt(max(n, 1))


def largest(x: Tensor) -> Tensor:
    kept, n = positive(x)
    return torch.topk(kept, min(n, 5)).values


def resized(x: Tensor) -> Tensor:
    kept, n = positive(x)
    return F.interpolate(kept[None, None], size=max(n // 2, 1), mode="linear")


def repeated(x: Tensor) -> Tensor:
    kept, n = positive(x)
    return (kept.unsqueeze(0).expand(max(2, n // 4), -1) * 2).sum(1)


def made_of_float(x: Tensor) -> Tensor:
    return torch.ones(torch.sym_max(int(x.max().item()), 2)) + x.sum()


def difference_of_floats(x: Tensor) -> tuple[Any, ...]:
    most, least = x.max().item(), x.min().item()
    n = int(most - least) + 1
    return torch.zeros(n) + most, most - least, n


def slice_by_float(x: Tensor) -> Tensor:
    return x[: min(max(int(x[0].item()), 0), 3)] * 2


def window_by_float(x: Tensor) -> tuple[Any, ...]:
    n = int(x[0].item())
    torch._check(n >= 0)
    torch._check(n < 10)
    return x[n : n + min(n + 1, 4)].cos(), 2**n, n << 1


def range_of_rest(x: Tensor) -> Tensor:
    """A gradient whose backward knows of the size only by the shape of its argument."""
    _, n = positive(x)
    return torch.arange(n // 2, n).float() + x.sum()


def pairs_of_detached(x: Tensor) -> Tensor:
    kept, n = positive(x.detach())
    return kept[: n // 2 * 2].view(-1, 2) + x.sum()


PROGRAMS: dict[str, Function] = {
    fn.__name__: fn
    for fn in (
        *(
            first_half,
            both_halves,
            rest,
            counted_from_end,
            numbers,
            shorter_of_two,
            stacked,
            padded_rows,
            whole_rows,
        ),
        *(scaled, largest, resized, repeated, made_of_float, difference_of_floats),
        *(slice_by_float, window_by_float, range_of_rest, pairs_of_detached),
    )
}


def run(fn: Function, x: Tensor, has_grad: bool) -> tuple[Any, ...]:
    x = x.clone().requires_grad_(has_grad)
    found = fn(x)
    results = found if isinstance(found, tuple) else (found,)
    tensors = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    if tensors:
        loss: Any = sum(r.square().sum() for r in tensors)
        loss.backward()
    return *results, x.grad


def is_refused(fn: Function, x: Tensor, dynamic: bool | None) -> bool:
    """Whether Dynamo makes no graph of it for any backend: PyTorch 2.11 guards on more sizes."""
    torch._dynamo.reset()
    try:
        torch.compile(fn, backend="eager", fullgraph=True, dynamic=dynamic)(x)
    except UserError:
        return True
    return False


def check(fn: Function, has_grad: bool, lengths: tuple[int, ...], **options: Any) -> None:
    compiled = perfuse.compile(fn, fullgraph=True, **options)
    for seed, length in enumerate(lengths):
        torch.manual_seed(seed)
        x = torch.randn(length) * 3
        x[0] = 2.0
        expected = run(fn, x, has_grad)
        try:
            found = run(compiled, x, has_grad)
        except UserError:
            if is_refused(fn, x, options.get("dynamic")):
                pytest.skip("Dynamo refuses it")
            raise
        torch.testing.assert_close(found, expected, check_stride=True)


@pytest.mark.parametrize("has_grad", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_formula(name: str, has_grad: bool) -> None:
    with perfuse.config.patch(verify="memory"):
        check(PROGRAMS[name], has_grad, (20, 20, 20))


@pytest.mark.parametrize("name", PROGRAMS)
def test_formula_of_dynamic_sizes(name: str) -> None:
    with perfuse.config.patch({"verify": "memory", "cpu.simd": "avx2"}):
        check(PROGRAMS[name], True, (20, 33, 47), dynamic=True)


@pytest.mark.parametrize("index", [-21, 20])
def test_index_out_of_range(index: int) -> None:
    def chosen(x: Tensor) -> Tensor:
        return x[int(x[0].item())].exp()

    def changed(x: Tensor) -> Tensor:
        return (x + 1).select_scatter(x[1], 0, int(x[0].item()))

    for fn in (chosen, changed):
        x = torch.ones(20)
        compiled = perfuse.compile(fn, fullgraph=True)
        torch.testing.assert_close(compiled(x), fn(x))
        x[0] = index
        with pytest.raises(IndexError, match="out of range"):
            compiled(x)


def test_place_that_there_may_not_be() -> None:
    torch._dynamo.reset()
    compiled = perfuse.compile(lambda x: x[x > 0][4].exp() + x[x > 0][2], fullgraph=True)
    x = torch.arange(-5.0, 6)
    torch.testing.assert_close(compiled(x), torch.tensor(5.0).exp() + 3)
    with pytest.raises((IndexError, RuntimeError), match=r"out of range|assertion failed"):
        compiled(x - 1)
