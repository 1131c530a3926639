"""Strides of elementwise results are eager's, whatever the layouts of the operands."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.harness.backend import compiled
from tests.unit.graph.tracing import traced

Op = Callable[[Tensor, Tensor], Tensor]
NAMED = """
add sub mul div floor_divide fmod remainder copysign ldexp logaddexp logaddexp2 maximum fmin atan2
hypot xlogy nextafter pow eq lt logical_and logical_xor heaviside clamp clamp_max
""".split()
OPS: dict[str, Op] = {
    **{name: getattr(torch, name) for name in NAMED},
    "floored": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "truncated": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, y, y),
    "xlog1py": torch.special.xlog1py,
    "log1p": lambda x, _: torch.log1p(x),
    "square": lambda x, _: x.square(),
    "relu": lambda x, _: torch.relu(x),
    "silu": lambda x, _: F.silu(x),
    "leaky_relu": lambda x, _: F.leaky_relu(x),
    "hardtanh": lambda x, _: F.hardtanh(x, -0.5, 0.5),
    "nan_to_num": lambda x, _: x.nan_to_num(),
    "clamped": lambda x, _: x.clamp(0.1, 0.5),
    "plus_number": lambda x, _: x + 1,
    "less_than_number": lambda _, y: y < 1,
    "of_number": lambda _, y: 2**y,
}


def layouts(shape: Sequence[int]) -> Iterator[Tensor]:
    n, c, h, w = shape
    yield torch.rand(n, c, h, w)
    yield torch.rand(n, h, w, c).permute(0, 3, 1, 2)  # channels-last
    yield torch.rand(w, h, c, n).permute(3, 2, 1, 0)
    yield torch.rand(n, 1, h, w).expand(n, c, h, w)
    yield torch.rand(w)
    yield torch.rand(n, h, w, c).double().permute(0, 3, 1, 2)


def results_of(x: Tensor, y: Tensor) -> list[tuple[str, Tensor]]:
    """Results of eager, by the name of the op; not every op takes every pair of dtypes."""
    found = []
    for name, op in OPS.items():
        try:
            found.append((name, op(x, y)))
        except RuntimeError:
            assert x.dtype != y.dtype
    return found


def all_of(ops: Sequence[Op]) -> Callable[[Tensor, Tensor], list[Tensor]]:
    return lambda x, y: [op(x, y) for op in ops]


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5), (1, 8, 1, 1)], ids=str)
def test_traced_strides_are_those_of_eager(shape: tuple[int, ...]) -> None:
    """Sizes of one included: a library call may look at their strides."""
    for x, y in itertools.product(layouts(shape), layouts(shape)):
        eager = results_of(x, y)
        graph = traced(all_of([OPS[name] for name, _ in eager]), x, y, decompose=True).graph
        nodes = graph.output_node().args[0]
        wrong = {
            name: (node.meta["val"].stride(), result.stride())
            for (name, result), node in zip(eager, nodes, strict=True)
            if node.meta["val"].stride() != result.stride()
            and not (name == "ldexp" and 1 in shape)  # two kernels, with two rules for sizes of one
        }
        assert not wrong, (x.shape, x.stride(), y.shape, y.stride(), wrong)


# Ops whose decompositions have the other operand's strides, or those of none.
TURNED = "copysign floor_divide floored heaviside ldexp lerp logaddexp of_number xlogy".split()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_strides_are_those_of_eager(dynamic: bool) -> None:
    x, y = torch.rand(2, 3, 4, 5), torch.rand(4, 2, 5, 3).permute(1, 3, 0, 2)
    repeated = torch.rand(2, 1, 4, 5).expand(2, 3, 4, 5)

    def all_ops(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        ops = [OPS[name] for name in (TURNED if dynamic else OPS)]
        return [f(*pair) for f in ops for pair in ((x, y), (y, x), (z, y))]

    got = compiled(all_ops, "perfuse", dynamic=dynamic)(x, y, repeated)
    eager = all_ops(x, y, repeated)
    assert [g.stride() for g in got] == [e.stride() for e in eager]


def test_a_convolution_gets_strides_of_eager() -> None:
    """One channel is contiguous and channels-last at once: the strides of size one decide."""

    def convolved(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        one = F.layer_norm(x.permute(0, 2, 3, 1), (1,)).permute(0, 3, 1, 2)
        return F.conv2d(torch.log1p(one.square()), w), F.conv2d(one, w), F.conv2d(one + 1, w)

    x, w = torch.rand(2, 1, 4, 5), torch.rand(3, 1, 1, 1)
    got, eager = compiled(convolved, "perfuse")(x, w), convolved(x, w)
    torch.testing.assert_close(got, eager)
    assert [g.stride() for g in got] == [e.stride() for e in eager]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_product_gets_strides_of_eager_behind_one_pixel(dynamic: bool) -> None:
    """One image of one pixel is contiguous too; `hardtanh` keeps the strides it was given."""

    def one_pixel(x: Tensor, w: Tensor) -> Tensor:
        return torch.einsum("...d,od->...o", F.hardtanh(F.adaptive_max_pool2d(x, 1)), w)

    x, w = torch.rand(1, 8, 6, 5).contiguous(memory_format=torch.channels_last), torch.rand(3, 1)
    got, eager = compiled(one_pixel, "perfuse", dynamic=dynamic)(x, w), one_pixel(x, w)
    torch.testing.assert_close(got, eager)
    assert [got.stride(d) for d in (1, 3)] == [eager.stride(d) for d in (1, 3)]


POOLED = [(1, 2, 6, 5), (2, 1, 6, 5), (2, 3, 1, 5), (1, 3, 6, 1), (2, 3, 6, 5)]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_max_pooling_gives_dimensions_of_size_1_eager_s_strides(dynamic: bool) -> None:
    """By these, the next operation of eager recognises one channels-last image."""

    def pooled(images: list[Tensor], volumes: list[Tensor]) -> list[Tensor]:
        flat = [part for x in images for part in F.max_pool2d_with_indices(x, 2, 1, 1)]
        return flat + [F.max_pool3d(x, 2, 1, 1) for x in volumes]

    plain = [torch.rand(shape) for shape in POOLED]
    last = [x.contiguous(memory_format=torch.channels_last) for x in plain]
    marked = torch.rand(2, 6, 5, 1).as_strided((2, 1, 6, 5), (30, 1, 5, 1))
    volumes = [torch.rand(1, 2, 3, 4, 5), torch.rand(1, 3, 4, 5, 2).permute(0, 4, 1, 2, 3)]
    args = [*plain, *last, marked], volumes
    got, eager = compiled(pooled, "perfuse", dynamic=dynamic)(*args), pooled(*args)
    torch.testing.assert_close(got, eager, rtol=0, atol=0)
    assert [g.stride() for g in got] == [e.stride() for e in eager]
