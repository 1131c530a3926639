"""Top-k in a kernel: gates of mixtures of experts, sampling heads, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import perfuse
from tests.behaviour.row import Behaviour, randn
from tests.harness.backend import compiled
from tests.unit.lower.test_top_k import SPECIAL, among_scores, check


def logits(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of which no two elements are close, so that roundings swap none."""
    order = torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))).argsort(-1)
    return ((order - shape[-1] / 2) / 16).to(dtype)


def softmax_gate(x: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = torch.topk(torch.softmax(x, -1), 8, dim=-1)
    return weights / weights.sum(-1, keepdim=True), chosen


def rounded_gate(x: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = softmax_gate(x.float())
    return weights.to(x.dtype), chosen


def sigmoid_gate(x: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = torch.topk(torch.sigmoid(x), 2, dim=-1, sorted=False)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20), chosen


def gate_after(x: Tensor) -> tuple[Tensor, Tensor]:
    best, chosen = torch.topk(x, 4, dim=-1)
    return torch.softmax(best, -1), chosen


def grouped_gate(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """DeepSeek V3's: experts of the best groups, by scores with a bias, without it as weights."""
    scores = torch.sigmoid(x)
    favoured = scores + bias
    grouped = favoured.view(x.shape[0], 4, -1)
    best = torch.topk(grouped.topk(2, dim=-1)[0].sum(-1), 2, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(grouped[..., 0]).scatter_(1, best, 1)
    wide = mask.unsqueeze(-1).expand(grouped.shape).reshape(scores.shape)
    chosen = torch.topk(favoured.masked_fill(~wide.bool(), -math.inf), 4, dim=-1)[1]
    weights = scores.gather(1, chosen)
    return weights / weights.sum(-1, keepdim=True) * 2.5, chosen


def noisy_gate(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Shazeer's: weights are zero except those of the experts chosen with noise."""
    noisy = x + 1e-4 * torch.randn_like(x) * F.softplus(scale)
    best, chosen = noisy.topk(3, dim=-1)
    return torch.full_like(x, -math.inf).scatter(-1, chosen, best).softmax(-1), chosen


def sampled(x: Tensor) -> Tensor:
    best, places = torch.topk(x / 0.7, 5, dim=-1)
    return places.gather(-1, torch.multinomial(torch.softmax(best, -1), 1))


def warped(x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits below the k-th largest are left out, as sampling code does."""
    scores = torch.sigmoid(x) * x
    least = torch.topk(scores, 6).values[..., -1:]
    return scores.masked_fill(scores < least, -math.inf), (scores >= least).sum(-1)


def recalled(x: Tensor, target: Tensor) -> Tensor:
    return (x.topk(5, -1).indices == target[:, None]).any(-1).float().mean()


def nearest(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cdist(x, y).topk(3, dim=0, largest=False)


def leaf(x: Tensor) -> Tensor:
    return x.requires_grad_()


ROWS: list[tuple[str, Callable[..., Any], Callable[[], list[Any]]]] = [
    ("softmax", softmax_gate, lambda: [leaf(logits(9, 64))]),
    ("rounded", rounded_gate, lambda: [leaf(logits(9, 64, dtype=torch.bfloat16))]),
    ("softmax_one_row", softmax_gate, lambda: [logits(1, 60)]),
    ("sigmoid", sigmoid_gate, lambda: [leaf(logits(2, 5, 16))]),
    ("after", gate_after, lambda: [leaf(logits(7, 32))]),
    ("groups", grouped_gate, lambda: [leaf(logits(6, 32)), logits(32) / 64]),
    ("noisy", noisy_gate, lambda: [leaf(logits(6, 16)), leaf(logits(6, 16))]),
    ("sampled", sampled, lambda: [logits(6, 50)]),
    ("warped", warped, lambda: [leaf(logits(6, 50))]),
    ("recalled", recalled, lambda: [logits(6, 50), torch.arange(6)]),
    ("nearest", nearest, lambda: [leaf(randn(8, 3)), leaf(randn(9, 3) + 1)]),
    ("empty", sigmoid_gate, lambda: [leaf(torch.zeros(0, 16))]),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row[0]))
def test_matches_eager(row: tuple[str, Callable[..., Any], Callable[[], list[Any]]]) -> None:
    Behaviour(*row).check()


def all_of(x: Tensor, y: Tensor, own: Tensor) -> list[Any]:
    """Along both dimensions, with few and many elements: those on each side of every vector."""
    x, y = among_scores(x, own), among_scores(y, own.T)
    last = [torch.topk(x, k, -1, large) for k, large in ((1, True), (5, False), (16, True))]
    first = [torch.topk(y, 3, 0, large) for large in (True, False)]
    return [*last, *first]


@pytest.mark.parametrize("isa", ["auto", "avx2", "scalar"])
def test_values_and_positions(isa: str) -> None:
    torch.manual_seed(1)
    with perfuse.config.patch({"cpu.simd": isa}):
        ours = compiled(all_of)
        for share in (0.0, 0.1, 0.9):
            x = torch.randint(0, 200, (5, 37)).float()
            special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), x.shape)]
            x = torch.where(torch.rand(x.shape) < share, special, x)
            y = x.T.contiguous()
            results = iter(ours(x, y, torch.ones(x.shape, dtype=torch.bool)))
            for k, large in ((1, True), (5, False), (16, True)):
                check(x, k, -1, large, list(next(results)))
            for large in (True, False):
                check(y, 3, 0, large, list(next(results)))


def marked(rows: int) -> Tensor:
    x = logits(rows, 24)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def test_rows_of_any_number() -> None:
    assert "op_aten" not in str(perfuse.explain(softmax_gate, marked(3)).stage("host"))
    torch._dynamo.reset()
    ours = compiled(softmax_gate, dynamic=None)
    for rows in (3, 7, 40):
        for have, want in zip(ours(marked(rows)), softmax_gate(logits(rows, 24)), strict=True):
            torch.testing.assert_close(have, want)


def test_a_gate_needs_no_library_call() -> None:
    host = str(perfuse.explain(softmax_gate, logits(64, 64)).stage("host"))
    assert "op_aten" not in host and host.count("segment0(") == 1


def as_scores(x: Tensor, k: int) -> Any:
    return torch.topk(x.exp() if x.is_floating_point() else x, k)


@pytest.mark.parametrize(
    ("k", "shape", "dtype"),
    [(2, (3, 9), torch.float64), (2, (3, 9), torch.int64), (4, (9, 60), torch.bfloat16),
     (20, (3, 40), torch.float32), (2, (2, 9000), torch.float32), (1, (), torch.float32)],
)  # fmt: skip
def test_others_are_calls_with_eager_s_choice_among_equals(
    k: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.randint(-50, 50, shape).to(dtype)
    have, want = (fn(x, k) for fn in (compiled(as_scores), as_scores))
    assert torch.equal(have.indices, want.indices)


def test_so_is_what_has_no_exponentials() -> None:
    """Data that are sorted, rounded or masked often have equal elements."""
    x = torch.randint(-3, 3, (20, 30)).float()
    ours = compiled(lambda y: torch.topk(y * 0.5, 4))
    assert torch.equal(ours(x).indices, torch.topk(x * 0.5, 4).indices)


def of_halves(x: Tensor) -> Tensor:
    return torch.softmax(x, -1, dtype=torch.float32).topk(4).indices


def of_rounded(x: Tensor) -> Tensor:
    return torch.sigmoid(x.float()).to(x.dtype).float().topk(4).indices


def of_stored(x: Tensor) -> Tensor:
    rounded = x * 2
    return (rounded.T.contiguous().T.float() - rounded.float().exp()).topk(4).indices


def of_counts(x: Tensor) -> Tensor:
    return x.int().float().exp().topk(4).indices


def test_so_are_scores_of_halves_and_integers() -> None:
    """Routers in half precision: their logits are often equal, and so are the exponentials."""
    for dtype in (torch.bfloat16, torch.float16):
        x = (torch.randint(-40, 40, (200, 64)) / 8).to(dtype)
        for fn in (of_halves, of_rounded, of_stored, of_counts):
            assert torch.equal(compiled(fn)(x), fn(x)), fn.__name__
