"""Softmax, log softmax, and the losses on top of them, as chains that fuse.

Everything is computed in float32 for half inputs, as eager's kernels do inside, and cast once at
the end. What the backward needs is always a pointwise function of the input and of per-row values,
so that the partitioner may recompute it instead of saving a second tensor of that size.
"""

import torch
from torch import Tensor

from perfuse.torch_compat.sizes import is_known_empty

_MEAN = 1  # at::Reduction::Mean


def opmath(x: Tensor) -> Tensor:
    """`x` in the type eager's kernels compute in: float32 for half precision, else unchanged."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _shifted(x: Tensor, dim: int) -> Tensor:
    """`x` minus its largest value along `dim`: what keeps exp from overflowing."""
    # Eager's result is contiguous whatever its input, and a later view may rely on it.
    acc = opmath(x).contiguous()
    # amax has no identity: it refuses an empty axis, where there is nothing to shift.
    return acc if is_known_empty(acc) else acc - torch.amax(acc, dim, keepdim=True)


def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    e = torch.exp(_shifted(x, dim))
    # One division per row: the sum's own rounding outweighs that of the reciprocal.
    result = e * torch.reciprocal(torch.sum(e, dim, keepdim=True))
    return result if half_to_float else result.to(x.dtype)


def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax in which a row of only -inf is 0: attention that sees no key."""
    acc = opmath(x if dtype is None else x.to(dtype)).contiguous()
    if is_known_empty(acc):
        return acc.to(dtype or x.dtype)
    top = torch.amax(acc, dim, keepdim=True)
    e = torch.exp(acc - torch.where(top == -torch.inf, 0.0, top))
    total = torch.sum(e, dim, keepdim=True)
    result = e * torch.reciprocal(torch.where(total == 0.0, 1.0, total))
    return result.to(dtype or x.dtype)


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    # (x - max) - log(sum), never x - (max + log(sum)): the latter rounds at the size of max.
    shifted = _shifted(x, dim)
    result = shifted - torch.log(torch.sum(torch.exp(shifted), dim, keepdim=True))
    return result if half_to_float else result.to(x.dtype)


def softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    _check_types(grad, output, input_dtype)
    g, y = opmath(grad), opmath(output)
    # The difference first: close gradients cancel before they are rounded.
    return ((g - torch.sum(g * y, dim, keepdim=True)) * y).to(input_dtype).contiguous()


def _check_types(grad: Tensor, output: Tensor, input_dtype: torch.dtype) -> None:
    """Eager's rule on a GPU; on a CPU it has none."""
    if grad.device.type != "cuda":
        return
    is_widened = grad.dtype == torch.float32 and input_dtype in (torch.float16, torch.bfloat16)
    if output.dtype != grad.dtype or (grad.dtype != input_dtype and not is_widened):
        raise RuntimeError(
            f"expected output and grad of one type, which is the input's or float32 for a half "
            f"input, but got {output.dtype} and {grad.dtype} for {input_dtype}"
        )


def log_softmax_backward(
    grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    g, y = opmath(grad), opmath(output)
    return (g - torch.exp(y) * torch.sum(g, dim, keepdim=True)).to(input_dtype).contiguous()


def nll_loss_backward(
    grad: Tensor,
    logp: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """A comparison of class numbers instead of a scatter: pointwise, so it fuses."""
    axis = 0 if logp.dim() < 2 else 1
    num_classes = logp.shape[axis]
    per_class = [num_classes] + [1] * (logp.dim() - axis - 1)
    wanted = target.unsqueeze(axis)
    classes = torch.arange(num_classes, device=logp.device, dtype=target.dtype).view(per_class)
    scale = -(grad / total_weight if reduction == _MEAN else grad)
    if scale.dim() > 0:
        scale = scale.unsqueeze(axis)
    if weight is not None:
        # Where the class is the target, its weight is the target's weight: no gather is needed.
        scale = scale * weight.view(per_class)
    is_hit = (classes == wanted) & (wanted != ignore_index)
    zero = torch.zeros((), dtype=logp.dtype, device=logp.device)
    return torch.where(is_hit, scale.to(logp.dtype), zero)
