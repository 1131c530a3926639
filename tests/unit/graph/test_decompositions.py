"""Our formulas against eager: types, strides, special values, and half precision."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion

from perfuse.graph import decompose_layouts as layouts
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


ORDERS = [0, 1, 2, 3, 2.5, -1, -2, math.inf, -math.inf]
DIMS: list[Any] = [None, [], [-2], [0], [1, -1], [-3, -2, -1]]


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", DIMS, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_vector_norm(order: float, dim: Any, keepdim: bool) -> None:
    def norm(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, order, dim, keepdim)

    for shape in ((3, 4, 5), (3, 1, 5), (1, 1, 1), (1, 4, 1)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        assert_near(decomposed(norm, x)(x), norm(x), norm(x.double()))


@pytest.mark.parametrize("keepdim", [False, True])
def test_vector_norm_of_one_element_is_contiguous(keepdim: bool) -> None:
    def norm(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, 2, -2, keepdim)

    x = torch.randn(2, 1, 7).transpose(0, -1)
    got, eager = decomposed(norm, x)(x), norm(x)
    assert torch.equal(got, eager) and got.stride() == eager.stride()


@pytest.mark.parametrize("dim", [None, 0, -1])
def test_vector_norm_of_a_scalar(dim: int | None) -> None:
    def norm(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, 3, dim, keepdim=True)

    x = torch.tensor(-2.0)
    assert_near(decomposed(norm, x)(x), norm(x), norm(x.double()))


@pytest.mark.parametrize("order", ORDERS)
def test_vector_norm_of_special_values(order: float) -> None:
    def norm(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, order, 1)

    rows = [[1e30, 2.0], [math.inf, 1.0], [math.nan, 1.0], [0.0, 0.0]]
    for x in (torch.tensor(rows), torch.tensor([[1e30], [-1e-30], [math.nan], [0.0]])):
        torch.testing.assert_close(decomposed(norm, x)(x), norm(x), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_vector_norm_in_halves(dtype: torch.dtype) -> None:
    x = torch.randn(8, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    for asked in (None, torch.float32, torch.float64):
        got = decomposed(lambda x, d=asked: torch.linalg.vector_norm(x, dim=1, dtype=d), x)(x)
        torch.testing.assert_close(got, torch.linalg.vector_norm(x, dim=1, dtype=asked))


SCATTERS: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.slice_scatter(x, torch.ones_like(x[1:]), 0, 1),
    lambda x: torch.select_scatter(x, torch.ones_like(x[1]), 0, 1),
    lambda x: torch.diagonal_scatter(x, torch.ones_like(x.diagonal())),
]


@pytest.mark.parametrize("fn", SCATTERS, ids=("slice", "select", "diagonal"))
def test_scatter_into_repeated_elements(fn: Callable[[Tensor], Tensor]) -> None:
    for x in (torch.randn(5).expand(5, 5), torch.randn(5, 1).expand(5, 5), torch.randn(5, 5)):
        graph = decomposed(fn, x)
        (output,) = graph.graph.find_nodes(op="output")[0].all_input_nodes
        assert output.meta["val"].stride() == fn(x).stride()
        assert torch.equal(graph(x), fn(x))


FILLED: list[Tensor] = [
    torch.randn(4, 3).t(),
    torch.randn(6, 4)[::2],
    torch.randn(4, 6)[:, ::2].t(),
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.randn(3, 1).expand(3, 5),
]


@pytest.mark.parametrize("make", [int, torch.tensor], ids=("number", "tensor"))
@pytest.mark.parametrize("x", FILLED, ids=lambda x: f"{tuple(x.shape)}{x.stride()}")
def test_index_fill_has_eager_strides_and_writes_nothing_in_place(
    x: Tensor, make: Callable[[int], Any]
) -> None:
    def fill(x: Tensor, index: Tensor) -> Tensor:
        return torch.index_fill(x, -1, index, make(2))

    index = torch.tensor([0, 2])
    graph = decomposed(fill, x, index)
    assert not [n for n in graph.graph.nodes if str(n.target).endswith("_.default")]
    (output,) = graph.graph.find_nodes(op="output")[0].all_input_nodes
    assert output.meta["val"].stride() == fill(x, index).stride()
    assert torch.equal(graph(x, index), fill(x, index))


def test_index_fill_refuses_what_eager_refuses() -> None:
    fill, x, index = OWN["aten.index_fill.int_Scalar"], torch.randn(3, 4), torch.tensor([0])
    assert torch.equal(fill(torch.tensor(1.0), 0, index, 2), torch.tensor(2.0))
    for raised, arguments in (
        (RuntimeError, (x, 0, index.view(1, 1), 2)),
        (IndexError, (x, 0, index.int(), 2)),
        (IndexError, (x, 2, index, 2)),
        (RuntimeError, (x, 0, index, torch.ones(1))),
        (RuntimeError, (x, 0, index, torch.tensor(1j))),
    ):
        with pytest.raises(raised):
            torch.index_fill(*arguments)
        with pytest.raises(raised):
            fill(*arguments)


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


# Ops that PyTorch 2.13 has and the oldest supported versions may lack.
RECENT = {"aten._foreach_clone.default"}


def test_every_name_in_the_lists_is_an_op() -> None:
    """Names are checked here, so that a typing error is not taken for a missing op."""
    unknown = [name for name in STANDARD if _find(f"aten.{name}") is None]
    assert unknown == []
    missing = {name for name in OWN if _find(name) is None}
    assert missing <= (RECENT if TorchVersion(torch.__version__) < (2, 13) else set())


def test_products_are_kept_whole() -> None:
    names = {str(op) for op in TABLE}
    kept = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default")
    assert not names & {*kept, "aten.convolution.default", "aten.embedding_dense_backward.default"}


@pytest.mark.parametrize(
    ("grad", "output", "of_input", "is_right"),
    [
        (torch.float32, torch.float32, torch.float32, True),
        (torch.float32, torch.float32, torch.float16, True),
        (torch.float32, torch.float16, torch.float16, False),
        (torch.float16, torch.float16, torch.float32, False),
    ],
)
def test_types_of_softmax_backward_on_a_gpu(
    grad: torch.dtype, output: torch.dtype, of_input: torch.dtype, is_right: bool
) -> None:
    backward = OWN["aten._softmax_backward_data.default"]
    with FakeTensorMode():
        args = (torch.empty(3, 4, device="cuda", dtype=dtype) for dtype in (grad, output))
        if is_right:
            assert backward(*args, -1, of_input).dtype == of_input
            return
        with pytest.raises(RuntimeError, match="one type"):
            backward(*args, -1, of_input)


@pytest.mark.parametrize("device", ("cpu", "cuda"))
def test_a_rolled_tensor_lies_channels_last_on_the_cpu_only(device: str) -> None:
    """Eager's kernel for GPUs gives contiguous results; its op is left whole there."""
    with FakeTensorMode():
        x = torch.empty(2, 4, 3, 5, device=device).to(memory_format=torch.channels_last)
        found = layouts.roll(x, [1], [2])
    assert found is NotImplemented if device == "cuda" else found.stride() == x.stride()


LAST: dict[str, Callable[[Tensor], Tensor]] = {
    "reflect": lambda x: F.pad(x, (1, 2, 1, 0), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1, 2, 1, 0), mode="replicate"),
    "roll": lambda x: x.roll(1, 3),
    "roll_by_nothing": lambda x: x.roll(0, 3),
    "roll_one_of_two": lambda x: x.roll((1, 0), (1, 2)),
}


@pytest.mark.parametrize("mode", ("fake", "symbolic"))
@pytest.mark.parametrize("name", LAST)
def test_strides_of_channels_last(name: str, mode: str) -> None:
    fn = LAST[name]
    shapes = ((2, 4, 7, 5), (3, 2, 7, 4))
    for x in (torch.randn(s).to(memory_format=torch.channels_last) for s in shapes):
        trace = make_fx(lambda x: fn(x), decomposition_table=TABLE, tracing_mode=mode)
        assert_near(trace(x)(x), fn(x), fn(x.double()))
        assert_near(trace(x.contiguous())(x.contiguous()), fn(x.contiguous()), fn(x.double()))


@pytest.mark.parametrize("mode", ("fake", "symbolic"))
@pytest.mark.parametrize("padding", [(1, 2, 1, 0), (-1, 2, 3, -2), (0, 0, 4, 4)])
def test_gradient_of_reflection(padding: tuple[int, ...], mode: str) -> None:
    """No index is looked up, and it has the layout of the input."""

    def fold(g: Tensor, x: Tensor) -> Tensor:
        return torch.ops.aten.reflection_pad2d_backward(g, x, padding)

    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 4, 7, 5).to(memory_format=layout)
        g = torch.randn_like(F.pad(x, padding, mode="reflect"))
        trace = make_fx(fold, decomposition_table=TABLE, tracing_mode=mode)(g, x)
        assert "index" not in trace.code
        assert_near(trace(g, x), fold(g, x), fold(g.double(), x.double()))


def test_strides_of_a_roll_by_a_whole_turn() -> None:
    x = torch.randn(2, 4, 7, 5).to(memory_format=torch.channels_last)
    assert decomposed(lambda x: x.roll((1, -7), (1, 2)), x)(x).stride() == x.roll(-7, 2).stride()


TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "fft": torch.fft.fft,
    "fft2": torch.fft.fft2,
    "fft_of_real": lambda x: torch.fft.fft(x.real),
    "fft2_of_real": lambda x: torch.fft.fft2(x.real, dim=(1, 0)),
    "fft_of_dense_real": lambda x: torch.fft.fft(torch.clone(x.real)),
    "fftn": lambda x: torch.fft.ifftn(x, dim=(0, 1)),
    "rfft": lambda x: torch.fft.rfft(x.real, dim=0),
    "rfftn": lambda x: torch.fft.rfftn(x.real, dim=(1, 0)),
    "irfft": lambda x: torch.fft.irfft(x, n=5, dim=1),
    "irfftn": lambda x: torch.fft.irfftn(x, dim=(2, 0)),
    "hfft": torch.fft.hfft,
}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_strides_of_transforms(name: str, order: tuple[int, ...]) -> None:
    """Those that tracing predicts are those that the graph, and eager, give."""
    fn = TRANSFORMS[name]
    x = torch.randn(4, 7, 6, dtype=torch.complex64).permute(order)
    graph = decomposed(fn, x)
    (output,) = graph.graph.find_nodes(op="output")[0].all_input_nodes
    assert output.meta["val"].stride() == graph(x).stride() == fn(x).stride()
    torch.testing.assert_close(graph(x), fn(x))
