"""Triton kernels without a GPU: their values in Triton's interpreter, against eager and float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import perfuse
from perfuse.codegen.triton.emit import Dialect, Names
from perfuse.ir import index as ix
from perfuse.ir.atoms import Division
from perfuse.testing import fresh_cache
from tests.behaviour.row import Behaviour
from tests.gpu.programs import SMALL, at_the_limits, check_limits
from tests.harness.compare import assert_as_good_as_eager
from tests.random_programs.check import check_program
from tests.random_programs.generate import from_seed

BACKEND = "perfuse"
NUM_SEEDS = 20


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with fresh_cache(), perfuse.config.patch({"gpu.interpret": True, "verify": True}):
        yield


@pytest.mark.parametrize("program", SMALL, ids=str)
def test_matches_eager(program: Behaviour) -> None:
    program.check("cpu", BACKEND)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_random_program_matches_eager(seed: int) -> None:
    program = from_seed(seed)
    verdict = check_program(program, BACKEND)
    assert verdict.status in ("pass", "skip"), f"{verdict.message}\n\n{program.standalone()}"


def test_infinities_are_eagers() -> None:
    torch._dynamo.reset()
    check_limits(torch.compile(at_the_limits, backend=BACKEND, dynamic=False))


def test_memory_is_taken_over_in_the_shape_it_was_made() -> None:
    """A result may be the tensor of a temporary that was itself another's, of another shape."""

    def function(x: Tensor, mask: Tensor, rows: Tensor) -> list[Tensor]:
        return [torch.masked.var(x, mask=chosen) for chosen in (None, mask, rows)]

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 5, 5, generator=generator)
    masks = x > -0.5, x[..., :1] > -0.5
    torch._dynamo.reset()
    got = torch.compile(function, backend=BACKEND, dynamic=False)(x, *masks)
    assert [t.shape for t in got] == [torch.Size()] * 3
    assert_as_good_as_eager(got, function(x, *masks), function(x.double(), *masks))


def test_a_size_with_a_negative_numerator_is_rounded_down() -> None:
    """The number of bags is that of arange(0, 4*n, n), in which PyTorch leaves (-1) // n."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        bags = torch.nn.functional.embedding_bag(x % 5, weight, mode="sum")
        return torch.nn.functional.layer_norm(bags, (4,)) * 2

    torch._dynamo.reset()
    with perfuse.config.patch({"verify": "memory"}):
        compiled = torch.compile(function, backend=BACKEND, dynamic=True)
        for rows, columns in ((4, 6), (2, 9)):
            x = torch.arange(rows * columns).view(rows, columns)
            weight = torch.randn(5, 4, requires_grad=True)
            wide = weight.detach().double().requires_grad_()
            got = [r := compiled(x, weight), *torch.autograd.grad(r.sin().sum(), weight)]
            eager = [r := function(x, weight), *torch.autograd.grad(r.sin().sum(), weight)]
            exact = [r := function(x, wide), *torch.autograd.grad(r.sin().sum(), wide)]
            assert_as_good_as_eager(got, eager, exact)


def test_quotients_of_what_may_be_negative_round_down() -> None:
    n, k = ix.symbol("n", 2), ix.symbol("k", 2)
    names = Names({}, frozenset(), Dialect())
    for index, spelled in (
        (ix.floordiv(n, 3), "((n) // (3))"),
        (ix.floordiv(ix.add(n, ix.mul(k, -1)), 3), "pf_floordiv(n, 3)"),
        (ix.mod(ix.add(n, ix.mul(k, -1)), 3), "pf_mod(n, 3)"),
    ):
        atom = ix.as_atom(index)
        assert isinstance(atom, Division) and names.quotient(atom, "n", "3") == spelled


def test_a_view_of_an_input_keeps_its_place_where_kernels_read_a_copy() -> None:
    """The view starts at an odd address: kernels get a copy, the caller the view itself."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        view = x.as_strided((x.shape[0],), (x.stride(0),), 1)
        return view, view * 2

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=BACKEND, dynamic=True)
    x = torch.randn(4, 8).bfloat16()
    got, eager = compiled(x), function(x)
    assert torch.equal(got[0], eager[0]) and torch.equal(got[1], eager[1])
    assert got[0].data_ptr() == eager[0].data_ptr()


@pytest.mark.parametrize("axes", [[0, 2, 3], [2]])
def test_sums_of_nothing_read_nothing(axes: list[int]) -> None:
    def summed(x: Tensor) -> Tensor:
        return x.sum(axes)

    x = torch.empty([0 if d in axes else 4 for d in range(4)])
    with perfuse.config.patch({"gpu.interpret": False}):
        (made, *_) = perfuse.codegen_for(summed, (x,), target="cuda:90").sources
    assert "in_columns" in made, made
    torch._dynamo.reset()
    assert torch.equal(torch.compile(summed, backend=BACKEND)(x), summed(x))
