"""Scalar code as Triton spells it, against eager, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import perfuse
from perfuse import config
from perfuse.codegen.triton.helpers import helper_text
from perfuse.codegen.triton.spelling import spelling
from perfuse.ir.dtype import DType
from perfuse.ir.expr import SCALAR_OPS
from perfuse.testing import fresh_cache

SMALL_FLOATS = [
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]  # fmt: skip
_INTS_ONLY = {"divisor", "bit_not", "bit_and", "bit_or", "bit_xor", "shl", "shr", "from_bits"}


def interpreted(fn: object, *inputs: Tensor) -> Tensor:
    with fresh_cache(), config.patch({"gpu.interpret": True}):
        torch._dynamo.reset()
        found: Tensor = torch.compile(fn, backend="perfuse")(*inputs)  # type: ignore[call-overload]
    return found


def floats() -> Tensor:
    """Ties and their neighbours around every number of every small type, and the specials."""
    codes = torch.arange(256, dtype=torch.uint8)
    exact = torch.cat([codes.view(t).float() for t in SMALL_FLOATS])
    exact = exact[exact.isfinite()].unique()
    ties = (exact[1:] + exact[:-1]) / 2
    near = torch.cat([ties, exact])
    up, down = (torch.nextafter(near, torch.full_like(near, s * torch.inf)) for s in (1, -1))
    specials = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e30, -1e30, 464.0, 480.0]
    )
    return torch.cat([near, up, down, specials, torch.randn(500) * 100])


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=str)
def test_floats_of_eight_bits_are_rounded_as_eager_does(dtype: torch.dtype) -> None:
    x = floats()
    ours = interpreted(lambda x: x.to(dtype), x)
    wrong = ours.view(torch.uint8) != x.to(dtype).view(torch.uint8)
    wrong &= ~(ours.float().isnan() & x.to(dtype).float().isnan())
    assert not wrong.any(), x[wrong][:5]


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=str)
def test_floats_of_eight_bits_are_read_exactly(dtype: torch.dtype) -> None:
    x = torch.arange(256, dtype=torch.uint8).view(dtype)
    ours = interpreted(lambda x: x.float(), x)
    torch.testing.assert_close(ours, x.float(), rtol=0, atol=0, equal_nan=True)


def test_numbers_as_floats_of_eight_bits() -> None:
    """Constants and results without dimensions, of which minus zero keeps its sign."""

    def numbers(x: Tensor) -> list[Tensor]:
        return [r.to(dtype) for dtype in SMALL_FLOATS for r in (x.amax(), torch.full((3,), 0.3))]

    x = torch.full((2, 3), -0.0)
    with fresh_cache(), config.patch({"gpu.interpret": True}):
        torch._dynamo.reset()
        ours = torch.compile(numbers, backend="perfuse")(x)
    for mine, eager in zip(ours, numbers(x), strict=True):
        assert torch.equal(mine.view(torch.uint8), eager.view(torch.uint8))


@pytest.mark.parametrize("op", [o for o in SCALAR_OPS if o not in ("cast", "round_to")])
def test_every_scalar_op_has_a_spelling_and_its_helpers(op: str) -> None:
    kinds = [DType.I64] if op in _INTS_ONLY else [DType.F32, DType.F64]
    for kind in kinds:
        text = spelling(op, kind).format(*"abcd")
        for word in text.replace("(", " ").split():
            if word.startswith("pf_"):
                assert f"def {word}(" in helper_text(text, saturate=True)


def test_random_numbers_are_those_of_the_cpu() -> None:
    def drawn(x: Tensor) -> Tensor:
        return torch.rand_like(x)

    x = torch.empty(100)
    torch.manual_seed(3)
    ours = interpreted(drawn, x)
    torch.manual_seed(3)
    theirs = torch.compile(drawn, backend="perfuse")(x)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_powers_of_integers() -> None:
    base = torch.tensor([0, 1, -1, 2, -2, 3, 7, -1, -1, 1, 2, 0])
    power = torch.tensor([0, 70, 71, 62, 63, 39, 22, 70, 0, 0, 64, 5])
    ours = interpreted(torch.pow, base, power)
    torch.testing.assert_close(ours, torch.pow(base, power))


def test_division_of_floats_by_floor() -> None:
    a = torch.tensor([7.0, -7.0, 7.0, -7.0, 0.3, 1.0, -0.0, 5.0, torch.inf, 1e20])
    b = torch.tensor([2.0, 2.0, -2.0, -2.0, 0.1, 0.1, 2.0, torch.inf, 2.0, 3.0])
    for fn in (torch.floor_divide, torch.remainder, torch.fmod):
        torch.testing.assert_close(interpreted(fn, a, b), fn(a, b), equal_nan=True)


def test_what_comparing_doubles_gives_can_be_combined() -> None:
    x = torch.randn(40, dtype=torch.float64)

    def fn(x: Tensor) -> Tensor:
        return ((x > 0) & (x < 1)) | x.isnan()

    assert torch.equal(interpreted(fn, x), fn(x))


def test_exponentials_of_floats_lose_nothing_where_the_exponent_is_large() -> None:
    x = torch.cat([torch.linspace(-87, 88, 20_001), torch.tensor([0.0, -0.0, 1e-30])])
    exact = torch.exp(x.double())
    off = (interpreted(torch.exp, x).double() - exact).abs()
    ulp = torch.nextafter(exact.float(), torch.tensor(torch.inf)).double() - exact.float().double()
    assert (off / ulp).max() < 3  # of which two are the interpreter's own power of two


def test_exponentials_of_the_extremes() -> None:
    x = torch.tensor([-torch.inf, torch.inf, torch.nan, 1e38, -1e38, 89.0, -104.5, -95.0, -103.0])
    exact = torch.exp(x.double()).float()
    torch.testing.assert_close(
        interpreted(torch.exp, x), exact, rtol=1e-5, atol=1.5e-45, equal_nan=True
    )


def source_of(fn: object, *inputs: Tensor) -> str:
    made = perfuse.codegen_for(fn, inputs, target="cuda:90")  # type: ignore[arg-type]
    return "".join(graph.kernels for graph in made.graphs)


def test_floats_are_divided_as_eager_does_and_halves_by_approximation() -> None:
    x, half = torch.empty(64, 33), torch.empty(64, 33, dtype=torch.bfloat16)
    assert "tl.div_rn(" in source_of(lambda x: x / x.sum(-1, keepdim=True), x)
    assert "tl.div_rn(1.0, 1.0 + libdevice.exp(" in source_of(torch.sigmoid, x)
    assert "div_rn" not in source_of(lambda x: x / x.sum(-1, keepdim=True), half)
    assert "div_rn" not in source_of(lambda x: x / 4, x)  # exact however it is done
    with config.patch({"gpu.approximate": True}):
        assert "div_rn" not in source_of(lambda x: x / x.sum(-1, keepdim=True), x)
