"""Perfuse's own functions are never traced as if they were the user's."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from perfuse.testing import fresh_cache


def gradients(x: Tensor, weight: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = torch.nn.functional.layer_norm(x, (x.shape[-1],), weight)
    return torch.autograd.grad(y, (x, weight), upstream)


def test_a_backward_that_is_first_compiled_inside_a_compiled_function() -> None:
    inputs = torch.randn(8, 16), torch.randn(16), torch.randn(8, 16)
    with fresh_cache(), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.compile(gradients, backend="perfuse")(*inputs)
    torch.testing.assert_close(found, gradients(*inputs))
