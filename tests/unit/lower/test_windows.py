"""Pooling and resampling: lowered formulas against eager, gradients included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from perfuse.lower.families.upsample import _whole_factor
from tests.unit.lower.rows import Row
from tests.unit.lower.samples import bf16, f32, i64, special


def with_nans(x: Tensor) -> Tensor:
    return x.masked_fill(x > 0, float("nan"))


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


IMAGE = f32(2, 3, 8, 9)
COLUMNS = f32(2, 18, 20)
ROWS = [
    Row("unfold", lambda x: F.unfold(x, 3, padding=1), (IMAGE,), grad=True),
    Row("unfold_dilated", lambda x: F.unfold(x, 3, dilation=2, padding=2), (IMAGE,)),
    Row("unfold_strided", lambda x: F.unfold(x.exp(), (3, 2), stride=(2, 3)), (IMAGE,), grad=True),
    Row("unfold_unbatched", lambda x: F.unfold(x, 2, stride=2), (f32(3, 8, 6),), grad=True),
    Row("fold", lambda x: F.fold(x * 2, (6, 7), 3), (COLUMNS,), grad=True),
    Row("fold_strided", lambda x: F.fold(x, (8, 9), 3, stride=2, padding=1), (COLUMNS,), grad=True),
    Row("fold_gaps", lambda x: F.fold(x, (11, 14), 2, stride=3), (f32(2, 8, 20),), grad=True),
    Row("pad_reflect", lambda x: F.pad(x * 2, (3, 0, 2, 1), mode="reflect"), (IMAGE,), grad=True),
    Row("pad_replicate", lambda x: F.pad(x, (3, 0, 2, 1), mode="replicate"), (IMAGE,)),
    Row("pad_reflect_1d", lambda x: F.pad(x, (3, 4), mode="reflect"), (f32(2, 3, 9),), grad=True),
    Row("pad_reflect_less", lambda x: F.pad(x.exp(), (-2, 3, 4, -1), mode="reflect"), (IMAGE,),
        grad=True),
    Row("pad_reflect_3d", lambda x: F.pad(x, (3, 1, 0, 2, 1, 0), mode="reflect"),
        (f32(2, 3, 4, 5, 6),), grad=True),
    Row("nearest_grad", lambda x: F.interpolate(x, scale_factor=2).relu(), (IMAGE,), grad=True),
    Row("nearest_grad_part", lambda x: F.interpolate(x, scale_factor=1.5), (IMAGE,), grad=True),
    Row("bilinear_grad", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (IMAGE,),
        grad=True),
    Row("bicubic_grad", lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), (IMAGE,),
        grad=True),
    Row("max_pool2d", lambda x: F.max_pool2d(x, 2), (IMAGE,)),
    Row("max_pool2d_indices", lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), (IMAGE,)),
    Row("max_pool2d_ceil", lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True, return_indices=True),
        (IMAGE,)),
    Row("max_pool2d_dilated", lambda x: F.max_pool2d(x, 3, 1, 1, 2, return_indices=True), (IMAGE,)),
    Row("max_pool2d_special", lambda x: F.max_pool2d(x, 2, return_indices=True),
        (special(1, 6, 6),)),
    Row("max_pool1d_nans", lambda x: F.max_pool1d(with_nans(x), 3, 1, 1, return_indices=True),
        (f32(2, 3, 29),)),
    Row("max_pool2d_nans", lambda x: F.max_pool2d(with_nans(x), 3, 2, 1, return_indices=True),
        (IMAGE,)),
    Row("max_pool2d_nans_last", lambda x: F.max_pool2d(channels_last(with_nans(x)), 2, 1,
        dilation=2, return_indices=True), (IMAGE,)),
    Row("max_pool3d_nans", lambda x: F.max_pool3d(with_nans(x), 2, return_indices=True),
        (f32(1, 2, 4, 6, 4),)),
    Row("max_pool2d_int", lambda x: F.max_pool2d(x, 2), (i64(1, 6, 6),)),
    Row("max_pool2d_grad", lambda x: F.max_pool2d(x, 3, 2, 1), (IMAGE,), grad=True),
    Row("max_pool2d_grad_ceil", lambda x: F.max_pool2d(x.exp(), (2, 3), (2, 1), ceil_mode=True),
        (IMAGE,), grad=True),
    Row("max_pool2d_bf16", lambda x: F.max_pool2d(x, 2), (bf16(1, 2, 6, 6),)),
    Row("max_pool1d", lambda x: F.max_pool1d(x, 3, 2, 1), (f32(2, 3, 9),), grad=True),
    Row("max_pool3d", lambda x: F.max_pool3d(x, 2), (f32(1, 2, 4, 6, 4),)),
    Row("avg_pool1d", lambda x: F.avg_pool1d(x, 3, 2, 1), (f32(2, 3, 9),), grad=True),
    Row("avg_pool2d", lambda x: F.avg_pool2d(x, 2), (IMAGE,), grad=True),
    Row("avg_pool2d_padded", lambda x: F.avg_pool2d(x, 3, 2, 1), (IMAGE,), grad=True),
    Row("avg_pool2d_ceil", lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), (IMAGE,), grad=True),
    Row("avg_pool2d_inner",
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False), (IMAGE,),
        grad=True),
    Row("avg_pool2d_divisor", lambda x: F.avg_pool2d(x, 3, 2, divisor_override=4), (IMAGE,),
        grad=True),
    Row("avg_pool2d_gaps", lambda x: F.avg_pool2d(x, 2, 3), (IMAGE,), grad=True),
    Row("avg_pool2d_large", lambda x: F.avg_pool2d(x, 7, 1, 2), (IMAGE,)),
    Row("avg_pool2d_bf16", lambda x: F.avg_pool2d(x, 3, 1), (bf16(1, 2, 6, 6),)),
    Row("avg_pool3d", lambda x: F.avg_pool3d(x, 2), (f32(1, 2, 4, 6, 4),), grad=True),
    Row("adaptive_one", lambda x: F.adaptive_avg_pool2d(x, 1), (IMAGE,), grad=True),
    Row("adaptive_even", lambda x: F.adaptive_avg_pool2d(x, (4, 3)), (IMAGE,), grad=True),
    Row("adaptive_uneven", lambda x: F.adaptive_avg_pool2d(x, (5, 4)), (IMAGE,),
        ("aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool2d_backward.default"),
        grad=True),
    Row("nearest", lambda x: F.interpolate(x, scale_factor=2), (IMAGE,), grad=True),
    Row("nearest_exact", lambda x: F.interpolate(x, scale_factor=3, mode="nearest-exact"),
        (IMAGE,), grad=True),
    Row("nearest_odd", lambda x: F.interpolate(x, size=(11, 5)), (IMAGE,)),
    Row("nearest_exact_odd", lambda x: F.interpolate(x, size=(11, 5), mode="nearest-exact"),
        (IMAGE,)),
    Row("nearest1d", lambda x: F.interpolate(x, scale_factor=2), (f32(2, 3, 5),), grad=True),
    Row("nearest3d", lambda x: F.interpolate(x, scale_factor=2), (f32(1, 2, 3, 2, 2),)),
    Row("bilinear", lambda x: F.interpolate(x, size=(11, 5), mode="bilinear"), (IMAGE,)),
    Row("bilinear_corners",
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True), (IMAGE,)),
    Row("bilinear_grad", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (IMAGE,),
        ("aten.upsample_bilinear2d_backward.default",), grad=True),
    Row("bicubic", lambda x: F.interpolate(x, size=(11, 5), mode="bicubic"), (IMAGE,)),
    Row("grid_sample", lambda x, g: F.grid_sample(x, g, align_corners=False),
        (IMAGE, f32(2, 4, 5, 2))),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_matches_eager(row: Row) -> None:
    row.check()


def test_a_factor_is_found_while_tensors_have_no_data() -> None:
    """A graph may be lowered while its capture is traced, where comparing tensors fails."""
    with FakeTensorMode():
        assert _whole_factor(7, 14, 2.0, exact=False) == 2
        assert _whole_factor(5, 15, None, exact=True) == 3
