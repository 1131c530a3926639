"""Our formulas against eager: types, strides, special values, and half precision."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from perfuse.graph.decompositions import OWN, STANDARD, _find, decomposition_table

TABLE = decomposition_table()
ROWS = [-math.inf, -1e4, -30.0, -3.0, -1.0, -1e-6, 0.0, 1e-6, 1.0, 3.0, 19.0, 21.0, 88.0, 1e4]
LINE = torch.tensor(ROWS + [math.inf, math.nan])

POINTWISE: list[Callable[[Tensor], Tensor]] = [
    F.gelu,
    lambda x: F.gelu(x, approximate="tanh"),
    F.silu,
    F.mish,
    F.softplus,
    lambda x: F.softplus(x, beta=2.0, threshold=5.0),
    F.hardswish,
    F.hardsigmoid,
    F.elu,
    F.logsigmoid,
    F.leaky_relu,
    F.hardtanh,
]

ROWWISE: list[Callable[[Tensor], Any]] = [
    lambda x: torch.softmax(x, -1),
    lambda x: torch.softmax(x.transpose(0, 1), 0),
    lambda x: torch.log_softmax(x, 1),
    lambda x: torch.logsumexp(x, [1]),
    lambda x: torch.logsumexp(x, [0, 1], keepdim=True),
    lambda x: F.layer_norm(x, (64,)),
    lambda x: F.layer_norm(x.t().contiguous().t(), (64,)),
    lambda x: F.group_norm(x, 4),
    lambda x: F.rms_norm(x, (64,)),
    lambda x: F.softmax(x, -1, dtype=torch.float32),
]


def decomposed(fn: Callable[..., Any], *args: Tensor) -> torch.fx.GraphModule:
    trace = make_fx(lambda *xs: fn(*xs), decomposition_table=TABLE, tracing_mode="fake")
    gm: torch.fx.GraphModule = trace(*args)
    return gm


def assert_near(got: Tensor, eager: Tensor, exact: Tensor) -> None:
    """As near to float64 as twice eager's error and an ulp of each value."""
    assert got.dtype == eager.dtype and got.shape == eager.shape
    assert got.stride() == eager.stride()
    # Not eager's NaNs: its vectorised gelu of +inf is one, where the function is +inf.
    assert torch.equal(got.isnan(), exact.isnan())
    is_finite = eager.isfinite() & exact.isfinite()
    is_infinite = eager.isinf() & exact.isinf()
    assert torch.equal(got[is_infinite], eager[is_infinite])
    g, e, t = got[is_finite].double(), eager[is_finite].double(), exact[is_finite]
    if g.numel() == 0:
        return
    info = torch.finfo(got.dtype)
    limit = 2 * (e - t).abs().max() + 4 * info.eps * t.abs() + info.tiny
    assert bool(((g - t).abs() <= limit).all()), ((g - t).abs() - limit).max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fn", POINTWISE, ids=range(len(POINTWISE)))
def test_activations(fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = LINE.to(dtype)
    assert_near(decomposed(fn, x)(x), fn(x), fn(x.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", POINTWISE, ids=range(len(POINTWISE)))
def test_activations_backward(fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    def grad(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        (result,) = torch.autograd.grad(fn(leaf).sum(), leaf)
        return result

    x = LINE[LINE.isfinite() & (LINE.abs() <= 88)].to(dtype)
    assert_near(decomposed(grad, x)(x), grad(x), grad(x.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", ROWWISE, ids=range(len(ROWWISE)))
def test_rowwise(fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = fn(x.double()).double()
    assert_near(decomposed(fn, x)(x), fn(x), exact)


def test_softmax_of_nothing_and_of_large_logits() -> None:
    empty = torch.randn(0, 4)
    assert decomposed(lambda x: torch.softmax(x, 1), empty)(empty).shape == (0, 4)
    x = torch.tensor([[1e4, 1e4 - 1.0, -1e30]])
    torch.testing.assert_close(
        decomposed(lambda x: torch.log_softmax(x, 1), x)(x), torch.log_softmax(x, 1)
    )
    inf = torch.tensor([[math.inf, 1.0], [-math.inf, -math.inf]])
    got = decomposed(lambda x: torch.logsumexp(x, 1), inf)(inf)
    assert torch.equal(got, torch.logsumexp(inf, 1))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", [(7,), (4, 7), (2, 7, 3, 3)])
def test_nll_loss_backward(reduction: str, shape: tuple[int, ...]) -> None:
    gen = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=gen)
    target = torch.randint(0, 7, shape[:1] + shape[2:] if len(shape) > 1 else (), generator=gen)
    weight = torch.rand(7, generator=gen)

    def grad(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        loss = F.cross_entropy(leaf, t, weight=w, ignore_index=2, reduction=reduction)
        (result,) = torch.autograd.grad(loss.sum(), leaf)
        return result

    gm = decomposed(grad, logits, target, weight)
    assert not any("scatter" in str(node.target) for node in gm.graph.nodes)
    torch.testing.assert_close(gm(logits, target, weight), grad(logits, target, weight))


def test_every_name_in_the_lists_is_an_op() -> None:
    """Names are checked here, so that a typing error is not taken for a missing op."""
    unknown = [name for name in STANDARD if _find(f"aten.{name}") is None]
    assert unknown == []
    assert [name for name in OWN if _find(name) is None] == []


def test_products_are_kept_whole() -> None:
    names = {str(op) for op in TABLE}
    kept = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default")
    assert not names & {*kept, "aten.convolution.default", "aten.embedding_dense_backward.default"}
