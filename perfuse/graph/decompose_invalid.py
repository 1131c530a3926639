"""Standard rules with what eager's CPU kernels do about invalid values: an error, or NaN.

PyTorch's formulas follow the kernels for GPUs, which do not report them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perfuse.torch_compat.sizes import is_negative_now

Rule = Callable[..., Tensor]
BILINEAR, NEAREST = 0, 1  # interpolation of aten.grid_sampler_2d
ZEROS, BORDER = 0, 1  # its padding, besides reflection


def checked_probabilities(rule: Rule) -> Rule:
    """Binary cross entropy, which takes numbers from 0 to 1: others are an error."""

    def decomposed(x: Tensor, target: Tensor, *args: object, **options: object) -> Tensor:
        if x.device.type == "cpu":
            for name, values in (("input", x), ("target", target)):
                message = f"all elements of {name} should be between 0 and 1"
                torch.ops.aten._assert_async.msg(((values >= 0) & (values <= 1)).all(), message)
        return rule(x, target, *args, **options)

    return decomposed


def sampled_as_eager(rule: Rule) -> Rule:
    """Grid sampling: a coordinate that is not finite gives NaN, or with padding the first pixel."""

    def decomposed(
        x: Tensor, grid: Tensor, interpolation: int, padding: int, align_corners: bool
    ) -> Tensor:
        if x.device.type != "cpu" or interpolation not in (BILINEAR, NEAREST):
            return rule(x, grid, interpolation, padding, align_corners)
        if padding == ZEROS:
            sampled = rule(x, grid, interpolation, padding, align_corners)
            nothing = (grid[..., 0] * 0 + grid[..., 1] * 0).unsqueeze(1)  # or NaN
            return sampled + nothing if interpolation == BILINEAR else sampled
        is_valid = ~grid.isnan() if padding == BORDER else grid.isfinite()
        return rule(x, torch.where(is_valid, grid, -1), interpolation, padding, align_corners)

    return decomposed


def cropped_as_eager(x: Tensor, padding: list[int], value: object = 0) -> Any:
    """Padding, which stays whole: where it crops more than there is, ATen raises an error.

    Sizes that change get a guard for that: lowering must not see a symbol where ATen would refuse.
    """
    least: Any = torch.sym_min  # not annotated
    for i in range(len(padding) // 2):
        size, edges = x.shape[-1 - i], padding[2 * i : 2 * i + 2]
        if is_negative_now(size + sum(least(n, 0) for n in edges)):
            list(map(int, (size, *edges)))  # from now on they are those of this call
    return NotImplemented


INVALID = {
    "aten.binary_cross_entropy.default": checked_probabilities,
    "aten.grid_sampler_2d.default": sampled_as_eager,
}
