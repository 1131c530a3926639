"""Group norms over transposed tokens: statistics of whole rows, against eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import perfuse
from tests.harness.compare import assert_as_good_as_eager
from tests.unit.lower.samples import f32


def normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.group_norm(x.transpose(1, 2), 4, weight, bias)


def results(function: object, dtype: torch.dtype, *args: Tensor) -> list[Tensor]:
    assert callable(function)
    own = [a.to(dtype).requires_grad_() for a in args]
    out = function(*own)
    cotangent = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, own, cotangent)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("channels", "tokens"), [(8, 11), (36, 11), (64, 11), (8, 1)])
def test_as_eager(channels: int, tokens: int, dtype: torch.dtype, dynamic: bool) -> None:
    torch._dynamo.reset()
    args = [a.to(dtype) for a in (f32(3, tokens, channels), f32(channels), f32(channels))]
    compiled = torch.compile(normalised, backend="perfuse", dynamic=dynamic)
    got, eager = results(compiled, dtype, *args), results(normalised, dtype, *args)
    assert [t.stride() for t in got] == [t.stride() for t in eager]
    assert_as_good_as_eager(got, eager, results(normalised, torch.float64, *args))


def test_of_as_many_images_as_data_say() -> None:
    def chosen(x: Tensor, mask: Tensor) -> Tensor:
        return F.group_norm(x[mask.nonzero().squeeze(1)].transpose(1, 2), 2)

    x, mask = f32(4, 5, 8), torch.tensor([1, 0, 1, 1])
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = torch.compile(chosen, backend="perfuse", fullgraph=True)(x, mask)
    torch.testing.assert_close(got, chosen(x, mask))


def test_under_autocast() -> None:
    x, weight, bias = f32(3, 11, 8), f32(8), f32(8)
    compiled = torch.compile(normalised, backend="perfuse")
    with torch.autocast("cpu", torch.bfloat16):
        got, eager = (f(x.bfloat16(), weight, bias) for f in (compiled, normalised))
    assert got.dtype is eager.dtype
    torch.testing.assert_close(got, eager)


def test_what_eager_refuses_is_refused() -> None:
    with pytest.raises(Exception, match="divisible"):
        torch.compile(normalised, backend="perfuse")(f32(3, 11, 6), None, None)


def test_statistics_are_of_rows() -> None:
    """Sums of each channel first, in lanes along the channels, then those of the groups."""
    with torch.no_grad():
        explained = perfuse.explain(normalised, f32(2, 64, 32), f32(32), f32(32))
    first = str(explained.stage("plan")).split("k1(")[0]
    assert "x0<2, x1<64*, x2<32)" in first, first
