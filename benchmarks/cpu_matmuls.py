"""Matmuls with an epilogue on the CPU: eager, the peer and Perfuse, with and without max-autotune.

python -m benchmarks.cpu_matmuls --threads 2 --only 'mm_' --budget 4
python -m benchmarks.cpu_matmuls --threads 1 --random 20 --only random

With one thread the clock is the CPU time of that thread, which a busy machine disturbs little.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.contest import Reading, Step, Steps, take_turns

TUNED = "max-autotune-no-cudagraphs"
CONTESTANTS = {
    "eager": ("", None),
    "peer": ("inductor", None),
    "peer tuned": ("inductor", TUNED),
    "perfuse": ("perfuse", None),
    "perfuse tuned": ("perfuse", TUNED),
}
# Inputs and outputs of the linear layers of benchmarks/models.py, with the rows they are given.
LINEAR_LAYERS = {
    "bert": (256, 768, 3072),
    "bert_out": (256, 3072, 768),
    "llama": (192, 768, 2048),
    "t5": (256, 512, 2048),
    "vit": (394, 384, 1536),
    "mobilebert": (256, 128, 512),
    "whisper": (1500, 512, 2048),
    "convnext": (6272, 96, 384),
}


Function = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Row:
    """A function of x, a weight and a bias, and their sizes."""

    name: str
    function: Function
    sizes: tuple[int, int, int]  # rows, depth, columns
    dtype: torch.dtype = torch.float32
    is_linear: bool = True  # the weight is stored by columns
    is_transposed: bool = False  # x is stored by columns
    weight: torch.dtype | None = None  # of the weight, if not that of x
    is_residual: bool = False  # the last operand has the shape of the result

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, depth, columns = self.sizes
        shape = (columns, depth) if self.is_linear else (depth, columns)
        generator = torch.Generator().manual_seed(0)
        last = (rows, columns) if self.is_residual else (columns,)
        shapes = ((rows, depth), shape, last)
        x, w, b = (torch.randn(each, generator=generator).to(self.dtype) for each in shapes)
        if self.weight is not None:
            w = (w * 40).clamp(-127, 127).to(self.weight)
        return (x.mT.contiguous().mT if self.is_transposed else x), w, b


def relu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(x @ w + b)


def gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x @ w + b, approximate="tanh")


def linear_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


def dequantised(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype)) * b


def residual(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return b + F.linear(x, w)


KINDS: tuple[tuple[str, Function, dict[str, Any]], ...] = (
    ("linear", linear, {}),
    ("gelu", linear_gelu, {}),
    ("residual", residual, {"is_residual": True}),
    ("int8", dequantised, {"weight": torch.int8}),
    ("relu", relu, {"is_linear": False}),
    ("transposed", linear_gelu, {"is_transposed": True}),
)


def random_rows(count: int) -> list[Row]:
    """Matmuls of random sizes, odd ones among them, of at most 2**30 multiplications."""
    draw, found = random.Random(0), []
    while len(found) < count:
        m, k, n = (round(2 ** draw.uniform(low, 12)) for low in (0, 6, 6))
        if draw.random() < 0.5:
            k, n = 64 * math.ceil(k / 64), 64 * math.ceil(n / 64)
        name, function, options = KINDS[len(found) % len(KINDS)]
        dtype = draw.choice((torch.float32, torch.bfloat16))
        if 1 << 18 <= m * k * n <= 1 << 30:
            kind = "f32" if dtype is torch.float32 else "bf16"
            title = f"random_{name}_{kind}_{m}x{k}x{n}"
            found.append(Row(title, function, (m, k, n), dtype, **options))
    return found


def rows() -> list[Row]:
    found = []
    for n in (512, 1024, 2048):
        found.append(Row(f"mm_bias_relu_{n}", relu, (n, n, n), is_linear=False))
        found.append(Row(f"mm_gelu_{n}", gelu, (n, n, n), is_linear=False))
    found += [Row(f"linear_{n}", linear_gelu, sizes) for n, sizes in LINEAR_LAYERS.items()]
    for m in (1, 4, 8, 16, 32):
        found.append(Row(f"small_{m}", linear_gelu, (m, 768, 3072)))
        found.append(Row(f"bf16_{m}", linear_gelu, (m, 768, 3072), torch.bfloat16))
    return found


def steps_of(row: Row) -> Steps:
    inputs = row.inputs()
    steps: Steps = {}
    for name, (backend, mode) in CONTESTANTS.items():
        torch.compiler.reset()
        fn: Any = row.function
        if backend:
            fn = torch.compile(row.function, backend=backend, mode=mode, dynamic=False)
        with torch.no_grad():
            fn(*inputs)
        steps[name] = _without_gradients(fn, inputs)
    return steps


def _without_gradients(fn: Any, inputs: tuple[Tensor, ...]) -> Step:
    def step() -> Any:
        with torch.no_grad():
            return fn(*inputs)

    return step


def clock_of(threads: int) -> Callable[[str, Step], Reading]:
    now = time.thread_time if threads == 1 else time.perf_counter

    def clock(name: str, step: Step) -> Reading:
        step()  # what others drove out of the caches is back
        began = now()
        step()
        spent_ms = 1e3 * (now() - began)
        return lambda: spent_ms

    return clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--budget", type=float, default=4.0, help="seconds of measuring a row")
    parser.add_argument("--random", type=int, default=0, help="matmuls of random sizes besides")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    others = [name for name in CONTESTANTS if name != "perfuse tuned"]
    table = Table("case", *CONTESTANTS, *(f"over {name}" for name in others))
    ratios: dict[str, list[float]] = {name: [] for name in others}
    for row in (*rows(), *random_rows(arguments.random)):
        if not re.search(arguments.only, row.name):
            continue
        found = take_turns(steps_of(row), arguments.budget, clock_of(arguments.threads))
        times = {name: found[name]["median"] for name in CONTESTANTS}
        own = {name: times[name] / times["perfuse tuned"] for name in others}
        for name in others:
            ratios[name].append(own[name])
        cells = [*(f"{ms:.3f}" for ms in times.values()), *(f"{r:.2f}x" for r in own.values())]
        table.add_row(row.name, *cells)
        print(row.name, *cells, flush=True)
    means = [f"{math.exp(sum(map(math.log, r)) / max(len(r), 1)):.2f}x" for r in ratios.values()]
    table.add_row("geometric mean", *([""] * len(CONTESTANTS)), *means)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
