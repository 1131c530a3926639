"""Idioms of training code, as people write them: losses, layers, samplers, filters, updates.

Each is a function of tensors. The variant "sizes" calls one compiled function with several sizes of
the first dimension, which PyTorch compiles for one size first and for all of them then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sweep.subject import (
    Call,
    Compile,
    NotMade,
    Subject,
    accepted,
    forward,
    noise,
    training_step,
)

Function = Callable[..., Any]
IDIOMS: dict[str, tuple[Function, tuple[Any, ...]]] = {}
SIZES = (6, 3, 5, 1, 4)  # of the first dimension; inputs are made with the first of them
ROWS = SIZES[0]


def idiom(*inputs: Any) -> Callable[[Function], Function]:
    """Register a function with its inputs: shapes stand for noise, tensors and numbers for selves.

    An input whose first dimension is `ROWS` is cut in the variant "sizes".
    """

    def register(function: Function) -> Function:
        made = tuple(
            noise(*x).add_(0.01 * k) if isinstance(x, tuple) else x for k, x in enumerate(inputs)
        )
        IDIOMS[function.__name__] = (function, made)
        return function

    return register


def words(*shape: int, below: int = 11) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(2))


def flags(*shape: int) -> Tensor:
    return words(*shape, below=3) > 0


class Idiom(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.function = IDIOMS[name][0]

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def names() -> list[str]:
    return list(IDIOMS)


def make(name: str, variant: str) -> Subject:
    inputs = IDIOMS[name][1]
    if variant == "sizes":
        if not any(is_cut(x) for x in inputs):
            raise NotMade("no input has rows")
        return accepted(Subject(Idiom(name), (inputs, {}), run=each_size, counts_graphs=False))
    if variant == "train":
        inputs = tuple(with_gradient(x) for x in inputs)
        return accepted(Subject(Idiom(name), (inputs, {}), run=training_step))
    return accepted(Subject(Idiom(name), (inputs, {}), run=forward))


def with_gradient(x: Any) -> Any:
    is_float = isinstance(x, Tensor) and x.is_floating_point()
    return x.clone().requires_grad_() if is_float else x


def is_cut(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and len(x) == ROWS


def each_size(model: nn.Module, call: Call, compile_it: Compile) -> list[Tensor]:
    """Training steps of one compiled function, with other numbers of rows."""
    compiled, results = compile_it(model), []
    for rows in SIZES:
        args = tuple(with_gradient(x[:rows] if is_cut(x) else x) for x in call[0])
        results += training_step(model, (args, {}), lambda _: compiled)
    return results


# -- losses ----------------------------------------------------------------------------------


@idiom((ROWS, 11), words(ROWS))
def focal_loss(logits: Tensor, target: Tensor) -> Tensor:
    log_p = F.log_softmax(logits, dim=-1).gather(1, target[:, None]).squeeze(1)
    return (-0.25 * (1 - log_p.exp()) ** 2.0 * log_p).mean()


@idiom((ROWS, 1, 8, 8), flags(ROWS, 1, 8, 8))
def dice_loss(logits: Tensor, target: Tensor) -> Tensor:
    p, t = logits.sigmoid().flatten(1), target.float().flatten(1)
    return 1 - ((2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)).mean()


@idiom((ROWS, 16), (ROWS, 16))
def info_nce(a: Tensor, b: Tensor) -> Tensor:
    a, b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
    logits = a @ b.t() / 0.07
    target = torch.arange(len(a))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


@idiom((ROWS, 16), words(ROWS, below=3))
def supervised_contrastive(x: Tensor, label: Tensor) -> Tensor:
    x = F.normalize(x, dim=-1)
    same = label[:, None].eq(label[None, :]).float()
    eye = torch.eye(len(x))
    logits = x @ x.t() / 0.1
    logits = logits - logits.max(dim=1, keepdim=True).values.detach()
    log_p = logits - (logits.exp() * (1 - eye)).sum(1, keepdim=True).log()
    positives = same * (1 - eye)
    return -(positives * log_p).sum(1) / positives.sum(1).clamp_min(1)


@idiom((ROWS, 8), (ROWS, 8), (ROWS, 8))
def triplet(a: Tensor, p: Tensor, n: Tensor) -> Tensor:
    return F.relu((a - p).pow(2).sum(1).sqrt() - (a - n).norm(dim=1) + 1.0)


@idiom((ROWS, 11), (ROWS, 11))
def distillation(student: Tensor, teacher: Tensor) -> Tensor:
    soft = F.softmax(teacher.detach() / 2, dim=-1)
    return F.kl_div(F.log_softmax(student / 2, dim=-1), soft, reduction="batchmean") * 4


@idiom((ROWS, 7, 11), words(ROWS, 7))
def smoothed_with_ignored(logits: Tensor, target: Tensor) -> Tensor:
    target = target.masked_fill(target == 0, -100)
    return F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=-100, label_smoothing=0.1
    )


@idiom((ROWS, 11), words(ROWS), words(ROWS), 0.3)
def mixup_loss(logits: Tensor, one: Tensor, two: Tensor, weight: float) -> Tensor:
    return weight * F.cross_entropy(logits, one) + (1 - weight) * F.cross_entropy(logits, two)


@idiom((ROWS, 3, 16, 16), (ROWS, 3, 16, 16))
def ssim(x: Tensor, y: Tensor) -> Tensor:
    def blur(t: Tensor) -> Tensor:
        return F.avg_pool2d(t, 5, 1)

    mx, my = blur(x), blur(y)
    vx, vy, both = blur(x * x) - mx * mx, blur(y * y) - my * my, blur(x * y) - mx * my
    return ((2 * mx * my + 0.01) * (2 * both + 0.03)) / ((mx**2 + my**2 + 0.01) * (vx + vy + 0.03))


@idiom((ROWS, 3, 9, 9))
def total_variation(x: Tensor) -> Tensor:
    return (x[..., 1:, :] - x[..., :-1, :]).abs().mean() + (x.diff(dim=-1) ** 2).mean().sqrt()


@idiom((ROWS, 5), (ROWS, 5))
def gaussian_kl(mean: Tensor, log_variance: Tensor) -> Tensor:
    return -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp(), dim=1)


@idiom((ROWS, 4), (ROWS, 4))
def box_iou_loss(a: Tensor, b: Tensor) -> Tensor:
    def corners(t: Tensor) -> Tensor:
        center, size = t.chunk(2, dim=-1)
        return torch.cat((center - size.abs(), center + size.abs()), dim=-1)

    a, b = corners(a), corners(b)
    low, high = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    area = lambda t: (t[:, 2:] - t[:, :2]).prod(-1)  # noqa: E731
    return 1 - shared / (area(a) + area(b) - shared + 1e-6)


@idiom((ROWS, 10), (ROWS, 10))
def quantile_and_huber(x: Tensor, y: Tensor) -> Tensor:
    e = y - x
    pinball = torch.max(0.9 * e, -0.1 * e).mean()
    return pinball + F.huber_loss(x, y, delta=0.7) + F.smooth_l1_loss(x, y, beta=0.3)


@idiom((ROWS, 12, 5), words(ROWS, 12, below=5))
def crf_forward_score(emissions: Tensor, tags: Tensor) -> Tensor:
    transitions = torch.linspace(-1, 1, 25).reshape(5, 5)
    score = emissions[:, 0]
    for t in range(1, emissions.shape[1]):
        score = torch.logsumexp(score[:, :, None] + transitions, dim=1) + emissions[:, t]
    gold = emissions.gather(2, tags[..., None]).sum((1, 2))
    gold = gold + transitions[tags[:, :-1], tags[:, 1:]].sum(1)
    return torch.logsumexp(score, 1) - gold


@idiom((ROWS, 6), (ROWS,), flags(ROWS))
def policy_gradient(logits: Tensor, reward: Tensor, done: Tensor) -> Tensor:
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    returns, running = [], torch.zeros(())
    for r, d in zip(reward.unbind(), done.unbind(), strict=True):
        running = r + 0.99 * running * (1 - d.float())
        returns.append(running)
    advantage = torch.stack(returns)
    advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-5)
    return -(log_p[:, 0] * advantage.detach()) - 0.01 * entropy


@idiom((ROWS, 6), (ROWS, 6), (ROWS,))
def clipped_policy(new: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    ratio = (new - old.detach()).exp().mean(1)
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


# -- layers ----------------------------------------------------------------------------------


@idiom((ROWS, 7, 16), (16,))
def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6) * w


@idiom((ROWS, 2, 9, 8))
def rotary(x: Tensor) -> Tensor:
    angle = torch.arange(9)[:, None] / 10000 ** (torch.arange(0, 8, 2) / 8)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


@idiom((ROWS, 2, 9, 8))
def rotary_complex(x: Tensor) -> Tensor:
    angle = torch.arange(9)[:, None] / 10000 ** (torch.arange(0, 8, 2) / 8)
    turn = torch.polar(torch.ones_like(angle), angle)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], 4, 2))
    return torch.view_as_real(pairs * turn).flatten(-2)


@idiom((ROWS, 9, 24), (8, 24))
def causal_attention(x: Tensor, w: Tensor) -> Tensor:
    b, n, _ = x.shape
    q, k, v = (t.view(b, n, 2, 4).transpose(1, 2) for t in (x @ w.t()).repeat(1, 1, 3).chunk(3, -1))
    s = q @ k.transpose(-2, -1) / math.sqrt(4)
    s = s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
    return (s.softmax(-1) @ v).transpose(1, 2).reshape(b, n, 8)


@idiom((ROWS, 2, 9, 4), (ROWS, 2, 9, 4), (ROWS, 2, 9, 4), flags(ROWS, 9))
def padded_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    bias = torch.zeros_like(keep, dtype=q.dtype).masked_fill(~keep, torch.finfo(q.dtype).min)
    s = torch.einsum("bhid,bhjd->bhij", q, k) + bias[:, None, None, :]
    p = s.softmax(-1).masked_fill(~keep[:, None, :, None], 0.0)
    return torch.einsum("bhij,bhjd->bihd", p, v).flatten(2)


@idiom((ROWS, 2, 9, 4), (ROWS, 2, 9, 4), (17, 4))
def relative_shift(q: Tensor, k: Tensor, r: Tensor) -> Tensor:
    b, h, n, _ = q.shape
    s = F.pad(q @ r.t(), (1, 0)).view(b, h, 18, n)[:, :, 1:].reshape(b, h, n, 17)[..., :n]
    return (q @ k.transpose(-1, -2) + s).softmax(-1)


@idiom((ROWS, 2, 9, 4))
def alibi(q: Tensor) -> Tensor:
    slope = 2.0 ** -torch.arange(1, 3)
    distance = torch.arange(9)[None, :] - torch.arange(9)[:, None]
    s = q @ q.transpose(-1, -2) + slope[:, None, None] * distance
    return torch.where(distance > 0, float("-inf"), s).softmax(-1) @ q


@idiom((ROWS, 8, 8, 6))
def shifted_windows(x: Tensor) -> Tensor:
    x = torch.roll(x, (-2, -2), (1, 2))
    b, h, w, c = x.shape
    windows = x.view(b, 2, 4, 2, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
    y = (windows @ windows.transpose(1, 2)).softmax(-1) @ windows
    y = y.view(b, 2, 2, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
    return torch.roll(y, (2, 2), (1, 2))


@idiom((ROWS, 6, 5), (5, 4), (4, 4), (4,))
def recurrent_loop(x: Tensor, w: Tensor, u: Tensor, b: Tensor) -> Tensor:
    h, seen = x.new_zeros(len(x), 4), []
    for step in x.unbind(1):
        gate = torch.sigmoid(step @ w + h @ u + b)
        h = gate * h + (1 - gate) * torch.tanh(step @ w)
        seen.append(h)
    return torch.stack(seen, dim=1)


@idiom((ROWS, 6, 4), (4,), (ROWS, 6, 4))
def selective_scan(x: Tensor, a: Tensor, d: Tensor) -> Tensor:
    step = F.softplus(d)
    state, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = torch.exp(-step[:, t] * a.exp()) * state + step[:, t] * x[:, t]
        out.append(state * F.silu(x[:, t]))
    return torch.stack(out, 1)


@idiom((ROWS, 12, 8), (8, 4), (4, 8, 8))
def experts_by_mask(x: Tensor, router: Tensor, experts: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    weight, chosen = (flat @ router).softmax(-1).topk(2, dim=-1)
    weight = weight / weight.sum(-1, keepdim=True)
    out = torch.zeros_like(flat)
    for e in range(4):
        share = (weight * (chosen == e)).sum(-1, keepdim=True)
        out = out + share * F.gelu(flat @ experts[e])
    return out.view_as(x)


@idiom((ROWS, 12, 8), (8, 4))
def load_balance(x: Tensor, router: Tensor) -> Tensor:
    p = (x @ router).softmax(-1)
    counts = F.one_hot(p.argmax(-1), 4).float().mean((0, 1))
    return 4 * (counts * p.mean((0, 1))).sum() + p.logsumexp(-1).pow(2).mean()


@idiom((ROWS, 8, 6, 6))
def squeeze_and_excite(x: Tensor) -> Tensor:
    s = x.mean((2, 3), keepdim=True)
    return x * F.hardsigmoid(s * 1.5) + F.adaptive_max_pool2d(x, 1)


@idiom((ROWS, 8, 6, 6))
def channel_shuffle_and_blur(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    x = x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)
    kernel = torch.tensor([1.0, 2.0, 1.0])
    kernel = (kernel[:, None] * kernel / 16).expand(c, 1, 3, 3)
    return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), kernel, stride=2, groups=c)


@idiom((ROWS, 4, 8, 8), (8, 4, 3, 3))
def weight_standardised_conv(x: Tensor, w: Tensor) -> Tensor:
    variance, mean = torch.var_mean(w, (1, 2, 3), keepdim=True, correction=0)
    return F.leaky_relu(F.conv2d(x, (w - mean) * (variance + 1e-5).rsqrt(), padding=1), 0.2)


@idiom((ROWS, 4, 8, 8), (ROWS, 4), (6, 4, 3, 3))
def modulated_conv(x: Tensor, style: Tensor, w: Tensor) -> Tensor:
    b = len(x)
    w = w[None] * (style[:, None, :, None, None] + 1)
    w = w * (w.pow(2).sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
    y = F.conv2d(x.reshape(1, -1, 8, 8), w.reshape(-1, 4, 3, 3), padding=1, groups=b)
    return F.interpolate(y.view(b, 6, 8, 8), scale_factor=2, mode="bilinear", align_corners=False)


@idiom((ROWS, 6, 4, 4), (ROWS, 3, 8, 8))
def decoder_with_skip(x: Tensor, skip: Tensor) -> Tensor:
    up = F.interpolate(x, size=skip.shape[-2:], mode="nearest")
    y = torch.cat((up, skip), 1)
    y = F.group_norm(y, 3)
    return F.pixel_unshuffle(F.silu(y), 2)


@idiom((ROWS, 3, 8, 8))
def patches_and_back(x: Tensor) -> Tensor:
    p = F.unfold(x, 4, stride=2)
    p = p / (p.norm(dim=1, keepdim=True) + 1e-3)
    return F.fold(p, (8, 8), 4, stride=2)


@idiom((ROWS, 2, 6, 6), (ROWS, 2, 3))
def spatial_transformer(x: Tensor, theta: Tensor) -> Tensor:
    grid = F.affine_grid(torch.tanh(theta), [len(x), 2, 5, 5], align_corners=False)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


@idiom((ROWS, 10), (4, 10))
def vector_quantiser(x: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    distance = x.pow(2).sum(1, keepdim=True) - 2 * x @ codes.t() + codes.pow(2).sum(1)
    q = codes[distance.argmin(1)]
    loss = F.mse_loss(q, x.detach()) + 0.25 * F.mse_loss(x, q.detach())
    return x + (q - x).detach(), loss


@idiom((ROWS, 12))
def straight_through(x: Tensor) -> Tensor:
    hard = (x > 0).float() * 2 - 1
    soft = x.clamp(-1, 1)
    return soft + (hard - soft).detach()


@idiom((ROWS, 12), 8)
def fake_quantised(x: Tensor, bits: int) -> Tensor:
    top = 2 ** (bits - 1) - 1
    scale = x.abs().amax(-1, keepdim=True) / top
    q = (x / scale).round().clamp(-top - 1, top) * scale
    return x + (q - x).detach()


@idiom((ROWS, 16))
def fourier_mixing(x: Tensor) -> Tensor:
    return torch.fft.fft(torch.fft.fft(x, dim=-1), dim=0).real


@idiom((ROWS, 32), (5,))
def convolution_by_fourier(x: Tensor, w: Tensor) -> Tensor:
    n = x.shape[-1] + len(w)
    return torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(w, n), n)[..., : x.shape[-1]]


@idiom((ROWS, 64))
def log_spectrogram(x: Tensor) -> Tensor:
    s = torch.stft(x, 16, 4, window=torch.hann_window(16), return_complex=True)
    return (s.abs().pow(2) + 1e-6).log()


# -- graphs and sets -------------------------------------------------------------------------


@idiom((9, 4), words(20, below=9), words(20, below=9))
def graph_mean(x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    out = torch.zeros_like(x).index_add(0, target, x[source])
    degree = torch.zeros(len(x)).scatter_add(0, target, torch.ones(len(target)))
    return out / degree.clamp(min=1)[:, None]


@idiom((9, 4), words(20, below=9), words(20, below=9))
def graph_attention(x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    s = F.leaky_relu((x[source] * x[target]).sum(-1), 0.2)
    top = torch.full((len(x),), -1e9).scatter_reduce(0, target, s, "amax")
    e = (s - top[target]).exp()
    total = torch.zeros(len(x)).index_add(0, target, e)
    return torch.zeros_like(x).index_add(0, target, x[source] * (e / total[target])[:, None])


@idiom((ROWS, 10, 3))
def nearest_neighbours(points: Tensor) -> Tensor:
    d = torch.cdist(points, points)
    near = d.topk(4, dim=-1, largest=False).indices
    b = torch.arange(len(points))[:, None, None]
    return (points[b, near] - points[:, :, None]).amax(2)


@idiom((ROWS, 7, 5), words(ROWS, below=7))
def mean_of_valid(x: Tensor, length: Tensor) -> Tensor:
    valid = torch.arange(7)[None, :] <= length[:, None]
    return (x * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)


@idiom((30, 4), words(ROWS, 5, below=30))
def pooled_embeddings(table: Tensor, index: Tensor) -> Tensor:
    return F.embedding_bag(index, table, mode="mean") + F.embedding(index, table).amax(1)


@idiom((ROWS, 4), (ROWS, 4))
def sorted_transport(x: Tensor, y: Tensor) -> Tensor:
    return (x.sort(dim=0).values - y.sort(dim=0, descending=True).values).abs().mean()


@idiom((ROWS, 5), (5, 5))
def sinkhorn(x: Tensor, cost: Tensor) -> Tensor:
    k = torch.exp(-cost.abs())
    u = torch.ones(len(x), 5)
    a, b = x.softmax(-1), torch.full((5,), 0.2)
    for _ in range(4):
        v = b / (u @ k)
        u = a / (v @ k.t())
    return (u[:, :, None] * k * v[:, None, :]).sum((1, 2))


# -- sampling and search ---------------------------------------------------------------------


@idiom((ROWS, 11))
def nucleus(logits: Tensor) -> Tensor:
    ordered, index = logits.sort(descending=True, dim=-1)
    total = ordered.softmax(-1).cumsum(-1)
    drop = total > 0.8
    drop[..., 1:] = drop[..., :-1].clone()
    drop[..., 0] = False
    drop = drop.scatter(1, index, drop)
    return logits.masked_fill(drop, float("-inf")).softmax(-1)


@idiom((ROWS, 11), words(ROWS, 4))
def repetition_penalty(logits: Tensor, seen: Tensor) -> Tensor:
    score = logits.gather(1, seen)
    score = torch.where(score < 0, score * 1.3, score / 1.3)
    return logits.scatter(1, seen, score).log_softmax(-1)


@idiom((ROWS, 3), (ROWS, 3, 11))
def beam_step(score: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    total = score[..., None] + logits.log_softmax(-1)
    best, index = total.flatten(1).topk(3, dim=-1)
    return best, (index // 11).float() + (index % 11) / 16


@idiom((ROWS, 12))
def bucketed(x: Tensor) -> Tensor:
    edge = torch.linspace(-2, 2, 9)
    return F.one_hot(torch.bucketize(x, edge), 10).float().cumsum(-1) * x[..., None]


# -- filters and solvers ---------------------------------------------------------------------


@idiom((ROWS, 3), (3, 3))
def euler_steps(x: Tensor, a: Tensor) -> Tensor:
    for k in range(5):
        x = x + 0.1 * torch.tanh(x @ a - math.sin(k))
    return x


@idiom((ROWS, 5), (3, 5))
def kalman(z: Tensor, h: Tensor) -> Tensor:
    p, x = torch.eye(3), z.new_zeros(len(z), 3)
    for _ in range(3):
        s = h.t() @ p @ h + torch.eye(5)
        k = torch.linalg.solve(s, h.t() @ p).t()
        x = x + (z - x @ h) @ k.t()
        p = (torch.eye(3) - k @ h.t()) @ p
    return x


@idiom((ROWS, 4, 4), (ROWS, 4))
def gaussian_log_density(a: Tensor, x: Tensor) -> Tensor:
    c = torch.linalg.cholesky(a @ a.transpose(1, 2) + 4 * torch.eye(4))
    y = torch.linalg.solve_triangular(c, x[..., None], upper=False).squeeze(-1)
    return -0.5 * y.pow(2).sum(1) - c.diagonal(dim1=1, dim2=2).log().sum(1)


@idiom((ROWS, 4))
def quaternion_rotation(q: Tensor) -> Tensor:
    w, x, y, z = F.normalize(q, dim=-1).unbind(-1)
    rows = (
        1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w),
        2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w),
        2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y),
    )  # fmt: skip
    return torch.stack(rows, -1).view(-1, 3, 3)


@idiom((ROWS, 8, 4))
def volume_rendering(x: Tensor) -> Tensor:
    rgb, density = x[..., :3].sigmoid(), F.softplus(x[..., 3])
    alpha = 1 - torch.exp(-density * 0.3)
    through = torch.cumprod(torch.cat((torch.ones(len(x), 1), 1 - alpha + 1e-10), -1), -1)[:, :-1]
    return ((alpha * through)[..., None] * rgb).sum(1)


@idiom((ROWS, 3))
def positional_encoding(x: Tensor) -> Tensor:
    bands = 2.0 ** torch.arange(4) * math.pi
    angle = (x[..., None] * bands).flatten(-2)
    return torch.cat((x, angle.sin(), angle.cos()), -1)


@idiom((ROWS, 3, 8, 8), 7.0)
def diffusion_step(x: Tensor, t: float) -> Tensor:
    beta = torch.linspace(1e-4, 0.02, 10)
    alpha = (1 - beta).cumprod(0)
    a, prior = alpha[int(t)], alpha[int(t) - 1]
    clean = ((x - (1 - a).sqrt() * x.tanh()) / a.sqrt()).clamp(-1, 1)
    return prior.sqrt() * clean + (1 - prior).sqrt() * x.tanh()


# -- updates in place ------------------------------------------------------------------------


@idiom((ROWS, 4), (ROWS, 4))
def moving_average(x: Tensor, y: Tensor) -> Tensor:
    state = x.detach().clone()
    for decay in (0.9, 0.5, 0.99):
        state.mul_(decay).add_(y.detach(), alpha=1 - decay)
        state.lerp_(y.detach(), 1 - decay)
    return state + x * 0


@idiom((ROWS, 8, 4), (ROWS, 2, 4))
def cache_update(cache: Tensor, new: Tensor) -> Tensor:
    cache = cache.clone()
    cache[:, 3:5] = new
    cache.index_copy_(1, torch.tensor([7, 0]), new * 2)
    return cache @ new.transpose(1, 2)


@idiom((ROWS, 6, 6))
def masked_writes(x: Tensor) -> Tensor:
    y = x.clone()
    y[y > 1] = 1.0
    y[:, ::2, 1:] *= -1
    y[:, [0, 2], [1, 3]] += x[:, 4, :2]
    y.diagonal(dim1=1, dim2=2).add_(1)
    return y.flip(1) + torch.tril(y, -1).rot90(1, (1, 2))


@idiom((ROWS, 12), words(ROWS, 5, below=12))
def counted_twice(x: Tensor, index: Tensor) -> Tensor:
    y = x.clone()
    y.scatter_add_(1, index, x[:, :5])
    y.scatter_(1, index[:, :1], 3.0)
    y.scatter_reduce_(1, index, x[:, :5], "prod")
    return y.put(torch.tensor([0, 3]), torch.tensor([1.0, 2.0]), accumulate=True)


@idiom((ROWS, 12))
def cutout(x: Tensor) -> Tensor:
    keep = torch.ones_like(x, dtype=torch.bool)
    keep[:, 3:6] = False
    return torch.where(keep, x, x.mean(1, keepdim=True)).unflatten(1, (3, 4)).transpose(1, 2)


@idiom((5, 4), (4,), (3, 7))
def clipped_gradients(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
    norm = torch.linalg.vector_norm(torch.stack([t.norm() for t in (a, b, c)]))
    return [t * (1.0 / (norm + 1e-6)).clamp(max=1.0) for t in (a, b, c)]


@idiom((6, 6))
def newton_schulz(g: Tensor) -> Tensor:
    x = g / (g.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.t()
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


@idiom((8, 5), (5,))
def spectral_norm(w: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        for _ in range(2):
            u = F.normalize(w @ v, dim=0)
            v = F.normalize(w.t() @ u, dim=0)
    return w / torch.dot(u, w @ v)
