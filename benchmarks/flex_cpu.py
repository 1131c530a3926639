"""FlexAttention on a CPU: processor time of one thread, against the peer and plain attention.

python -m benchmarks.flex --device cpu --rows causal-1x16x2048x64
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

ROUNDS, SECONDS = 7, 0.1  # of each rival
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class CpuRow:
    """Attention of one kind: plain, bias or causal; fewer keys' heads are shared."""

    kind: str
    batch: int
    heads: int
    length: int
    head: int
    queries: int | None = None
    shared: int | None = None

    def __str__(self) -> str:
        decode = "" if self.queries is None else f"{self.queries}-query-"
        heads = self.heads if self.shared is None else f"{self.heads}on{self.shared}"
        return f"{decode}{self.kind}-{self.batch}x{heads}x{self.length}x{self.head}"

    def operands(self, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        shared = self.shared or self.heads
        shapes = [(self.heads, self.queries or self.length), *[(shared, self.length)] * 2]
        return [
            torch.randn(self.batch, *shape, self.head, generator=generator).to(dtype)
            for shape in shapes
        ]

    def function(self) -> Callable[..., Any]:
        score = _by_distance if self.kind == "bias" else None
        size, is_causal = (self.queries or self.length, self.length), self.kind == "causal"
        blocks = create_block_mask(_causal, None, None, *size, "cpu") if is_causal else None

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return flex_attention(
                q, k, v, score_mod=score, block_mask=blocks, enable_gqa=self.shared is not None
            )

        return attend

    def library(self) -> Callable[..., Any] | None:
        """PyTorch's attention without functions of scores, where it is the same."""
        if self.kind == "bias":
            return None
        is_causal, is_shared = self.kind == "causal", self.shared is not None
        return lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, enable_gqa=is_shared
        )


def _by_distance(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score - (q - k).abs() * 0.01


def _causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


ROWS = [
    CpuRow("plain", 1, 8, 1024, 64),
    CpuRow("bias", 1, 8, 1024, 64),
    CpuRow("plain", 2, 4, 512, 128),
    CpuRow("causal", 1, 16, 2048, 64),
    CpuRow("plain", 1, 8, 4096, 64, queries=1),
    CpuRow("plain", 1, 32, 4096, 128, queries=1, shared=8),
]


def compare(row: CpuRow, dtype: str) -> dict[str, Any]:
    """The least time of each rival in milliseconds, in turns, and how far results are apart."""
    given, attend = row.operands(DTYPES[dtype]), row.function()
    rivals: dict[str, Callable[..., Any]] = {}
    for backend in ("perfuse", "inductor"):
        torch._dynamo.reset()
        rivals[backend] = torch.compile(attend, backend=backend)
        rivals[backend](*given)
    if (library := row.library()) is not None:
        rivals["library"] = library
    results = [run(*given) for run in rivals.values()]
    best = dict.fromkeys(rivals, float("inf"))
    for _ in range(ROUNDS):
        for name, run in rivals.items():
            best[name] = min(best[name], _least(run, given))
    ratios = {name: best[name] / best["perfuse"] for name in rivals if name != "perfuse"}
    apart = [float((results[0] - other).abs().max()) for other in results[1:]]
    return {"row": str(row), "dtype": dtype, "ms": best, "ratio": ratios, "apart": apart}


def _least(run: Callable[..., Any], given: Sequence[Tensor]) -> float:
    best, stop = float("inf"), time.thread_time() + SECONDS
    while time.thread_time() < stop:
        start = time.thread_time()
        run(*given)
        best = min(best, time.thread_time() - start)
    return best * 1e3


def machine() -> dict[str, str]:
    with open("/proc/cpuinfo") as lines:
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {"cpu": names[0], "python": platform.python_version(), "torch": torch.__version__}


@torch.no_grad()
def compare_all(rows: Sequence[str], dtypes: Sequence[str], limit: float) -> Iterator[Any]:
    """The machine, and a row after another until the time is over."""
    torch.set_num_threads(1)
    stop = time.perf_counter() + limit
    yield machine()
    for row in ROWS:
        for dtype in dtypes:
            if (not rows or str(row) in rows) and time.perf_counter() < stop:
                yield compare(row, dtype)
