"""The axis that lanes run along, masks by position, scans and positions: against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import perfuse
from tests.harness.compare import assert_as_good_as_eager

INF, NAN = float("inf"), float("nan")
ISAS = ("avx2", "native")


def check(function: Callable[..., Any], *args: Any, simd: str) -> None:
    torch._dynamo.reset()
    options = {} if simd == "native" else {"cpu.simd": simd}
    got = torch.compile(function, backend="perfuse", options=options)(*args)
    wide = [a.double() if a.is_floating_point() else a for a in args]
    assert_as_good_as_eager(got, function(*args), function(*wide))


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("simd", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_scans(simd: str, dtype: torch.dtype) -> None:
    """Along rows and columns, with whole and partial vectors of either."""

    def scans(x: Tensor, y: Tensor) -> list[Tensor]:
        sums = [torch.cumsum(z, dim) for z in (x, y) for dim in range(z.dim())]
        return [*sums, torch.cumprod(x, -1), torch.cumprod(y, 1)]

    check(scans, floats(3, 37).to(dtype), floats(2, 5, 19).to(dtype), simd=simd)


def test_a_running_sum_is_nan_from_where_it_is_undefined() -> None:
    x = torch.tensor([1.0, INF, 2, -INF, *[1.0] * 20])
    got = torch.compile(lambda x: x.cumsum(0), backend="perfuse")(x)
    assert torch.equal(got[:3], torch.tensor([1.0, INF, INF])) and got[3:].isnan().all()


@pytest.mark.parametrize("scan", [torch.cumsum, torch.cumprod])
def test_doubles_overflow_where_they_do_one_by_one(scan: Callable[[Tensor, int], Tensor]) -> None:
    """A product of large numbers after a zero is 0, not NaN; a sum may pass through less."""
    x = torch.tensor(
        [[0.0, 1e200, 1e200, 3], [-1.5e308, 1e308, 1e308, -1e308]], dtype=torch.float64
    ).repeat(2, 8)
    compiled = torch.compile(lambda x: scan(x, 1), backend="perfuse")
    assert torch.equal(compiled(x), scan(x, 1))


@pytest.mark.parametrize("simd", ISAS)
@pytest.mark.parametrize("dim", [0, 1])
def test_positions_of_extremes(simd: str, dim: int) -> None:
    """NaN beats all, the first of equals wins, also where all are the least there is."""
    some = floats(33, 70).round()
    some[floats(33, 70) > 1.8] = NAN
    least = torch.full((33, 70), -INF)
    mixed = torch.where(floats(33, 70) > 2, INF, -INF)
    ints = torch.full((33, 70), torch.iinfo(torch.int32).min, dtype=torch.int32)
    flags = floats(33, 70) > 1

    def find(*xs: Tensor) -> list[Tensor]:
        found = [f(x, dim) for x in xs[:-1] for f in (torch.argmax, torch.argmin)]
        return [*found, xs[-1].max(dim).indices, xs[-1].min(dim).indices]

    check(find, some, least, mixed, ints, flags, simd=simd)


@pytest.mark.parametrize("simd", ISAS)
def test_masks_by_position(simd: str) -> None:
    """Limits that are constants, rows and data, also those that no position comes near."""

    def masked(x: Tensor, ends: Tensor) -> list[Tensor]:
        columns, rows = torch.arange(x.shape[1]), torch.arange(x.shape[0])[:, None]
        masks = [columns <= rows, columns < ends[:, None], rows != columns, 2 * columns >= rows + 3]
        return [torch.where(m, x, 0.0) for m in masks]

    ends = torch.tensor([-(1 << 62), 0, 17, 1 << 62, 70, torch.iinfo(torch.int64).min])
    check(masked, floats(6, 70), ends, simd=simd)


@pytest.mark.parametrize("simd", ISAS)
def test_short_rows_have_lanes_along_another_axis(simd: str) -> None:
    def pooled(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False)

    x = floats(5, 41, 5, 6)
    check(pooled, x, simd=simd)
    source = str(perfuse.explain(pooled, x).stage("sources"))
    assert "pf::load_strided" in source and "pf::gather" not in source, source


@pytest.mark.parametrize("simd", ISAS)
def test_every_other_element(simd: str) -> None:
    """Pairs are loaded as two vectors, the last one up to the last element and no further."""
    check(lambda x: (x[..., ::2] + 1, x[..., 1::2] * 2), floats(3, 64), simd=simd)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_partial_vectors_of_64_bits(dtype: torch.dtype) -> None:
    for width in (1, 7, 8, 9, 15, 20):
        x = floats(4, width).to(dtype)
        check(lambda x: x.flip(0) + x, x, simd="native")


@pytest.mark.parametrize("simd", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(2, 37, 70), (3, 64, 16), (2, 5, 90)])
def test_stores_that_run_along_another_axis(
    simd: str, dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    """A transposed gradient of a value that is not: lanes run where more is contiguous."""

    def gradient(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        s = torch.sigmoid(x)
        moved = grad.transpose(1, 2)
        return (x * s).transpose(1, 2).contiguous(), moved * s * (x * (1 - s) + 1)

    batch, rows, columns = sizes
    x, grad = floats(*sizes).to(dtype), floats(batch, columns, rows).to(dtype)
    check(gradient, x, grad, simd=simd)
    source = str(perfuse.explain(gradient, x, grad).stage("sources"))
    assert ("store_strided" in source) == (rows < 8), source


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_padding_copies_rows(mode: str, dtype: torch.dtype) -> None:
    """Nothing is gathered, whichever dimension is innermost, but for long edges."""

    def padded(x: Tensor) -> list[Tensor]:
        paddings = [(1, 1, 1, 1), (3, 0, 0, 2), (0, 0, 1, 2)]
        return [F.pad(x.sin(), padding, mode=mode) for padding in paddings]

    x = floats(2, 16, 6, 17).to(dtype)
    check(lambda x: F.pad(x, (16, 4, 5, 0), mode=mode), x, simd="native")
    for given in (x, x.contiguous(memory_format=torch.channels_last)):
        check(padded, given, simd="native")
        assert "gather" not in str(perfuse.explain(padded, given).stage("sources"))


@pytest.mark.parametrize("simd", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("patch", [2, 3, 4, 7])
def test_patches_are_copied_without_divisions(simd: str, dtype: torch.dtype, patch: int) -> None:
    """Positions of lanes that constants divide: powers of two, and others."""

    def patches(x: Tensor) -> Tensor:
        batch, channels, rows, columns = x.shape
        parts = x.view(batch, channels, rows // patch, patch, columns // patch, patch)
        return parts.permute(0, 2, 4, 1, 3, 5).reshape(-1, channels * patch * patch) * 2

    x = floats(2, 5, 6 * patch, 5 * patch).to(dtype)
    check(patches, x, simd=simd)
    last = x.contiguous(memory_format=torch.channels_last)
    check(patches, last, simd=simd)
    for given in (x, last):
        source = str(perfuse.explain(patches, given).stage("sources"))
        assert "pf::floordiv(" not in source and "pf::mod(" not in source, source
