"""Layer, RMS and group norms as one `var_mean` (or mean of squares) and pointwise work.

Statistics are taken in float32 for half inputs. The backward is written with means instead of
sums times a count, so that its terms stay of the size of the gradient.
"""

import torch
from torch import Tensor

from perfuse.graph.decompose_layouts import lies_channels_last, lying_as
from perfuse.graph.decompose_softmax import opmath


def _inner_axes(x: Tensor, normalized_shape: list[int]) -> list[int]:
    return list(range(x.dim() - len(normalized_shape), x.dim()))


def _outer_axes(x: Tensor, normalized_shape: list[int]) -> list[int]:
    return list(range(x.dim() - len(normalized_shape)))


def _statistics_dtype(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> torch.dtype:
    """The type of the saved mean and rstd: on a CPU the input's, unless types are mixed."""
    is_mixed = any(p is not None and p.dtype != x.dtype for p in (weight, bias))
    return x.dtype if x.device.type == "cpu" and not is_mixed else opmath(x).dtype


def _sum_over(x: Tensor, axes: list[int]) -> Tensor:
    """A sum that leaves `x` alone for no axes (torch.sum would take them all)."""
    return torch.sum(x, axes) if axes else x


def _affine(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...] | None = None
) -> Tensor:
    """`x` times the weight plus the bias, where there are any, in the type of `x`."""

    def given(p: Tensor) -> Tensor:
        return p.to(x.dtype) if shape is None else p.to(x.dtype).reshape(shape)

    scaled = x if weight is None else x * given(weight)
    return scaled if bias is None else scaled + given(bias)


def layer_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    acc = opmath(x).contiguous()  # eager's result is contiguous whatever its input
    axes = _inner_axes(x, normalized_shape)
    var, mean = torch.var_mean(acc, dim=axes, correction=0, keepdim=True)
    rstd = torch.rsqrt(var + eps)
    out = _affine((acc - mean) * rstd, weight, bias)
    kept = _statistics_dtype(x, weight, bias)
    return out.to(x.dtype), mean.to(kept), rstd.to(kept)


def layer_norm_backward(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    grad, acc = opmath(grad_out), opmath(x).contiguous()
    scale = rstd.to(acc.dtype)
    x_hat = (acc - mean.to(acc.dtype)) * scale
    inner, outer = _inner_axes(x, normalized_shape), _outer_axes(x, normalized_shape)
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        g = _affine(grad, weight, None)
        along = torch.mean(g * x_hat, inner, keepdim=True)
        centred = g - torch.mean(g, inner, keepdim=True)
        grad_x = ((centred - x_hat * along) * scale).to(x.dtype).contiguous()
    if output_mask[1] and weight is not None:
        grad_weight = _sum_over(grad * x_hat, outer).to(weight.dtype)
    if output_mask[2] and bias is not None:
        # One row: the sum over no axes is the gradient itself, which must not be returned as is.
        grad_bias = _sum_over(grad, outer).to(bias.dtype) if outer else grad_out.clone()
    return grad_x, grad_weight, grad_bias


def rms_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    acc = opmath(x).contiguous()
    axes = _inner_axes(x, normalized_shape)
    floor = torch.finfo(acc.dtype).eps if eps is None else eps
    rstd = torch.rsqrt(torch.mean(acc * acc, axes, keepdim=True) + floor)
    return _affine(acc * rstd, weight, None).to(x.dtype), rstd


def rms_norm_backward(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: list[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    grad, acc = opmath(grad_out), opmath(x).contiguous()
    x_hat = acc * rstd
    grad_x = grad_weight = None
    if output_mask[0]:
        g = _affine(grad, weight, None)
        along = torch.mean(g * x_hat, _inner_axes(x, normalized_shape), keepdim=True)
        grad_x = ((g - x_hat * along) * rstd).to(x.dtype).contiguous()
    if output_mask[1] and weight is not None:
        outer = _outer_axes(x, normalized_shape)
        grad_weight = _sum_over(grad * x_hat, outer).to(weight.dtype)
    return grad_x, grad_weight


def _by_group(x: Tensor, sizes: tuple[int, int, int, int]) -> Tensor:
    """`x` in float32 as [batch, group, channel of the group, pixel]."""
    return opmath(x).reshape(sizes)


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    batch: int,
    channels: int,
    pixels: int,
    num_groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if lies_channels_last(x):
        return _group_norm_channels_last(x, weight, bias, num_groups, eps)
    if x.dim() == 3 and isinstance(pixels, int) and pixels == 1:
        x = x.reshape(-1).view(x.shape)  # eager's strides, where one token was transposed
    if has_inner_channels(x):
        out, mean, rstd = _group_norm_channels_last(x, weight, bias, num_groups, eps)
        return out.contiguous(), mean, rstd
    acc = _by_group(x.contiguous(), (batch, num_groups, channels // num_groups, pixels))
    var, mean = torch.var_mean(acc, dim=[2, 3], correction=0, keepdim=True)
    rstd = torch.rsqrt(var + eps)
    out = _affine((acc - mean) * rstd, weight, bias, (1, num_groups, -1, 1))
    kept = _statistics_dtype(x, weight, bias)
    flat = [batch, num_groups]
    return out.reshape(x.shape).to(x.dtype), mean.view(flat).to(kept), rstd.view(flat).to(kept)


def has_inner_channels(x: Tensor) -> bool:
    """Whether the channels of a pixel are neighbours, as in a transposed sequence."""
    steps = (x.stride(1), x.stride(-1))
    is_known = x.device.type == "cpu" and all(isinstance(step, int) for step in steps)
    return is_known and steps[0] == 1 and steps[1] > 1


def _group_norm_channels_last(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics of each channel first, which is contiguous, then those of the groups.

    Each channel gets a factor and a summand, as in eager: a pixel has no groups to look up.
    """
    acc = opmath(x).movedim(1, -1)
    pixel_axes = list(range(1, acc.dim() - 1))
    each_var, each_mean = torch.var_mean(acc, dim=pixel_axes, correction=0)
    sizes = (x.shape[0], num_groups, -1)
    own_var, own_mean = each_var.reshape(sizes), each_mean.reshape(sizes)
    mean = own_mean.mean(-1, keepdim=True)
    var = (own_var + (own_mean - mean).square()).mean(-1, keepdim=True)
    rstd = torch.rsqrt(var + eps)

    def per_channel(statistic: Tensor) -> Tensor:
        flat = statistic.expand(own_mean.shape).flatten(1)
        return flat.reshape(flat.shape[0], *[1] * len(pixel_axes), flat.shape[1])

    factor = _affine(per_channel(rstd), weight, None)
    summand = -per_channel(mean) * factor
    out = acc * factor + (summand if bias is None else summand + bias.to(acc.dtype))
    kept = _statistics_dtype(x, weight, bias)
    return out.movedim(-1, 1).to(x.dtype), mean.squeeze(-1).to(kept), rstd.squeeze(-1).to(kept)


def group_norm_backward(
    grad_out: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    batch: int,
    channels: int,
    pixels: int,
    num_groups: int,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    sizes = (batch, num_groups, channels // num_groups, pixels)
    grad, acc = _by_group(grad_out.contiguous(), sizes), _by_group(x.contiguous(), sizes)
    scale = rstd.to(acc.dtype).reshape(batch, num_groups, 1, 1)
    x_hat = (acc - mean.to(acc.dtype).reshape(batch, num_groups, 1, 1)) * scale
    kept = x.dtype if weight is None else weight.dtype
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        g = _affine(grad, weight, None, (1, num_groups, -1, 1))
        along = torch.mean(g * x_hat, [2, 3], keepdim=True)
        centred = g - torch.mean(g, [2, 3], keepdim=True)
        grad_x = lying_as(x, ((centred - x_hat * along) * scale).reshape(x.shape).to(x.dtype))
    if output_mask[1]:
        grad_weight = torch.sum(grad * x_hat, [0, 3]).reshape(channels).to(kept)
    if output_mask[2]:
        grad_bias = torch.sum(grad, [0, 3]).reshape(channels).to(kept)
    return grad_x, grad_weight, grad_bias
