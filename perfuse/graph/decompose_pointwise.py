"""Activations as scalar formulas in float32, cast once at the end.

One formula per function. Where the textbook form overflows or cancels, the comment says why ours
does not.
"""

import ctypes
import math

import torch
from torch import Tensor

from perfuse.graph.decompose_softmax import opmath

_SQRT_HALF = math.sqrt(0.5)
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
# Twice the argument of the tanh in gelu's approximation is x (a + b x^2).
GELU_LINEAR = 2.0 * math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715 * GELU_LINEAR
# Past this, tanh(softplus(x)) is 1 in float32 and float64 alike, and e^x squared is still finite.
_MISH_LIMIT = 20.0


def _tanh_gelu_twice(x: Tensor) -> Tensor:
    """2u of tanh-gelu: (1 + tanh(u)) / 2 is sigmoid(2u), no cancellation, and less to compute."""
    return x * (GELU_LINEAR + _GELU_CUBIC * (x * x))


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    acc = opmath(x)
    if approximate == "tanh":
        result = acc * torch.sigmoid(_tanh_gelu_twice(acc))
    else:
        result = 0.5 * acc * (1.0 + torch.erf(acc * _SQRT_HALF))
    return result.to(x.dtype)


def _tanh_gelu_slope(x: Tensor) -> Tensor:
    """sigmoid and its slope from one exp: 1 - sigmoid would cancel where the sigmoid is near 1."""
    w = _tanh_gelu_twice(x)
    e = torch.exp(-torch.abs(w))
    d = torch.reciprocal(1.0 + e)
    gate = torch.where(w < 0, e * d, d)
    inner_slope = GELU_LINEAR + 3.0 * _GELU_CUBIC * (x * x)
    return gate + x * inner_slope * (e * d * d)


def _erf_gelu_slope(x: Tensor) -> Tensor:
    density = torch.exp(-0.5 * (x * x)) * _INV_SQRT_2PI
    return 0.5 * (1.0 + torch.erf(x * _SQRT_HALF)) + x * density


def gelu_backward(grad: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    acc = opmath(x)
    slope = _tanh_gelu_slope(acc) if approximate == "tanh" else _erf_gelu_slope(acc)
    return (opmath(grad) * slope).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    acc = opmath(x)
    return (acc * torch.sigmoid(acc)).to(x.dtype)


def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    acc = opmath(x)
    s = torch.sigmoid(acc)
    return (opmath(grad) * s * (1.0 + acc * (1.0 - s))).to(x.dtype)


def _mish_ratio(x: Tensor) -> Tensor:
    """n = e^x (e^x + 2): tanh(softplus(x)) is n / (n + 2), one exp and no cancellation."""
    e = torch.exp(torch.clamp(x, max=_MISH_LIMIT))
    return e * (e + 2.0)


def mish(x: Tensor) -> Tensor:
    acc = opmath(x)
    n = _mish_ratio(acc)
    return (acc * (n / (n + 2.0))).to(x.dtype)


def mish_backward(grad: Tensor, x: Tensor) -> Tensor:
    acc = opmath(x)
    n = _mish_ratio(acc)
    t = n / (n + 2.0)
    # 1 - t^2 written out, because t is close to 1 over half of the line.
    one_minus_square = 4.0 * (n + 1.0) / ((n + 2.0) * (n + 2.0))
    slope = t + acc * torch.sigmoid(acc) * one_minus_square
    return (opmath(grad) * slope).to(x.dtype)


def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    acc = opmath(x)
    scaled = acc * beta
    # log(1 + e^z) = max(z, 0) + log1p(e^-|z|): no overflow, whatever the threshold.
    smooth = torch.clamp(scaled, min=0.0) + torch.log1p(torch.exp(-torch.abs(scaled)))
    return torch.where(scaled > threshold, acc, smooth / beta).to(x.dtype)


def softplus_backward(grad: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    acc, g = opmath(x), opmath(grad)
    scaled = acc * beta
    return torch.where(scaled > threshold, g, g * torch.sigmoid(scaled)).to(x.dtype)


def threshold_backward(grad: Tensor, x: Tensor, threshold: float) -> Tensor:
    """Compared with the threshold as it is: a comparison of halves would round that first."""
    compared = x if threshold == 0 else opmath(x)
    return torch.where(compared <= threshold, 0, grad)


def log_sigmoid_forward(x: Tensor) -> tuple[Tensor, Tensor]:
    """With what the backward needs: exp(-|x|) on a CPU, nothing on a GPU.

    On a CPU eager's results are contiguous, whatever the layout of the argument.
    """
    wide = opmath(x)
    small = torch.exp(-wide.abs())
    result = (wide.clamp(max=0) - torch.log1p(small)).to(x.dtype)
    if x.device.type != "cpu":
        return result, x.new_empty((0,))
    return result.contiguous(), small.to(x.dtype).contiguous()


def soft_margin_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    """The slope is -target * sigmoid(-target*x); sigmoid(target*x) - 1 would cancel far out."""
    slope = -opmath(target) * torch.sigmoid(-opmath(target) * opmath(x))
    if reduction == 1:
        slope = slope / x.numel()
    return (opmath(grad) * slope).to(x.dtype)


def native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Drawn in float32 for every dtype: bfloat16 is too coarse to match a probability."""
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = torch.rand_like(x, dtype=torch.float32) >= p
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    return x * kept * scale, kept


def lerp(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """Between two tensors, from the nearer one, chosen here: the standard rule computes the choice.

    As in eager, the weight is rounded to the precision of the arithmetic before it is used.
    """
    if not isinstance(weight, int | float) or not start.is_floating_point():
        return torch.lerp(start, end, start.new_full((), weight))
    exact = float(weight) if start.dtype == torch.float64 else ctypes.c_float(weight).value
    a, b = opmath(start), opmath(end)
    result = exact * (b - a) + a if abs(exact) < 0.5 else (exact - 1.0) * (b - a) + b
    return result.to(start.dtype)
