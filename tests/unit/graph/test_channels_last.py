"""Convolutional networks in channels-last: which graphs, and that nobody sees another layout."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import perfuse
from perfuse.context import Context
from perfuse.graph.channels_last import lay_channels_last, lay_joint_channels_last
from tests.harness.compare import assert_as_good_as_eager, norm_complaints
from tests.triton.contractions import context_for
from tests.unit.graph.tracing import calls, traced

LAST = torch.channels_last


def pair(x: Tensor, point: Tensor, plane: Tensor) -> Tensor:
    y = F.conv2d(x, point).clamp(0, 6)
    return F.conv2d(y, plane, padding=1, groups=plane.shape[0]).relu() + y


def block(x: Tensor, point: Tensor, plane: Tensor, last: Tensor) -> Tensor:
    return F.conv2d(pair(x, point, plane), last)


PAIR = (torch.randn(2, 3, 8, 8), torch.randn(16, 3, 1, 1), torch.randn(16, 1, 3, 3))
GIVEN = (*PAIR, torch.randn(8, 16, 1, 1))


def test_operands_are_channels_last_and_results_are_not() -> None:
    module = traced(block, *GIVEN)
    made = lay_channels_last(module, Context.default())
    convolutions = made.graph.find_nodes(
        op="call_function", target=torch.ops.aten.convolution.default
    )
    for node in convolutions:
        assert node.args[0].meta["val"].is_contiguous(memory_format=LAST)
        assert node.meta["val"].is_contiguous(memory_format=LAST)
    # One transposition at each border.
    assert sum(call.startswith("clone(") for call in calls(made)) == 2
    got, expected = made(*GIVEN), block(*GIVEN)
    assert got.stride() == expected.stride()
    assert_as_good_as_eager(got, expected, block(*(t.double() for t in GIVEN)))


def test_joint_graphs_decide_for_both_halves() -> None:
    dense_ones = traced(lambda x, w: dense(x, w) + dense(x, w), GIVEN[0], torch.randn(16, 3, 3, 3))
    decided = lay_joint_channels_last(dense_ones, Context.default())
    assert lay_channels_last(decided, Context.default()) is decided
    made = lay_joint_channels_last(traced(block, *GIVEN), Context.default())
    assert lay_channels_last(made, Context.default()) is made
    assert sum(call.startswith("clone(") for call in calls(made)) == 2


def dense(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1).relu()


def gathered(x: Tensor, plane: Tensor, point: Tensor) -> Tensor:
    return F.conv2d(dense(dense(x, plane), plane), point) + 1


def strided(x: Tensor, plane: Tensor, point: Tensor) -> Tensor:
    return F.conv2d(dense(dense(x, plane), plane), point, stride=2) + 1


GATHERED = (torch.randn(2, 8, 5, 7), torch.randn(8, 8, 3, 3), torch.randn(16, 8, 1, 1))


def test_points_of_small_images_are_channels_last_on_their_own() -> None:
    made = lay_channels_last(traced(gathered, *GATHERED), Context.default())
    target = torch.ops.aten.convolution.default
    layouts = [
        node.args[0].meta["val"].is_contiguous(memory_format=LAST)
        for node in made.graph.find_nodes(op="call_function", target=target)
    ]
    assert layouts == [False, False, True]
    got, expected = made(*GATHERED), gathered(*GATHERED)
    assert got.stride() == expected.stride()
    assert_as_good_as_eager(got, expected, gathered(*(t.double() for t in GATHERED)))


def test_points_of_small_images_are_matmuls_in_both_directions() -> None:
    given = [t.clone().requires_grad_() for t in GATHERED]
    shown = perfuse.explain(gathered, *given)
    assert shown.stage("graph").count("aten.convolution.default") == 2
    assert shown.stage("graph").count("aten.convolution_backward.default") == 2


OTHERS: dict[str, Any] = {
    "1x1 points of large images": (gathered, (torch.randn(2, 8, 6, 7), *GATHERED[1:])),
    "1x1 points with a stride": (strided, GATHERED),
    "all channels, several points": (dense, (GIVEN[0], torch.randn(16, 3, 3, 3))),
    "double": (block, tuple(t.double() for t in GIVEN)),
    "two convolutions": (pair, PAIR),
    "one dimension": (F.conv1d, (torch.randn(2, 3, 8), torch.randn(16, 3, 1))),
}


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS.keys())
def test_other_graphs_stay(case: Any) -> None:
    module = traced(case[0], *case[1])
    assert lay_channels_last(module, Context.default()) is module


def three(x: Tensor, first: Tensor, second: Tensor, plane: Tensor) -> Tensor:
    y = dense(dense(x, first), second)
    return F.conv2d(y, plane, padding=1, groups=plane.shape[0]).relu() + y


DENSE = (GIVEN[0], torch.randn(16, 3, 3, 3), torch.randn(16, 16, 3, 3))
THREE = tuple(t.bfloat16() for t in DENSE)
PLANE = torch.randn(16, 1, 3, 3).bfloat16()


def test_halves_are_channels_last_on_a_gpu() -> None:
    """Convolutions of one group and depthwise ones, with one transposition at each border."""
    given, context = (*THREE, PLANE), context_for("sm_90")
    made = lay_channels_last(traced(three, *given), context)
    target = torch.ops.aten.convolution.default
    for node in made.graph.find_nodes(op="call_function", target=target):
        assert node.args[0].meta["val"].is_contiguous(memory_format=LAST)
        assert node.meta["val"].is_contiguous(memory_format=LAST)
    assert sum(call.startswith("clone(") for call in calls(made)) == 2
    assert_as_good_as_eager(made(*given), three(*given), three(*(t.double() for t in given)))
    joint = lay_joint_channels_last(traced(three, *given), context)
    assert lay_channels_last(joint, context) is joint


def grouped(x: Tensor, first: Tensor, second: Tensor, groups: Tensor) -> Tensor:
    return F.conv2d(dense(dense(x, first), second), groups, padding=1, groups=8)


def normed(x: Tensor, first: Tensor, second: Tensor, plane: Tensor) -> Tensor:
    y = F.group_norm(dense(x, first), 4)
    y = F.group_norm(dense(y, second), 4)
    return F.conv2d(y, plane, padding=1, groups=plane.shape[0])


GPU_OTHERS: dict[str, Any] = {
    "float32": (block, GIVEN),
    "group norms": (normed, (*THREE, PLANE)),
    "several groups": (grouped, (*THREE, torch.randn(16, 2, 3, 3).bfloat16())),
    "two convolutions": (pair, tuple(t.bfloat16() for t in PAIR)),
}


@pytest.mark.parametrize("case", GPU_OTHERS.values(), ids=GPU_OTHERS.keys())
def test_other_gpu_graphs_stay(case: Any) -> None:
    module = traced(case[0], *case[1], decompose=True)
    assert lay_channels_last(module, context_for("sm_90")) is module


class Mobile(nn.Module):
    """A stem, an inverted bottleneck with squeeze and excitation, pooling; views at the end."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.widen = nn.Conv2d(channels, wide, 1, bias=False)
        self.plane = nn.Conv2d(wide, wide, kernel, padding=kernel // 2, groups=wide, bias=False)
        self.squeeze, self.excite = nn.Conv2d(wide, 4, 1), nn.Conv2d(4, wide, 1)
        self.narrow = nn.Conv2d(wide, channels, 1, bias=False)
        self.norms = nn.ModuleList(map(nn.BatchNorm2d, (channels, wide, wide, channels)))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = F.relu6(self.norms[0](self.stem(x)))
        y = F.hardswish(self.norms[1](self.widen(x)))
        y = F.silu(self.norms[2](self.plane(y)))
        y = y * self.excite(F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))).sigmoid()
        x = x + self.norms[3](self.narrow(y))
        pooled = F.max_pool2d(x, 3, 2, 1) + F.avg_pool2d(x, 3, 2, 1)
        both = torch.cat([x, x[:, :1]], 1)
        return x, x.flatten(1), pooled, both, F.adaptive_avg_pool2d(y, 1).flatten(1)


@pytest.mark.parametrize("is_training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("seed", range(4))
def test_networks_as_eager(seed: int, is_training: bool) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = Mobile(draw.choice([5, 8, 12]), draw.choice([3, 5])).train(is_training)
    x = torch.randn(draw.choice([1, 2, 3]), 3, draw.randint(2, 9), draw.randint(2, 9))
    wide, ours = copy.deepcopy(model).double(), copy.deepcopy(model)
    compiled = torch.compile(ours, backend="perfuse")
    results = []
    for run, given in ((compiled, x), (model, x), (wide, x.double())):
        with torch.set_grad_enabled(is_training):
            out = run(given)
        if is_training:
            torch.stack([o.double().sin().sum() for o in out]).sum().backward()
        results.append(out)
    got, eager, exact = results
    assert [o.stride() for o in got] == [o.stride() for o in eager]
    assert_as_good_as_eager(got, eager, exact)
    if is_training:
        _compare_gradients(ours, model, wide)


def _compare_gradients(ours: nn.Module, model: nn.Module, wide: nn.Module) -> None:
    """By norms: a bias before a batch norm has a gradient of zero, and any noise beside it."""
    grads = [[p.grad for p in m.parameters()] for m in (ours, model, wide)]
    assert not norm_complaints(*grads)
