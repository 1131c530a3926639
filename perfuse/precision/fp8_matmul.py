"""Matmuls of FP8 values with scales: by the library on GPUs, in float32 on CPUs.

A product of two FP8 values is exact in float32, so both add the same terms, and differ in the
order and the rounding of partial sums alone. The library has no matmul for scales of blocks on most
GPUs: their values are multiplied in float32 there too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perfuse.precision.quantise import Scaled, dequantised_blocks

# The library sums over a multiple of this, in the weight gradient over rows of the activations.
ROWS_MULTIPLE = 16
_BIAS_DTYPES = (torch.bfloat16, torch.float16)  # that the library adds by itself


def scaled_matmul(
    a: Scaled,
    b: Scaled,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    is_fast: bool = False,
) -> Tensor:
    """Multiply two matrices with a scale for each tensor, or for rows of `a` and columns of `b`.

    `is_fast` lets a GPU keep its partial sums in fewer bits than float32 has.
    """
    if a.values.device.type == "cuda":
        return _by_library(a, b, dtype, bias, is_fast)
    exact = torch.mm(a.values.float(), b.values.float()) * a.scale * b.scale
    return (exact if bias is None else exact + bias.float()).to(dtype)


def _by_library(
    a: Scaled, b: Scaled, dtype: torch.dtype, bias: Tensor | None, is_fast: bool
) -> Tensor:
    """The library reads `a` by rows and `b` by columns, and scales rows into bfloat16 alone."""
    made = torch.bfloat16 if a.scale.ndim == 2 else dtype
    fused = None if bias is None or made not in _BIAS_DTYPES else bias.to(made)
    result: Tensor = torch.ops.aten._scaled_mm.default(
        a.values.contiguous(),
        b.values.t().contiguous().t(),
        a.scale.contiguous(),
        b.scale.contiguous(),
        bias=fused,
        out_dtype=made,
        use_fast_accum=is_fast,
    )
    if bias is not None and fused is None:
        result = result + bias
    return result.to(dtype)


def block_matmul(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Multiply two matrices that were quantised by blocks; see `block_values`."""
    result = torch.mm(a, b)
    return (result if bias is None else result + bias).to(dtype)


def block_values(x: Scaled) -> Tensor:
    """The operand of `block_matmul`: the quantised values, exactly, in float32."""
    return dequantised_blocks(x, torch.float32)
