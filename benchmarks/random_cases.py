"""Classes of kernels at sizes and dtypes that are drawn at random.

A class is a function from a `Draw` to a function and its arguments; arguments that require
gradients make it a training step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Kernel = tuple[Callable[..., Any], list[Any]]
FLOATS = (torch.float32, torch.float32, torch.bfloat16, torch.float64)
HALVES = (torch.float32, torch.float32, torch.bfloat16)
KINDS: dict[str, Callable[[Draw], Kernel]] = {}
# The call of a compiled function costs as much as tens of thousands of elements: see `tiny`.
LEAST_ELEMENTS, MOST_ELEMENTS = 1 << 14, 1 << 20


class Draw:
    """Random sizes, dtypes and tensors from one seed."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        self.dtype = torch.float32

    def size(self, least: int, most: int) -> int:
        """Spread evenly over magnitudes; every other one is a multiple of eight."""
        size = round(math.exp(self.random.uniform(math.log(least), math.log(most))))
        is_round = self.random.random() < 0.5 and size >= 16
        return size // 8 * 8 if is_round else size

    def shape(
        self, *ranges: tuple[int, int], least: int = LEAST_ELEMENTS, most: int = MOST_ELEMENTS
    ) -> list[int]:
        while True:
            shape = [self.size(*r) for r in ranges]
            if min(least, most // 16) <= math.prod(shape) <= most:
                return shape

    def one(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def floats(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype or self.dtype)

    def ints(self, most: int, shape: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(0, most, tuple(shape), generator=self.generator).to(dtype)

    def bools(self, shape: Sequence[int], share: float = 0.5) -> Tensor:
        return torch.rand(*shape, generator=self.generator) < share

    def trained(self, *tensors: Tensor) -> list[Tensor]:
        """Every other draw is a training step."""
        return [t.requires_grad_() for t in tensors] if self.one(True, False) else list(tensors)


def kind(dtypes: Sequence[torch.dtype] = FLOATS) -> Callable[..., Any]:
    def register(function: Callable[[Draw], Kernel]) -> Callable[[Draw], Kernel]:
        def drawn(draw: Draw) -> Kernel:
            draw.dtype = draw.random.choice(dtypes)
            return function(draw)

        KINDS[function.__name__] = drawn
        return function

    return register


def matrix(d: Draw) -> list[int]:
    return d.shape((2, 5000), (2, 5000))


def cube(d: Draw) -> list[int]:
    return d.shape((2, 100), (2, 1000), (2, 1000))


def image(d: Draw, most: int = MOST_ELEMENTS) -> list[int]:
    return d.shape((1, 16), (3, 256), (4, 64), (4, 64), most=most)


def laid_out(d: Draw, x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if d.one(True, False) else x


# -- reductions --------------------------------------------------------------------------------


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": lambda x, dim: (x * 2).sum(dim),
    "var": lambda x, dim: (x + 1).var(dim),
    "mean_var": lambda x, dim: (x.mean(dim), x.var(dim)),
    "amax": lambda x, dim: x.abs().amax(dim),
    "norm": lambda x, dim: x.norm(dim=dim),
    "logsumexp": lambda x, dim: x.logsumexp(dim),
}


def reduced(d: Draw, x: Tensor, dim: Any) -> Kernel:
    name = d.one(*REDUCTIONS)
    function = REDUCTIONS[name]

    def reduce(x: Tensor) -> Any:
        return function(x, dim)

    reduce.__name__ = name
    return reduce, [x]


@kind()
def reduce_columns(d: Draw) -> Kernel:
    return reduced(d, d.floats(matrix(d)), 0)


@kind()
def reduce_rows(d: Draw) -> Kernel:
    return reduced(d, d.floats(matrix(d)), 1)


@kind()
def reduce_middle(d: Draw) -> Kernel:
    return reduced(d, d.floats(cube(d)), 1)


@kind()
def reduce_several(d: Draw) -> Kernel:
    x = d.floats(d.shape((2, 64), (2, 64), (2, 64), (2, 64)))
    return reduced(d, x, d.one((0, 2), (0, 2, 3), (1, 3), (0, 1), (2, 3), (0, 3), (0, 1, 2)))


@kind()
def reduce_all(d: Draw) -> Kernel:
    return reduced(d, d.floats(matrix(d)), (0, 1))


@kind()
def softmax_dim0(d: Draw) -> Kernel:
    return lambda x: torch.softmax(x, 0), d.trained(d.floats(matrix(d)))


@kind()
def softmax_middle(d: Draw) -> Kernel:
    return lambda x: torch.softmax(x, 1), d.trained(d.floats(cube(d)))


@kind()
def argmax(d: Draw) -> Kernel:
    dim = d.one(0, 1, 2)
    return lambda x: (x.argmax(dim), x.max(dim).values), [d.floats(cube(d))]


@kind((torch.int32, torch.int64, torch.uint8, torch.int8, torch.int16))
def int_reduction(d: Draw) -> Kernel:
    dim = d.one(0, 1)
    function = d.one(
        lambda x: x.sum(dim),
        lambda x: x.amax(dim),
        lambda x: x.argmin(dim),
        lambda x: (x > 3).sum(dim),
    )
    return function, [d.ints(100, matrix(d), d.dtype)]


@kind((torch.bool,))
def any_all(d: Draw) -> Kernel:
    dim = d.one(0, 1)
    return lambda x: (x.any(dim), x.all(dim)), [d.bools(matrix(d))]


# -- scans -------------------------------------------------------------------------------------


SCANS: tuple[Callable[..., Any], ...] = (
    lambda x, dim: torch.cumsum(x, dim) * torch.sigmoid(x),
    lambda x, dim: torch.cumsum(x, dim),
    lambda x, dim: torch.cumprod(x * 0.1 + 1, dim) + 1,
    lambda x, dim: torch.logcumsumexp(x, dim),
    lambda x, dim: torch.cummax(x, dim),
)


@kind()
def scan_rows(d: Draw) -> Kernel:
    scan = d.one(*SCANS)
    return lambda x: scan(x, -1), [d.floats(matrix(d))]


@kind()
def scan_columns(d: Draw) -> Kernel:
    scan = d.one(*SCANS)
    return lambda x: scan(x, -2), [d.floats(d.one(matrix, cube)(d))]


@kind((torch.int64, torch.int32, torch.bool))
def scan_ints(d: Draw) -> Kernel:
    dim = d.one(0, 1)
    return lambda x: x.cumsum(dim) - 1, [d.ints(2, matrix(d), d.dtype)]


# -- rows: softmax and norms -------------------------------------------------------------------


@kind()
def softmax_rows(d: Draw) -> Kernel:
    function = d.one(torch.softmax, torch.log_softmax)
    x = d.floats(d.shape((1, 400), (10, 60000)))
    return lambda x: function(x * 0.5, -1), d.trained(x)


@kind()
def softmax_masked(d: Draw) -> Kernel:
    batch, heads, queries, keys = shape = d.shape((1, 8), (1, 12), (4, 300), (4, 300))
    mask, bias = d.bools((batch, 1, queries, keys), 0.9), d.floats((heads, queries, keys))
    form = d.one("bool", "add", "causal")

    def masked(x: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        if form == "bool":
            x = x.masked_fill(~mask, -1e4)
        elif form == "add":
            x = x + bias
        else:
            causal = torch.ones(queries, keys, dtype=torch.bool).tril()
            x = x.masked_fill(~causal, float("-inf"))
        return torch.softmax(x, -1)

    return masked, [*d.trained(d.floats(shape)), mask, bias]


@kind()
def layer_norm(d: Draw) -> Kernel:
    rows, width = d.shape((1, 4000), (8, 5000))
    x, y = d.floats((rows, width)), d.floats((rows, width))
    w, b = d.floats((width,)), d.floats((width,))
    function = d.one(
        lambda x, y, w, b: F.layer_norm(x, x.shape[-1:], w, b),
        lambda x, y, w, b: F.layer_norm(x + y, x.shape[-1:], w, b),
        lambda x, y, w, b: F.gelu(F.layer_norm(x, x.shape[-1:], w, b)),
    )
    return function, d.trained(x, y, w, b)


def rms(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


@kind(HALVES)
def rms_norm(d: Draw) -> Kernel:
    rows, width = d.shape((1, 4000), (8, 5000))
    x, y, w = d.floats((rows, width)), d.floats((rows, width)), d.floats((width,))
    return d.one(lambda x, y, w: rms(x, w), lambda x, y, w: rms(x + y, w)), d.trained(x, y, w)


@kind(HALVES)
def norm_quantise(d: Draw) -> Kernel:
    rows, width = d.shape((1, 4000), (8, 5000))

    def quantised(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        total = x + y
        normed = rms(total, w)
        scale = normed.abs().amax(-1, keepdim=True).float().clamp(min=1e-9) / 127
        return total, (normed.float() / scale).round().clamp(-128, 127).to(torch.int8), scale

    return quantised, [d.floats((rows, width)), d.floats((rows, width)), d.floats((width,))]


@kind(HALVES)
def group_norm(d: Draw) -> Kernel:
    groups = d.one(1, 2, 4, 8, 32)
    n, c, h, w = d.shape((1, 8), (1, 16), (2, 64), (2, 64), most=MOST_ELEMENTS // groups)
    x = laid_out(d, d.floats((n, c * groups, h, w)))
    activation = d.one(F.silu, F.relu, lambda x: x)
    return (
        lambda x, w, b: activation(F.group_norm(x, groups, w, b)),
        d.trained(x, d.floats((c * groups,)), d.floats((c * groups,))),
    )


@kind((torch.float32,))
def batch_norm(d: Draw) -> Kernel:
    n, c, h, w = image(d)
    x = laid_out(d, d.floats((n, c, h, w)))
    mean, var = d.floats((c,)), d.floats((c,)).abs() + 1
    weight, bias = d.floats((c,)), d.floats((c,))
    trains = d.one(True, False)

    def norm(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.relu(F.batch_norm(x, mean, var, w, b, training=trains))

    return norm, [*d.trained(x, weight, bias), mean, var]


@kind((torch.float32,))
def instance_norm(d: Draw) -> Kernel:
    x = laid_out(d, d.floats(image(d)))
    return lambda x: F.leaky_relu(F.instance_norm(x)), d.trained(x)


# -- images ------------------------------------------------------------------------------------


@kind(HALVES)
def max_pool(d: Draw) -> Kernel:
    x = laid_out(d, d.floats(image(d)))
    k = d.one((2, 2, 0, 1), (3, 2, 1, 1), (3, 1, 1, 1), (2, 2, 0, 1), (3, 1, 1, 2), (5, 1, 2, 1))
    ceil = d.one(True, False)
    x = x if x.shape[-2] >= 5 else x.repeat(1, 1, 3, 3)
    return (
        lambda x: F.max_pool2d(F.relu(x), k[0], k[1], k[2], dilation=k[3], ceil_mode=ceil),
        d.trained(x),
    )


@kind(HALVES)
def avg_pool(d: Draw) -> Kernel:
    x = laid_out(d, d.floats(image(d)))
    k = d.one((2, 2, 0), (3, 2, 1), (3, 1, 1), (4, 4, 0))
    counts = d.one(True, False)
    return (
        lambda x: F.avg_pool2d(x, *k, ceil_mode=True, count_include_pad=counts) * 2,
        d.trained(x),
    )


@kind(HALVES)
def adaptive_pool(d: Draw) -> Kernel:
    x = laid_out(d, d.floats(image(d)))
    size = d.one(1, 2, 3, 7)
    pool = d.one(F.adaptive_avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d)
    return lambda x: pool(F.relu(x), size), d.trained(x)


@kind(HALVES)
def upsample(d: Draw) -> Kernel:
    x = laid_out(d, d.floats(image(d, MOST_ELEMENTS // 4)))
    mode = d.one("nearest", "nearest", "bilinear", "bilinear", "bicubic")
    scale = d.one(2, 2, 1.5)
    more: dict[str, Any] = {} if mode == "nearest" else {"align_corners": d.one(True, False)}
    return lambda x: F.relu(F.interpolate(x, scale_factor=scale, mode=mode, **more)), d.trained(x)


@kind(HALVES)
def pixel_shuffle(d: Draw) -> Kernel:
    factor = d.one(2, 3, 4)
    n, c, h, w = d.shape((1, 8), (1, 16), (4, 64), (4, 64), most=MOST_ELEMENTS // factor**2)
    if d.one(True, False):
        return lambda x: F.pixel_shuffle(x, factor) * 2, [d.floats((n, c * factor**2, h, w))]
    x = d.floats((n, c, h * factor, w * factor))
    return lambda x: F.pixel_unshuffle(x, factor) * 2, [x]


@kind(HALVES)
def pad(d: Draw) -> Kernel:
    x = laid_out(d, d.floats(image(d)))
    sides = [d.random.randrange(4) for _ in range(4)]
    mode = d.one("constant", "reflect", "replicate", "circular")
    return lambda x: F.pad(F.relu(x), sides, mode=mode), d.trained(x)


@kind((torch.float32,))
def unfold(d: Draw) -> Kernel:
    x = d.floats(image(d, MOST_ELEMENTS // 8))
    k = d.one((3, 1, 1, 1), (3, 1, 1, 2), (2, 1, 0, 2), (4, 1, 0, 4))
    if d.one(True, False):
        return lambda x: F.unfold(x, *k) * 2, d.trained(x)
    size = x.shape[2:]
    columns = F.unfold(x, *k)
    return lambda c: F.fold(c * 2, size, *k), d.trained(columns)


# -- indices -----------------------------------------------------------------------------------


@kind(HALVES)
def embedding(d: Draw) -> Kernel:
    words, width = d.shape((10, 20000), (4, 1024), most=MOST_ELEMENTS * 2)
    i = d.ints(words, d.shape((1, 32), (1, 300), least=1, most=MOST_ELEMENTS // width))
    (w,) = d.trained(d.floats((words, width)))
    return lambda w, i: F.embedding(i, w) * 3, [w, i]


@kind()
def index_select(d: Draw) -> Kernel:
    x = d.floats(cube(d))
    dim = d.one(0, 1, 2)
    i = d.ints(x.shape[dim], (d.size(2, x.shape[dim] + 2),))
    return lambda x, i: x.index_select(dim, i).relu(), [*d.trained(x), i]


@kind()
def gather(d: Draw) -> Kernel:
    shape = matrix(d)
    dim = d.one(0, 1)
    (x,) = d.trained(d.floats(shape))
    return lambda x, i: torch.gather(x, dim, i) * 2, [x, d.ints(shape[dim], shape)]


@kind()
def scatter_add(d: Draw) -> Kernel:
    shape = matrix(d)
    dim = d.one(0, 1)
    args = [d.floats(shape), d.ints(shape[dim], shape)]
    return lambda x, i: torch.zeros_like(x).scatter_add(dim, i, x * 2), args


@kind()
def index_add(d: Draw) -> Kernel:
    rows, width = matrix(d)
    slots = d.size(2, rows + 2)
    args = [d.floats((slots, width)), d.ints(slots, (rows,)), d.floats((rows, width))]
    return d.one(
        lambda x, i, v: x.index_add(0, i, v), lambda x, i, v: x.index_put((i,), v, accumulate=True)
    ), args


@kind()
def where_fill(d: Draw) -> Kernel:
    shape = matrix(d)
    x, y, m = d.floats(shape), d.floats(shape), d.bools(shape)
    return d.one(
        lambda x, y, m: torch.where(m, x, y), lambda x, y, m: (x + y).masked_fill(m, 0.0)
    ), [*d.trained(x, y), m]


@kind((torch.float32,))
def sort_topk(d: Draw) -> Kernel:
    shape = d.shape((1, 500), (4, 2000), most=MOST_ELEMENTS // 4)
    k = min(shape[1], d.one(1, 2, 8, 50))
    function = d.one(
        lambda x: torch.topk(x * 2, k), lambda x: torch.sort(x * 2), lambda x: torch.argsort(x)
    )
    return function, [d.floats(shape)]


@kind()
def one_hot(d: Draw) -> Kernel:
    classes = d.size(2, 1000)
    i = d.ints(classes, (d.size(2, 1000),))
    dtype = d.dtype
    return lambda i: F.one_hot(i, classes).to(dtype), [i]


@kind()
def bincount(d: Draw) -> Kernel:
    classes, count = d.size(2, 1000), d.size(10, 100000)
    args = [d.ints(classes, (count,)), d.floats((count,))]
    return lambda i, w: torch.zeros(classes, dtype=w.dtype).index_add(0, i, w), args


# -- copies ------------------------------------------------------------------------------------


@kind((torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.float64))
def permute(d: Draw) -> Kernel:
    count = d.one(2, 3, 3, 4, 4, 5)
    shape = d.shape(*[(2, 1000)] * count)
    order = d.random.sample(range(count), count)
    x = d.ints(100, shape).to(d.dtype)
    return d.one(lambda x: x.permute(order).contiguous(), lambda x: x.permute(order) + 1), [x]


@kind()
def heads(d: Draw) -> Kernel:
    b, t, h, s = d.shape((1, 16), (4, 512), (1, 16), (8, 128))
    x, y = d.floats((b, t, h * s)), d.floats((b, h, t, s))
    return d.one(
        lambda x, y: x.view(b, t, h, s).transpose(1, 2) + y,
        lambda x, y: x + y.transpose(1, 2).reshape(b, t, h * s),
        lambda x, y: (x.view(b, t, h, s).permute(0, 2, 3, 1) * 0.125).contiguous(),
    ), [x, y]


@kind((torch.float32, torch.bfloat16, torch.uint8))
def concatenate(d: Draw) -> Kernel:
    a, b, c = cube(d)
    dim = d.one(0, 1, 2)
    sizes = [[d.size(1, n + 1) if i == dim else n for i, n in enumerate((a, b, c))] for _ in "123"]
    xs = [d.ints(50, s).to(d.dtype) for s in sizes]
    return lambda *xs: torch.cat([x * 2 for x in xs], dim), xs


@kind()
def stack_split(d: Draw) -> Kernel:
    a, b = matrix(d)
    x, y = d.floats((a, b * 2)), d.floats((a, b * 2))
    return d.one(
        lambda x, y: torch.stack((x * 2, y), d.random.choice((0,))),
        lambda x, y: torch.stack((x * 2, y), -1),
        lambda x, y: torch.stack((x * 2, y), 1),
        lambda x, y: [p.relu() for p in (x + y).chunk(2, -1)],
        lambda x, y: (x + y).roll(3, -1),
        lambda x, y: (x + y).roll(1, 0),
        lambda x, y: (x + y).flip(-1),
        lambda x, y: (x + y).flip(0),
        lambda x, y: x[..., ::2] + y[..., 1::2],
    ), [x, y]


# -- attention's neighbours --------------------------------------------------------------------


@kind(HALVES)
def rotary(d: Draw) -> Kernel:
    b, t, h, s = d.shape((1, 8), (4, 512), (1, 16), (8, 64))
    s = s // 4 * 4
    x, cos, sin = d.floats((b, t, h, s)), d.floats((t, 1, s)), d.floats((t, 1, s))

    def half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat((-right, left), -1) * sin

    def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos + turned * sin

    def outside(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return half(x.transpose(1, 2), cos.transpose(0, 1), sin.transpose(0, 1))

    return d.one(half, interleaved, outside), [*d.trained(x), cos, sin]


@kind((torch.float32,))
def rotary_complex(d: Draw) -> Kernel:
    b, t, h, s = d.shape((1, 8), (4, 512), (1, 16), (8, 64))

    def turn(x: Tensor, freqs: Tensor) -> Tensor:
        wide = torch.view_as_complex(x.float().reshape(b, t, h, s, 2))
        return torch.view_as_real(wide * freqs[:, None]).flatten(3)

    freqs = torch.polar(torch.ones(t, s), d.floats((t, s)))
    return turn, [d.floats((b, t, h, s * 2)), freqs]


@kind(HALVES)
def relative_shift(d: Draw) -> Kernel:
    b, h, t = d.shape((1, 8), (1, 8), (4, 200), most=MOST_ELEMENTS // 200)

    def shift(x: Tensor, y: Tensor) -> Tensor:
        zero = x.new_zeros(b, h, t, 1)
        padded = torch.cat((zero, x), -1).view(b, h, -1, t)
        return padded[:, :, 1:].reshape(x.shape)[..., :t] + y

    return shift, [*d.trained(d.floats((b, h, t, 2 * t - 1)), d.floats((b, h, t, t)))]


@kind(HALVES)
def alibi(d: Draw) -> Kernel:
    b, h, t = d.shape((1, 8), (1, 16), (4, 300), most=MOST_ELEMENTS // 300)

    def score(x: Tensor, slopes: Tensor) -> Tensor:
        steps = torch.arange(t)
        return torch.softmax(x + slopes[:, None, None] * (steps[None] - steps[:, None]), -1)

    return score, [d.floats((b, h, t, t)), d.floats((h,))]


@kind(HALVES)
def gated(d: Draw) -> Kernel:
    rows, width = d.shape((1, 4000), (8, 4000))
    gate = d.one(F.silu, F.gelu, torch.sigmoid, F.relu, lambda x: F.gelu(x, approximate="tanh"))
    if d.one(True, False):
        x = d.floats((rows, width // 2 * 2))
        return lambda x: gate(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], d.trained(x)
    x, y = d.floats((rows, width)), d.floats((rows, width))
    return lambda x, y: gate(x) * y, d.trained(x, y)


@kind(HALVES)
def dropout(d: Draw) -> Kernel:
    return lambda x: F.dropout(x.relu(), 0.1, training=True), d.trained(d.floats(matrix(d)))


# -- losses ------------------------------------------------------------------------------------


@kind((torch.float32, torch.bfloat16))
def cross_entropy(d: Draw) -> Kernel:
    smoothing = d.one(0.0, 0.1)
    if d.one(True, False):
        rows, classes = d.shape((1, 4000), (2, 40000))
        x, target = d.floats((rows, classes)), d.ints(classes, (rows,))
    else:
        n, c, h, w = d.shape((1, 8), (2, 32), (8, 128), (8, 128))
        x, target = d.floats((n, c, h, w)), d.ints(c, (n, h, w))
    return (
        lambda x, t: F.cross_entropy(x.float(), t, label_smoothing=smoothing),
        [*d.trained(x), target],
    )


@kind((torch.float32,))
def loss(d: Draw) -> Kernel:
    shape, reduction = matrix(d), d.one("mean", "sum")
    x, y = d.floats(shape), d.floats(shape)
    function = d.one(
        lambda x, y: F.huber_loss(x, y, reduction=reduction),
        lambda x, y: F.smooth_l1_loss(x, y, reduction=reduction),
        lambda x, y: F.mse_loss(x, y, reduction=reduction),
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction=reduction),
        lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction=reduction),
        lambda x, y: (1 - F.cosine_similarity(x, y)).mean(),
    )
    return function, [*d.trained(x), y]


@kind()
def distance(d: Draw) -> Kernel:
    n, m, k = d.shape((2, 300), (2, 300), (2, 64), most=MOST_ELEMENTS)
    x, y = d.floats((n, k)), d.floats((m, k))
    return d.one(
        lambda x, y: (x[:, None] - y[None]).pow(2).sum(-1).sqrt(),
        lambda x, y: (x[:, None] - y[None]).abs().sum(-1),
        lambda x, y: F.cosine_similarity(x[:, None], y[None], dim=-1),
    ), [x, y]


# -- products ----------------------------------------------------------------------------------


@kind((torch.float32, torch.float64))
def small_matmul(d: Draw) -> Kernel:
    batch, n, k, m = d.shape((10, 20000), (2, 8), (2, 8), (2, 8))
    return d.one(
        lambda x, y: torch.matmul(x, y), lambda x, y: torch.einsum("bnk,bkm->bnm", x, y) + 1
    ), [d.floats((batch, n, k)), d.floats((batch, k, m))]


@kind((torch.float32,))
def einsum(d: Draw) -> Kernel:
    b, h, i, j = d.shape((1, 8), (1, 12), (4, 128), (4, 128))
    k = d.size(4, 64)
    x, y = d.floats((b, i, h, k)), d.floats((b, j, h, k))
    return d.one(
        lambda x, y: torch.einsum("bihk,bjhk->bhij", x, y) * 0.1,
        lambda x, y: torch.einsum("bihk,bjhk->bijh", x, y) * 0.1,
        lambda x, y: torch.einsum("bihk,bjhk->bij", x, y) * 0.1,
    ), [x, y]


@kind()
def outer(d: Draw) -> Kernel:
    b, n, m = cube(d)
    return lambda x, y: x[:, :, None] * y[:, None] + 1, [d.floats((b, n)), d.floats((b, m))]


@kind((torch.float32,))
def complex_multiply(d: Draw) -> Kernel:
    shape = matrix(d)
    x, y = torch.complex(d.floats(shape), d.floats(shape)), torch.complex(*[d.floats(shape)] * 2)
    return lambda x, y: (x * y + x).abs(), [x, y]


@kind((torch.float32,))
def fft(d: Draw) -> Kernel:
    x = d.floats(d.shape((1, 500), (8, 1024), most=MOST_ELEMENTS // 2))
    return lambda x: torch.fft.irfft(torch.fft.rfft(x * 2) * 0.5, n=x.shape[-1]).relu(), [x]


# -- elementwise -------------------------------------------------------------------------------


CHAINS: tuple[Callable[..., Any], ...] = (
    lambda x, y: torch.exp(-x * x) * y,
    lambda x, y: torch.log(x.abs() + 1) + y,
    lambda x, y: torch.tanh(x) * torch.erf(y),
    lambda x, y: F.gelu(x + y),
    lambda x, y: torch.sigmoid(x) * y + x,
    lambda x, y: torch.pow(x.abs() + 0.1, y),
    lambda x, y: torch.sqrt(x * x + y * y),
    lambda x, y: torch.atan2(x, y),
    lambda x, y: torch.fmod(x, y.abs() + 0.5),
    lambda x, y: torch.remainder(x, y.abs() + 0.5),
    lambda x, y: torch.floor_divide(x * 10, y.abs() + 0.5),
    lambda x, y: torch.sin(x) + torch.cos(y),
    lambda x, y: F.softplus(x) * F.mish(y),
    lambda x, y: torch.log1p(x.abs()) + torch.expm1(y),
    lambda x, y: torch.hypot(x, y),
    lambda x, y: torch.asin(x.clamp(-1, 1)) + torch.acos(y.clamp(-1, 1)) + torch.atan(x),
    lambda x, y: torch.sinh(x) + torch.cosh(y) + torch.tan(x),
    lambda x, y: torch.erfinv(x.clamp(-0.9, 0.9)) + torch.lgamma(y.abs() + 1),
    lambda x, y: torch.clamp(x, -1, 1) + torch.round(y) + torch.sign(x),
    lambda x, y: torch.lerp(x, y, 0.3).relu(),
)


@kind((torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.float16))
def chain(d: Draw) -> Kernel:
    shape = [d.size(LEAST_ELEMENTS, MOST_ELEMENTS)]
    return d.one(*CHAINS), [d.floats(shape), d.floats(shape)]


@kind((torch.float32, torch.float64))
def chain_trained(d: Draw) -> Kernel:
    shape = [d.size(LEAST_ELEMENTS, MOST_ELEMENTS)]
    x, y = d.floats(shape), d.floats(shape)
    return d.one(*CHAINS[:7], *CHAINS[11:14]), [x.requires_grad_(), y.requires_grad_()]


@kind()
def broadcast(d: Draw) -> Kernel:
    a, b, c = cube(d)
    shapes = d.one([(a, 1, c), (b, 1)], [(b, c), (a, 1, 1)], [(1, b, 1), (c,)])
    x, y, z = d.floats((a, b, c)), *(d.floats(s) for s in shapes)
    return lambda x, y, z: (x * y + z).relu(), d.trained(x, y, z)


@kind((torch.int64, torch.int32, torch.uint8, torch.int8))
def int_chain(d: Draw) -> Kernel:
    shape = [d.size(LEAST_ELEMENTS, MOST_ELEMENTS)]
    return d.one(
        lambda x, y: (x * 3 + y) // 2,
        lambda x, y: x % (y + 1),
        lambda x, y: (x & 7) | (y << 1),
        lambda x, y: torch.where(x > y, x, y) - 1,
        lambda x, y: (x == y).to(torch.float32) * 2,
    ), [d.ints(100, shape, d.dtype), d.ints(100, shape, d.dtype)]


CASTS = (
    torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int64,
    torch.int32, torch.bool, torch.float64,
)  # fmt: skip


@kind(CASTS)
def cast(d: Draw) -> Kernel:
    shape = [d.size(LEAST_ELEMENTS, MOST_ELEMENTS)]
    x, target = d.ints(100, shape).to(d.dtype), d.one(*CASTS)
    return lambda x: (x.float() * 0.5).to(target), [x]


@kind((torch.int8, torch.uint8))
def dequantise(d: Draw) -> Kernel:
    rows, width = matrix(d)
    x, scale = d.ints(100, (rows, width), d.dtype), d.floats((rows, 1), torch.float32)
    target = d.one(torch.float32, torch.bfloat16)
    return lambda x, s: (x.float() * s).to(target), [x, scale]


@kind()
def tiny(d: Draw) -> Kernel:
    rows, width = d.shape((1, 30), (1, 40), least=1, most=1000)
    x, y = d.floats((rows, width)), d.floats((width,))
    return d.one(
        lambda x, y: x + y,
        lambda x, y: torch.softmax(x * y, -1),
        lambda x, y: (x * y).sum(),
        lambda x, y: F.layer_norm(x, x.shape[-1:]) * y,
        lambda x, y: x.t().contiguous(),
        lambda x, y: (x.mean(0), x.amax(1), x + 1),
    ), [x, y]


@kind((torch.float32,))
def optimiser(d: Draw) -> Kernel:
    shapes = [matrix(d) for _ in range(d.one(1, 3, 8))]
    count = len(shapes)

    def step(*tensors: Tensor) -> list[Tensor]:
        results = []
        for i in range(count):
            p, g, m, v = tensors[i::count]
            m, v = m.lerp(g, 0.1), v * 0.999 + g * g * 0.001
            results += [p * 0.999 - 0.01 * m / (v.sqrt() + 1e-8), m, v]
        return results

    return step, [d.floats(s).abs() for _ in range(4) for s in shapes]


@kind(HALVES)
def row_results(d: Draw) -> Kernel:
    x, y = d.floats(matrix(d)), d.floats([1])

    def several(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        s = x * y
        return s.amax(-1), s.sum(-1), s.mean(0), s.argmax(-1), s.relu()

    return several, [x, y]
