"""scaled_dot_product_attention on a CPU: our kernel against the library's, over many sizes.

    python -m benchmarks.attention_cpu --part forward --dtype float32 --out rows.jsonl

Both are programs of Perfuse, of one call with operands as models have them (heads of a position
side by side), and differ in the setting cpu.attention. Processor time of one thread, in turns.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROUNDS = 5
LENGTHS = (16, 49, 64, 128, 197, 512, 1024)
SIZES = (16, 32, 64, 80, 96, 128)
CACHES = (128, 512, 1024, 4096)


@dataclass(frozen=True)
class Row:
    """One call; fewer heads of keys are shared."""

    kind: str  # none, causal, bool, add
    batch: int
    heads: int
    shared: int
    queries: int
    keys: int
    size: int

    def __str__(self) -> str:
        heads = f"{self.heads}on{self.shared}" if self.shared < self.heads else f"{self.heads}"
        return f"{self.kind}-{self.batch}x{heads}x{self.queries}x{self.keys}x{self.size}"

    def operands(self, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = [(self.queries, self.heads), (self.keys, self.shared), (self.keys, self.shared)]
        made = [
            torch.randn(self.batch, *shape, self.size, generator=generator).to(dtype)
            for shape in shapes
        ]
        if self.queries == 1:  # a cache has heads outside
            made[1:] = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in made[1:]]
        mask = torch.rand(self.batch, 1, self.queries, self.keys, generator=generator)
        mask[..., 0] = 1
        kinds = {"bool": [mask > 0.1], "add": [mask.to(dtype)]}
        return [*(x.transpose(1, 2) for x in made), *kinds.get(self.kind, [])]

    def function(self) -> Callable[..., Tensor]:
        is_causal, is_shared = self.kind == "causal", self.shared < self.heads

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=is_shared
            )

        return attend


def forward_rows() -> Iterator[Row]:
    for length in LENGTHS:
        batch, heads = (4, 4) if length <= 64 else (1, 8)
        for size in SIZES:
            for kind in ("none", "causal"):
                yield Row(kind, batch, heads, heads, length, length, size)
        for kind in ("bool", "add"):
            yield Row(kind, batch, heads, heads, length, length, 64)
        yield Row("causal", batch, 8, 2, length, length, 64)
    yield Row("none", 8, 12, 12, 197, 197, 64)
    yield Row("none", 64, 3, 3, 49, 49, 32)


def decode_rows() -> Iterator[Row]:
    for keys in CACHES:
        for size in (32, 64, 80, 128):
            for batch, heads, shared in ((1, 8, 8), (4, 8, 8), (1, 32, 8), (8, 8, 2)):
                yield Row("bool" if size == 64 else "none", batch, heads, shared, 1, keys, size)


def training_rows() -> Iterator[Row]:
    for length in LENGTHS:
        batch, heads = (4, 4) if length <= 64 else (1, 8)
        for size in (16, 32, 64, 80, 128):
            for kind in ("none", "causal"):
                yield Row(kind, batch, heads, heads, length, length, size)
        yield Row("bool", batch, heads, heads, length, length, 64)


PARTS = {"forward": forward_rows, "decode": decode_rows, "training": training_rows}


def compare(row: Row, dtype: torch.dtype, simd: str, *, trains: bool) -> dict[str, Any]:
    """The least time of each rival in microseconds, in turns."""
    given = [x.requires_grad_(trains and i < 3) for i, x in enumerate(row.operands(dtype))]
    rivals: dict[str, Callable[[], Any]] = {}
    compile_seconds = {}
    for name in ("kernel", "library", "eager"):
        torch._dynamo.reset()
        run = row.function()
        if name != "eager":
            options = {"cpu.attention": name, "cpu.simd": simd}
            run = torch.compile(run, backend="perfuse", options=options)
        rivals[name] = step = _step(run, given, trains=trains)
        start = time.perf_counter()
        step()
        compile_seconds[name] = round(time.perf_counter() - start, 2)
    best = dict.fromkeys(rivals, float("inf"))
    for _ in range(ROUNDS):
        for name, run_once in rivals.items():
            best[name] = min(best[name], _least(run_once))
    ratios = {name: round(best[name] / best["kernel"], 3) for name in ("library", "eager")}
    times = {name: round(value, 2) for name, value in best.items()}
    return {"us": times, "ratio": ratios, "first_call_s": compile_seconds}


def _step(run: Callable[..., Tensor], given: list[Tensor], *, trains: bool) -> Callable[[], Any]:
    if not trains:
        return lambda: run(*given)
    with torch.no_grad():
        weight = torch.randn_like(given[0])
    return lambda: torch.autograd.grad(run(*given), given[:3], weight)


def _least(run: Callable[[], Any]) -> float:
    """The least time of a call in some batches of calls, which the clock resolves."""
    start = time.thread_time()
    run()
    number = max(1, int(2e-3 / max(time.thread_time() - start, 2e-5)))
    best, stop = float("inf"), time.thread_time() + 0.03
    while best == float("inf") or time.thread_time() < stop:
        start = time.thread_time()
        for _ in range(number):
            run()
        best = min(best, (time.thread_time() - start) / number)
    return best * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, default="forward")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--simd", default="auto", help="of our kernels; see ATEN_CPU_CAPABILITY")
    parser.add_argument("--rows", nargs="*", help="only these")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    trains = args.part == "training"
    for row in PARTS[args.part]():
        if args.rows and str(row) not in args.rows:
            continue
        with torch.set_grad_enabled(trains):
            found = compare(row, getattr(torch, args.dtype), args.simd, trains=trains)
        entry = {"row": str(row), "dtype": args.dtype, **asdict(row), **found}
        print(row, args.dtype, found["us"], found["ratio"], found["first_call_s"], flush=True)
        if args.out is not None:
            with args.out.open("a") as out:
                out.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    main()
