"""Functions of scores and masks that people write for FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BATCH, HEADS, LENGTH = 2, 2, 48
BLOCK = 32  # of the masks
_MAKE = torch.Generator().manual_seed(7)
SLOPES = torch.randn(HEADS, generator=_MAKE)
TABLE = torch.randn(2 * LENGTH, generator=_MAKE)
OF_KEYS = torch.randn(BATCH, LENGTH, generator=_MAKE)
OF_QUERIES = torch.randn(HEADS, LENGTH, generator=_MAKE)
DOCUMENTS = torch.arange(LENGTH) // 13
LENGTHS = torch.tensor([LENGTH, 21])
TEMPERATURE = torch.tensor(0.7)
ALLOWED = torch.rand(LENGTH, LENGTH, generator=_MAKE) > 0.4

Function = Callable[..., Any]


@dataclass(frozen=True)
class Functions:
    """A score function and a mask function; None stands for none."""

    name: str
    score: Function | None = None
    mask: Function | None = None
    varies_by_batch: bool = False

    def __str__(self) -> str:
        return self.name


def _soft_cap(s: Tensor, *_: Tensor) -> Tensor:
    return torch.tanh(s / 2) * 2


def _causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


ALL = (
    Functions("plain"),
    Functions("halved", lambda s, b, h, q, k: s * 0.5),
    Functions("soft_cap", _soft_cap),
    Functions("alibi", lambda s, b, h, q, k: s + (k - q) * SLOPES[h]),
    Functions("relative_table", lambda s, b, h, q, k: s + TABLE[q - k + LENGTH]),
    Functions("by_distance", lambda s, b, h, q, k: s - (q - k).abs() * 0.1),
    Functions("causal_by_score", lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf"))),
    Functions("by_head", lambda s, b, h, q, k: s * (h + 1)),
    Functions("clamped", lambda s, b, h, q, k: s.clamp(-0.5, 0.5)),
    Functions("waves", lambda s, b, h, q, k: s + torch.sin(q * 0.3) * torch.cos(k * 0.2)),
    Functions("temperature", lambda s, b, h, q, k: s / TEMPERATURE),
    Functions("log_distance", lambda s, b, h, q, k: s - torch.log1p((q - k).abs().float())),
    Functions("of_queries", lambda s, b, h, q, k: s * OF_QUERIES[h, q]),
    Functions("gated", lambda s, b, h, q, k: s * torch.sigmoid(s)),
    Functions("squared", lambda s, b, h, q, k: s * s.abs()),
    Functions("parity", lambda s, b, h, q, k: torch.where((q + k) % 2 == 0, s, s - 1)),
    Functions("same_document_by_score", lambda s, b, h, q, k: torch.where(
        DOCUMENTS[q] == DOCUMENTS[k], s, s - 4.0)),
    Functions("constant", lambda s, b, h, q, k: s * 0 + 1.0),
    Functions("causal", None, _causal),
    Functions("window", None, lambda b, h, q, k: (q >= k) & (q - k < 9)),
    Functions("prefix", None, lambda b, h, q, k: (k < 17) | (q >= k)),
    Functions("documents", None, lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k]),
    Functions("dilated", None, lambda b, h, q, k: (q - k) % 3 == 0),
    Functions("table", None, lambda b, h, q, k: ALLOWED[q, k]),
    Functions("by_head_mask", None, lambda b, h, q, k: (h == 0) | (q >= k)),
    Functions("queries_without_keys", None, lambda b, h, q, k: (q >= k) & (q < 20)),
    Functions("soft_cap_causal", _soft_cap, _causal),
    Functions("alibi_window", lambda s, b, h, q, k: s + (k - q) * SLOPES[h],
              lambda b, h, q, k: (q >= k) & (q - k < 20)),
    Functions("causal_documents", None,
              lambda b, h, q, k: (q >= k) & (DOCUMENTS[q] == DOCUMENTS[k])),
    Functions("by_batch", lambda s, b, h, q, k: s + b * 0.5, varies_by_batch=True),
    Functions("of_keys", lambda s, b, h, q, k: s + OF_KEYS[b, k], varies_by_batch=True),
    Functions("lengths", None, lambda b, h, q, k: k < LENGTHS[b], varies_by_batch=True),
)  # fmt: skip

NAMED = {each.name: each for each in ALL}
