"""Functions that statements of random programs call: loops and optimiser steps written by hand.

Their source is printed with every program that calls them, so they use `torch` and `F` alone.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rnn(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], w.shape[1])
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] @ w + h @ u)
    return h


def gru(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], w.shape[1] // 3)
    states = []
    for t in range(x.shape[1]):
        r, z, n = (x[:, t] @ w).chunk(3, -1)
        rh, zh, nh = (h @ u).chunk(3, -1)
        z = torch.sigmoid(z + zh)
        h = (1 - z) * torch.tanh(n + torch.sigmoid(r + rh) * nh) + z * h
        states.append(h)
    return torch.stack(states, 1)


def recurrence(x: Tensor, decay: float) -> Tensor:
    h = x[:, 0]
    for t in range(1, x.shape[1]):
        h = h * decay + x[:, t]
    return h


def attention(x: Tensor, w: Tensor, heads: int) -> Tensor:
    q, k, v = (x @ w).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
    weights = scores.masked_fill(ones.triu(1), float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def squeeze_excite(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    pooled = F.adaptive_avg_pool2d(x, 1).flatten(1)
    return x * torch.sigmoid(F.silu(pooled @ w) @ u)[:, :, None, None]


def offset_view(x: Tensor) -> Tensor:
    """The values of `x` in a window of a larger storage."""
    storage = x.new_zeros(x.numel() + 5)
    storage[3:-2] = x.detach().flatten()
    return storage[3:-2].view(x.shape)


def sgd_step(p: Tensor, g: Tensor, m: Tensor, lr: float) -> None:
    m.mul_(0.9).add_(g)
    p.add_(m, alpha=-lr)


def adam_step(p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: float, step: int) -> None:
    p.mul_(1 - lr * 0.01)
    m.lerp_(g, 0.1)
    v.mul_(0.99).addcmul_(g, g, value=0.01)
    p.addcdiv_(m, (v / (1 - 0.99**step)).sqrt() + 1e-3, value=-lr / (1 - 0.9**step))


def lion_step(p: Tensor, g: Tensor, m: Tensor, lr: float) -> None:
    p.mul_(1 - 0.1 * lr).add_(torch.tanh(30 * (m * 0.9 + g * 0.1)), alpha=-lr)
    m.lerp_(g, 0.01)


def rmsprop_step(p: Tensor, g: Tensor, v: Tensor, lr: float) -> None:
    v.mul_(0.9).addcmul_(g, g, value=0.1)
    p.addcdiv_(g, v.sqrt().add_(1e-2), value=-lr)


HELPERS: tuple[Callable[..., Any], ...] = (
    rnn,
    gru,
    recurrence,
    attention,
    squeeze_excite,
    offset_view,
    sgd_step,
    adam_step,
    lion_step,
    rmsprop_step,
)
SOURCES = {
    helper.__name__: re.sub(
        r"(: Tensor|: float|: int| -> \w+)(?=[,):])", "", inspect.getsource(helper)
    )
    for helper in HELPERS
}


def sources_in(text: str) -> list[str]:
    """The source of every helper that the text calls."""
    return [s for name, s in SOURCES.items() if re.search(rf"\b{name}\(", text)]
