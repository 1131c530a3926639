"""Programs that once came out wrong, or not at all: each a row, named by what it takes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.behaviour.row import Behaviour, randn
from tests.harness.backend import compiled
from tests.harness.compare import assert_as_good_as_eager


def overwritten_while_computed_again(x: Tensor) -> Tensor:
    half = x.to(torch.bfloat16) * 0.5
    x[::2].add_(1)
    return F.rms_norm(half, half.shape[-1:])


def overwritten_between_two_reads(x: Tensor) -> tuple[Tensor, Tensor]:
    before = x * 2 + 1
    x.mul_(3)
    return before.sum(-1), before.exp()


def norm_of_regrouped_columns(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x.reshape(-1, x.shape[1]) + 3, dim=-2, keepdim=True)
    return norm


def scatter_with_sizes_as_values(x: Tensor) -> Tensor:
    mask = F.pad(x, (-1, 1)) <= 1
    places = torch.arange(mask.shape[0]).flip(0)[:2]
    return torch.index_put(mask, (places,), mask.new_full((), 1))


def constants_that_no_loop_makes(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x + 1, torch.full((3,), 1j), torch.scalar_tensor(2, dtype=torch.complex64)


def vertical_reduction_of_a_masked_write(x: Tensor) -> Tensor:
    x[..., :1].mul_(2)
    return x.var(dim=-2, correction=0, keepdim=True)


def scatter_into_overlapping_memory(x: Tensor) -> Tensor:
    return torch.slice_scatter(x, torch.ones_like(x[1:]), 0, 1).flatten()


def scatters_into_repeated_elements(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    repeated = x.unsqueeze(0).expand(4, *x.shape)
    return (
        torch.slice_scatter(repeated, torch.ones_like(repeated[1:]), 0, 1).exp(),
        torch.select_scatter(repeated, x + 1, 0, 2),
        torch.diagonal_scatter(repeated, repeated.diagonal() * 2),
    )


def relational_convolution(x: Tensor) -> Tensor:
    """Messages of three kinds of edges, summed at their targets one kind after another."""
    out = torch.zeros_like(x)
    for kind in range(3):
        sources, targets = torch.arange(10).roll(kind), torch.arange(10) // (kind + 1)
        out = out.index_add(0, targets, (x * (kind + 1))[sources])
    return out.relu() @ x.T


def norm_along_one_element(x: Tensor) -> tuple[Tensor, Tensor]:
    return (
        torch.linalg.vector_norm(x + 3, dim=-2, keepdim=False),
        torch.linalg.vector_norm(x, 3, dim=(-2,), keepdim=True),
    )


def comparison_saved_transposed(x: Tensor) -> Tensor:
    places = torch.zeros_like(x, dtype=torch.int64)
    return torch.scatter_reduce(x, -2, places, x, "amax")


def sorted_window_saved_transposed(x: Tensor) -> Tensor:
    window = torch.cumsum(x, 0)[1:-1, 1::2].transpose(0, 1)
    return torch.sort(window, 0)[0] * window.sin()


def rows_read_from_both_ends(x: Tensor) -> Tensor:
    return (x + x.flip(0)).sum(-1)


def distance_of_reversed_rows(x: Tensor) -> Tensor:
    return F.pairwise_distance(x, x.flip(0))


def silu_of_every_second_row(x: Tensor) -> Tensor:
    return F.silu(x[::2])


def transposed_read_at_a_quotient(x: Tensor) -> Tensor:
    return x.unfold(0, 2, 1).roll(1, 1)


def greatest_byte_under_a_mask(x: Tensor) -> Tensor:
    return x.unfold(0, 2, 1).max()


def alias_at_half_of_a_size(x: Tensor) -> Tensor:
    part = x[..., 1:].squeeze()
    return part.narrow(0, 0, part.shape[0] // 2)


def strided_convolution(x: Tensor) -> Tensor:
    return F.conv1d(x, x.new_ones(7, 6, 8), stride=4)


def part_of_a_strided_convolution(x: Tensor) -> Tensor:
    return strided_convolution(x)[..., 1:]


def products_of_parts(x: Tensor, num: int) -> Tensor:
    """Parts of a temporary of known size, cut where the caller says."""
    y = x.sin() + 1
    weight = x.new_ones(16, 24)
    return torch.cat([y[:num] @ weight, y[num:] @ weight])


def flip_of_a_scalar(x: Tensor) -> Tensor:
    return x.flip(0)


def quotient_saved_for_backward(x: Tensor) -> Tensor:
    half = x.narrow(0, 0, x.shape[0] // 2)
    return F.avg_pool1d(half, 2).exp()


def sum_of_a_constant(x: Tensor) -> Tensor:
    return x.new_ones(x.shape[0], 2).sum(dim=(0, 1), keepdim=True)


def alias_of_spaced_elements(x: Tensor) -> Tensor:
    return x.flatten()


def repeated_alias(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.unsqueeze(0).expand(3, *x.shape), y.exp()


def repeated_row() -> Tensor:
    return randn(1, 31).expand(17, -1).requires_grad_()


def all_but_the_first(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.exp(), x.narrow(0, 1, x.shape[0] - 1)


def repeated_leaf() -> Tensor:
    """Elements in one place, of a tensor that is not a view of another."""
    return copy.deepcopy(randn(1).expand(16)).requires_grad_()


def overlapping_leaf() -> Tensor:
    return copy.deepcopy(randn(19).as_strided((16, 3), (1, 1))).requires_grad_()


def overlapping() -> Tensor:
    return torch.arange(19).as_strided((16, 3), (1, 1))


def assignment_of_nothing(x: Tensor, v: Tensor, start: int, stop: int, step: int) -> Tensor:
    """Nothing is assigned: the value has no element, and a stride that is a symbol."""
    y = x.sin()
    y[-3, start:stop:step] = v * 2
    return y


def sums_in_booleans(x: Tensor) -> list[Tensor]:
    found = []
    for y in (x > 0, x * 0, x[:0], x[:, 0] != 0.5):
        found += [y.sum(dtype=torch.bool), y.sum(0, dtype=torch.bool, keepdim=True)]
        found += [y.prod(dtype=torch.bool), y.prod(0, dtype=torch.bool)]
    return found


@torch.compiler.nested_compile_region
def counting_region(x: Tensor, mean: Tensor) -> Tensor:
    mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return (x - mean).relu()


def region_that_overwrites_an_input(x: Tensor, mean: Tensor) -> Tensor:
    return counting_region(counting_region(x, mean), mean)


ROWS = (
    Behaviour(
        "overwritten_recomputed", overwritten_while_computed_again, lambda: [randn(1, 8, 33)]
    ),
    Behaviour("overwritten_between", overwritten_between_two_reads, lambda: [randn(8, 33)]),
    Behaviour("regrouped", norm_of_regrouped_columns, lambda: [randn(16, 16, 2)], dynamic=True),
    Behaviour("sizes_as_values", scatter_with_sizes_as_values, lambda: [randn(33)], dynamic=True),
    Behaviour("constants", constants_that_no_loop_makes, lambda: [randn(5)]),
    Behaviour(
        "vertical_masked",
        vertical_reduction_of_a_masked_write,
        lambda: [randn(5, 4, 70)],
        dynamic=True,
    ),
    Behaviour("overlap", scatter_into_overlapping_memory, lambda: [overlapping()], dynamic=True),
    Behaviour("repeated", scatters_into_repeated_elements, lambda: [randn(5, 6, grad=True)]),
    Behaviour(
        "repeated_dynamic",
        scatters_into_repeated_elements,
        lambda: [randn(5, 6, grad=True)],
        dynamic=True,
    ),
    Behaviour(
        "istft_of_a_batch",
        lambda x: torch.istft(torch.complex(x, x), 16, window=torch.hann_window(16)),
        lambda: [randn(3, 9, 12)],
    ),
    Behaviour("relational_graph", relational_convolution, lambda: [randn(10, 8, grad=True)]),
    Behaviour("norm_of_one", norm_along_one_element, lambda: [randn(1, 7, grad=True)]),
    Behaviour(
        "norm_of_one_dynamic",
        norm_along_one_element,
        lambda: [randn(3, 1, 7, grad=True)],
        dynamic=True,
    ),
    Behaviour(
        "saved_transposed",
        comparison_saved_transposed,
        lambda: [randn(16, 16).t().requires_grad_()],
        dynamic=True,
    ),
    Behaviour(
        "saved_window",
        sorted_window_saved_transposed,
        lambda: [randn(17, 19, grad=True)],
        dynamic=True,
    ),
    Behaviour("masked_own", silu_of_every_second_row, lambda: [randn(1, 31, 70, grad=True)]),
    Behaviour(
        "masked_own_dynamic",
        silu_of_every_second_row,
        lambda: [randn(3, 31, 70, grad=True)],
        dynamic=True,
    ),
    Behaviour(
        "tile_quotient",
        transposed_read_at_a_quotient,
        lambda: [torch.arange(17 * 7 * 17).reshape(17, 7, 17)],
        dynamic=True,
    ),
    Behaviour(
        "greatest_byte",
        greatest_byte_under_a_mask,
        lambda: [torch.arange(17 * 7 * 17, dtype=torch.uint8).reshape(17, 7, 17)],
        dynamic=True,
    ),
    Behaviour("half_alias", alias_at_half_of_a_size, lambda: [randn(3, 4).t()], dynamic=True),
    Behaviour(
        "quotient_saved",
        quotient_saved_for_backward,
        lambda: [randn(9, 6, grad=True)],
        dynamic=True,
    ),
    Behaviour("sum_of_constant", sum_of_a_constant, lambda: [randn(4, 3)]),
    Behaviour(
        "spaced_alias", alias_of_spaced_elements, lambda: [randn(4, 9, 16)[..., ::2]], dynamic=True
    ),
    Behaviour(
        "repeated_alias",
        repeated_alias,
        lambda: [repeated_row(), randn(4, 4, grad=True)],
        dynamic=True,
    ),
    Behaviour("repeated_leaf", all_but_the_first, lambda: [repeated_leaf()], dynamic=True),
    Behaviour("overlapping_leaf", all_but_the_first, lambda: [overlapping_leaf()], dynamic=True),
    Behaviour(
        "quotient_stride", strided_convolution, lambda: [randn(2, 6, 99, grad=True)], dynamic=True
    ),
    Behaviour(
        "part_of_quotient",
        part_of_a_strided_convolution,
        lambda: [randn(2, 6, 99)],
        dynamic=True,
    ),
    Behaviour(
        "nothing",
        assignment_of_nothing,
        lambda: [randn(3, 6), randn(0), -2, 2, 3],
        dynamic=True,
    ),
    Behaviour("boolean_sums", sums_in_booleans, lambda: [randn(5, 35)]),
    Behaviour("region", region_that_overwrites_an_input, lambda: [randn(5, 6), randn(6)]),
    Behaviour("flip_scalar", flip_of_a_scalar, lambda: [randn()]),
    # g++ 12 took the kernels for dead code: see GCC_FLAGS in perfuse/target.py.
    Behaviour("both_ends", rows_read_from_both_ends, lambda: [randn(16, 4)]),
    Behaviour("reversed_rows", distance_of_reversed_rows, lambda: [randn(4, 8)]),
)


def test_parts_of_a_temporary_of_known_size() -> None:
    """The tensor has one size in all calls; the number, which has several, becomes a symbol."""
    torch._dynamo.reset()
    x = randn(12, 16)
    candidate = compiled(products_of_parts, dynamic=None)
    for num in (3, 5, 7):
        assert_as_good_as_eager(
            candidate(x, num), products_of_parts(x, num), products_of_parts(x.double(), num)
        )


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_found(row: Behaviour) -> None:
    if row.name == "repeated" and torch.__version__.startswith("2.12."):
        pytest.skip("AOTAutograd of 2.12 copies a gradient into repeated elements, and fails")
    row.check()


def test_the_gradient_of_a_complex_constant() -> None:
    """Its conjugate is a view of a number, which has no memory to look at."""

    def f(x: Tensor) -> Tensor:
        t = (torch.complex(x, x.flip(0)) * (0.5 + 0.5j)).exp() * 0.1
        return (t * t.conj()).real

    x = torch.randn(6, requires_grad=True)
    (got,) = torch.autograd.grad(torch.compile(f, backend="perfuse")(x).sum(), x)
    (want,) = torch.autograd.grad(f(x).sum(), x)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("shape", [(5, 12), (5, 12, 3), (5, 12, 3, 2)])
def test_batch_norm_of_transposed_tensors_has_eagers_strides(
    shape: tuple[int, ...], is_training: bool
) -> None:
    def f(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return F.batch_norm(x, mean, variance, training=is_training)

    x = torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))
    want = f(x, torch.zeros(12), torch.ones(12))
    got = torch.compile(f, backend="perfuse")(x, torch.zeros(12), torch.ones(12))
    assert got.stride() == want.stride()
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("value", [0.1, float("inf"), float("nan")])
@pytest.mark.parametrize("columns", [3, 20])
def test_the_sum_of_many_rows_is_as_exact_as_their_number_is_large(
    columns: int, value: float
) -> None:
    """One rounding a row, all in one direction, took a thousandth of the sum."""

    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.sum(0), x.mean(), x.relu().sum(1)

    x = torch.full((70_000, columns), 0.1)
    x[-1, -1] = value
    got, exact = compiled(f)(x), f(x.double())
    torch.testing.assert_close(
        [t.double() for t in got], list(exact), rtol=3e-6, atol=0, equal_nan=True
    )
