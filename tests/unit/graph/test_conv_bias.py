"""Biases of convolutions on a GPU: which calls are split, and that values stay."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from perfuse.context import Context
from perfuse.graph.conv_bias import split_conv_biases
from tests.harness.compare import assert_as_good_as_eager
from tests.triton.contractions import context_for
from tests.unit.graph.tracing import traced

CONV, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
GIVEN = (torch.randn(2, 3, 6, 5), torch.randn(4, 3, 3, 3), torch.randn(4))


def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv2d(x, weight, bias, padding=1).relu()


def upward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv_transpose1d(x, weight, bias, stride=2)


def gradients(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    given = [t.detach().requires_grad_() for t in (x, weight, bias)]
    return torch.autograd.grad(forward(*given).square().sum(), given)


def nodes_of(module: GraphModule, target: object) -> list[torch.fx.Node]:
    return [node for node in module.graph.nodes if node.target is target]


def test_the_bias_is_a_sum_of_its_own() -> None:
    made = split_conv_biases(traced(forward, *GIVEN), context_for("sm_90"))
    (call,) = nodes_of(made, CONV)
    assert call.args[2] is None
    got, expected = made(*GIVEN), forward(*GIVEN)
    assert got.stride() == expected.stride()
    assert_as_good_as_eager(got, expected, forward(*(t.double() for t in GIVEN)))


def test_transposed_convolutions_of_lines() -> None:
    given = (torch.randn(2, 3, 6), torch.randn(3, 4, 3), torch.randn(4))
    made = split_conv_biases(traced(upward, *given), context_for("sm_90"))
    assert nodes_of(made, CONV)[0].args[2] is None
    assert_as_good_as_eager(made(*given), upward(*given), upward(*(t.double() for t in given)))


def test_its_gradient_too() -> None:
    made = split_conv_biases(traced(gradients, *GIVEN), context_for("sm_90"))
    (call,) = nodes_of(made, BACKWARD)
    assert call.args[3] is None and call.args[10] == [True, True, False]
    wide = gradients(*(t.double() for t in GIVEN))
    assert_as_good_as_eager(made(*GIVEN), gradients(*GIVEN), wide)


def test_what_stays() -> None:
    module = traced(forward, *GIVEN)
    assert split_conv_biases(module, Context.default()) is module
    plain = traced(lambda x, w: F.conv2d(x, w), *GIVEN[:2])
    assert split_conv_biases(plain, context_for("sm_90")) is plain
