"""Ops that look at storage, offsets and strides: temporaries are not where eager has them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import perfuse
from tests.behaviour.row import Behaviour, randn
from tests.harness.backend import compiled
from tests.harness.compare import assert_as_good_as_eager

CHANNELS_LAST = torch.channels_last


def pooled_product(x: Tensor, w: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(x.contiguous(memory_format=CHANNELS_LAST), 1).flatten(1) @ w


def pooled_gate(x: Tensor, w: Tensor) -> Tensor:
    """Squeeze and excitation: the pooled value meets what it was pooled from."""
    x = F.conv2d(x.contiguous(memory_format=CHANNELS_LAST), w)
    return x * torch.sigmoid(F.adaptive_avg_pool2d(x, 1))


def pooled_volume(x: Tensor, w: Tensor) -> Tensor:
    x = x.contiguous(memory_format=torch.channels_last_3d)
    return F.adaptive_avg_pool3d(x, 1).flatten(1) @ w


def scattered_product(m: Tensor, w: Tensor) -> Tensor:
    return torch.as_strided_scatter(torch.zeros(16), m @ w, (2, 8), (8, 1), 0)


def scattered_between(m: Tensor, w: Tensor) -> Tensor:
    before, made = torch.sort(m * 2)[0], m @ w
    return torch.as_strided_scatter(made + 1, before[:, :2], (2, 2), (8, 3), 2)


def scattered_without_order(m: Tensor, w: Tensor) -> Tensor:
    """Strides of which neither steps over the other: positions have no simple inverse."""
    return torch.as_strided_scatter((m @ w) + 1, m[:, :2].exp(), (2, 2), (3, 2), 1)


def scattered_transposed(m: Tensor, w: Tensor) -> Tensor:
    made = ((m @ w) + 1).t().contiguous().t()
    return torch.as_strided_scatter(made, m[:, :2] + 1, (2, 2), (3, 2), 1)


def scattered_behind_a_view(m: Tensor, w: Tensor) -> Tensor:
    made = ((m @ w) + 1).flatten()[4:]
    return torch.as_strided_scatter(made, (m + 1)[:, :2], (2, 2), (3, 2), 1)


def scattered_complex(x: Tensor) -> Tensor:
    made = torch.complex(x, x + 1)[2:] * 1
    return torch.as_strided_scatter(made, torch.complex(x, x)[:4].view(2, 2), (2, 2), (1, 2), 1)


def scattered_complex_view(x: Tensor) -> Tensor:
    made = torch.complex(x, x + 1)[2:]
    return torch.as_strided_scatter(made, torch.complex(x, x)[:4].view(2, 2), (2, 2), (1, 2), 1)


def window_before_a_complex_view(x: Tensor) -> Tensor:
    return torch.complex(x, x + 1)[4:].as_strided((2, 2), (1, 2), 1)


def window_on_other_bytes(x: Tensor) -> Tensor:
    return (x * 2).view(torch.int32)[3:].as_strided((2, 2), (1, 2), 1) + 1


def window_on_bytes_of_an_input(x: Tensor) -> Tensor:
    return x.view(torch.int32)[3:].as_strided((2, 2), (1, 2), 1) + 1


def written_through_a_window(x: Tensor) -> Tensor:
    x.as_strided((2, 2), (1, 2), 1).mul_(3)
    return x + 1


def wave(*shape: int) -> Tensor:
    return torch.sin(torch.arange(float(math.prod(shape))) + 1).view(shape)


def leaf(*shape: int) -> Tensor:
    return randn(*shape, grad=True)


PRODUCT = [wave(2, 8), wave(8, 8)]
ROWS = [
    Behaviour("pooled_product", pooled_product, lambda: [leaf(2, 8, 4, 6), leaf(8, 3)]),
    Behaviour("pooled_gate", pooled_gate, lambda: [leaf(2, 4, 6, 6), leaf(5, 4, 3, 3)]),
    Behaviour("pooled_volume", pooled_volume, lambda: [leaf(2, 4, 2, 3, 3), leaf(4, 3)]),
    Behaviour(
        "pooled_product_of_any_size",
        pooled_product,
        lambda: [leaf(3, 8, 4, 6), leaf(8, 3)],
        dynamic=True,
    ),
    *(
        Behaviour(f.__name__, f, lambda: [x.clone() for x in PRODUCT])
        for f in (
            scattered_product,
            scattered_between,
            scattered_without_order,
            scattered_transposed,
            scattered_behind_a_view,
        )
    ),
    *(
        Behaviour(f.__name__, f, lambda: [wave(10)])
        for f in (
            scattered_complex,
            scattered_complex_view,
            window_before_a_complex_view,
            window_on_other_bytes,
            window_on_bytes_of_an_input,
            written_through_a_window,
        )
    ),
    Behaviour("written_at_an_offset", written_through_a_window, lambda: [wave(10)[1:8]]),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_matches_eager(row: Behaviour) -> None:
    row.check()


# Each looks at the offset of a tensor that eager copies first and a formula need not.
COPIES: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.view_as_complex(x.clone()),
    lambda x: torch.view_as_complex(x * 1),
    lambda x: x.clone().view(torch.int64) + 1,
    lambda x: x.clone().view(torch.complex64) + 1,
    lambda x: (x + 0).flatten()[1:7].clone().view(torch.float64).isnan(),
]


@pytest.mark.parametrize("function", COPIES)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_offsets_of_copies(function: Callable[[Tensor], Tensor], offset: int) -> None:
    torch._dynamo.reset()
    x = wave(12)[offset : offset + 8].view(4, 2)
    assert torch.equal(compiled(function)(x), function(x))


READS: list[Callable[[Tensor], Any]] = [
    lambda x: x.as_strided((2,), (1,), 6) + 1,
    lambda x: x.as_strided((2, 2), (1, 2), 0) + x[:2],
    lambda x: x[1:].as_strided((2, 2), (1, 2)) + x[:2],
    lambda x: torch.as_strided_scatter(x, x[:2], (2,), (1,), 3),
    lambda x: torch.cat([part * 2 for part in x.split(2)]),
    lambda x: torch.cat([part * 2 for part in x.split_with_sizes([1, 4])]),
    lambda x: torch.narrow_copy(x, 0, 1, 3),
    lambda x: torch.diagonal_copy(x.view(5, 1)),
    lambda x: torch.unfold_copy(x, 0, 2, 1),
    lambda x: torch.as_strided_copy(x, (2,), (1,), 6),
]


@pytest.mark.parametrize("function", READS)
def test_inputs_at_other_offsets(function: Callable[[Tensor], Any]) -> None:
    """Dynamo guards sizes and strides, not where an input starts in its storage."""
    torch._dynamo.reset()
    memory, candidate = wave(12), compiled(function)
    for offset in (5, 4, 3, 5):
        x = memory[offset : offset + 5]
        assert torch.equal(candidate(x), function(x)), offset


@torch.library.custom_op("perfuse_tests::raise_in_place", mutates_args={"x"})
def raise_in_place(x: Tensor, by: float) -> None:
    x.add_(by)


def raised_view_of_a_copy(x: Tensor) -> Tensor:
    """The view is given by its place in the copy, which need not be one of ours."""
    copied = x[2:].clone()
    raise_in_place(copied.t()[1:], 1.5)
    return copied.exp()


def raised_views_of_a_temporary(x: Tensor) -> Tensor:
    made = x.sin()
    raise_in_place(made.t()[1:], 2.0)
    raise_in_place(made[:, 1:].t(), 3.0)
    return made * 2


@pytest.mark.parametrize("verify", [False, "memory"])
@pytest.mark.parametrize("function", [raised_view_of_a_copy, raised_views_of_a_temporary])
def test_ops_that_write_views(function: Callable[[Tensor], Tensor], verify: Any) -> None:
    with perfuse.config.patch(verify=verify):
        Behaviour(function.__name__, function, lambda: [wave(4, 5)]).check()


@pytest.mark.parametrize("verify", [False, "memory"])
def test_sparse_gradients_outlive_the_call(verify: Any) -> None:
    """The values of a sparse tensor are the tensor that it was made of."""
    torch._dynamo.reset()
    table = randn(11, 5, grad=True)
    indices = torch.tensor([[1, 2, 3], [4, 5, 6]])

    def looked_up(index: Tensor) -> Tensor:
        return F.embedding(index, table, sparse=True).tanh()

    def gradients(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        sums = [function(index).sum() for index in indices]
        found = [torch.autograd.grad(total, table)[0] for total in sums]
        assert all(gradient.is_sparse for gradient in found)
        return [gradient.to_dense() for gradient in found]

    with perfuse.config.patch(verify=verify):
        got = gradients(compiled(looked_up))
    assert_as_good_as_eager(got, gradients(looked_up))


def test_channels_last_network_trains() -> None:
    """Every parameter in front of a pooling has a gradient, and it is eager's."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
        torch.nn.Linear(8, 5),
    ).to(memory_format=CHANNELS_LAST)  # fmt: skip
    x = randn(2, 3, 9, 9).contiguous(memory_format=CHANNELS_LAST)

    def gradients(model: Callable[..., Tensor], kind: torch.dtype) -> list[Tensor]:
        network.to(kind)
        loss = model(x.to(kind)).square().sum()
        return list(torch.autograd.grad(loss, list(network.parameters())))

    got = gradients(compiled(network), torch.float32)
    eager = gradients(network, torch.float32)
    exact = gradients(network, torch.float64)
    assert all(g.abs().sum() > 0 for g in got if g.dim() > 1)
    assert_as_good_as_eager(got, eager, exact)


def test_written_arguments_that_share_memory_otherwise() -> None:
    """The graph is compiled for one base and its offsets; no guard of Dynamo's checks these."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        y.mul_(2)
        return x + y

    torch._dynamo.reset()
    candidate = perfuse.compile(function)
    choices: list[Callable[[Tensor], tuple[Tensor, Tensor]]] = [
        lambda memory: (memory[:8], memory[1:9]),
        lambda memory: (memory[:8], memory[2:10]),
        lambda memory: (memory[3:11], memory[4:12]),
        lambda memory: (memory[:8].clone(), memory[8:16].clone()),
        lambda memory: (memory[:12].clone()[:8], memory[1:9]),
        lambda memory: (memory[:10].clone()[:8], memory[:10][1:9]),
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for choose in choices:
            mine, theirs = torch.arange(40.0), torch.arange(40.0)
            torch.testing.assert_close(candidate(*choose(mine)), function(*choose(theirs)))
            torch.testing.assert_close(mine, theirs)
    assert sum("shares memory with another" in str(each.message) for each in caught) == 1


def add_to_row(x: Tensor) -> Tensor:
    x[1].fill_(5)
    return x + 1


def scale_column(x: Tensor) -> Tensor:
    x[:, :1].mul_(3)
    return x.cumsum(0)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [add_to_row, scale_column])
def test_writes_to_windows_that_overlap(
    function: Callable[[Tensor], Tensor], dynamic: bool
) -> None:
    """Such a graph runs eagerly: what is written to one window is also read in another."""
    torch._dynamo.reset()
    candidate = perfuse.compile(function, dynamic=dynamic)
    mine, theirs = torch.arange(20.0), torch.arange(20.0)
    with pytest.warns(UserWarning, match="elements overlap in memory"):
        found = candidate(mine.unfold(0, 6, 2))
    torch.testing.assert_close(found, function(theirs.unfold(0, 6, 2)))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dynamic", [False, True])
def test_writes_to_windows_beside_arguments_that_share_memory(dynamic: bool) -> None:
    """AOTAutograd knows whether their base is written to, not which of the arguments is."""

    def function(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        x.mul_(2)
        z[1].fill_(5)
        return x.sum() + y.sum() + z

    def arguments(memory: Tensor, other: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        windows = memory.unfold(0, 6, 2)
        return [(memory[:8], memory[1:9], other.unfold(0, 6, 2)), (memory[:8], memory, windows)]

    for choice in range(2):
        torch._dynamo.reset()
        candidate = perfuse.compile(function, dynamic=dynamic)
        mine, theirs = ((torch.arange(20.0), torch.arange(30.0)) for _ in range(2))
        with pytest.warns(UserWarning, match="elements overlap in memory"):
            found = candidate(*arguments(*mine)[choice])
        torch.testing.assert_close(found, function(*arguments(*theirs)[choice]))
        torch.testing.assert_close(mine, theirs)


def test_dynamic_windows_that_come_to_overlap() -> None:
    """They lie apart in the first call; a guard notices the call in which they no longer do."""

    def scale_rows(x: Tensor) -> Tensor:
        x[:, :1].mul_(3)
        return x.sum(-1)

    torch._dynamo.reset()
    candidate = perfuse.compile(scale_rows, dynamic=True)
    for width in (5, 7, 9):
        mine, theirs = (torch.arange(100.0).as_strided((3, 4, width), (32, 8, 1)) for _ in range(2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = candidate(mine)
        torch.testing.assert_close(found, scale_rows(theirs))
        torch.testing.assert_close(mine, theirs)
