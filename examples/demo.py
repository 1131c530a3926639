"""A small transformer: eager, TorchInductor and Perfuse side by side, and what Perfuse made of it.

python examples/demo.py
"""

from __future__ import annotations

import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import perfuse

WIDTH, HEADS, LAYERS, BATCH, LENGTH = 256, 8, 2, 8, 128
NUM_ROUNDS = 30


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(x.shape))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + hidden


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass
class Contestant:
    name: str
    run: Callable[[Tensor], Tensor]
    compile_s: float = 0.0
    kernels: str = ""
    error: str = ""


def main() -> None:
    console = Console()
    torch.manual_seed(0)
    model = Model().eval()
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with tempfile.TemporaryDirectory() as cache, torch.no_grad(), progress_bar(console) as progress:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        bar = progress.add_task("eager", total=3 + NUM_ROUNDS)
        contestants = [Contestant("eager", model)]
        contestants[0].run(x)
        progress.advance(bar)
        for name, backend in (("TorchInductor", "inductor"), ("Perfuse", "perfuse")):
            progress.update(bar, description=f"compiling with {name}")
            contestants.append(compile_with(name, backend, model, x, Path(cache)))
            progress.advance(bar)
        progress.update(bar, description="measuring in turns")
        times = take_turns(contestants, x, lambda: progress.advance(bar))
        progress.update(bar, description="explaining")
        explanation = perfuse.explain(model, x)
        largest = max_difference(contestants, x)
    console.print(summary(contestants, times))
    console.print(f"largest difference from eager: {largest:.2e}")
    console.print("\nperfuse.explain(model, x):\n", highlight=False)
    console.print(explanation, highlight=False)


def progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def compile_with(name: str, backend: str, model: nn.Module, x: Tensor, cache: Path) -> Contestant:
    """The first call with empty caches, as a new user meets it."""
    torch._dynamo.reset()
    candidate: Any = torch.compile(model, backend=backend)
    perfuse.counters.clear()
    began = time.perf_counter()
    if backend == "perfuse":
        with perfuse.testing.fresh_cache():
            candidate(x)
    else:
        candidate(x)
    seconds = time.perf_counter() - began
    ours = perfuse.counters["schedule.kernels"]
    kernels = ours if backend == "perfuse" else peer_kernels(cache)
    return Contestant(name, candidate, seconds, str(kernels))


def peer_kernels(cache: Path) -> int:
    """Counted in the programs that the peer leaves in its cache."""
    wrappers = [p.read_text(errors="ignore") for p in cache.rglob("*.py")]
    return sum(len(re.findall(r"^\w+ = async_compile\.cpp", w, re.M)) for w in wrappers)


def take_turns(
    contestants: list[Contestant], x: Tensor, on_round: Callable[[], None]
) -> dict[str, float]:
    """Median milliseconds; in turns, so that a busy machine is unfair to nobody."""
    times: dict[str, list[float]] = {c.name: [] for c in contestants}
    for _ in range(NUM_ROUNDS):
        for contestant in contestants:
            began = time.perf_counter()
            contestant.run(x)
            times[contestant.name].append((time.perf_counter() - began) * 1e3)
        on_round()
    return {name: statistics.median(t) for name, t in times.items()}


def max_difference(contestants: list[Contestant], x: Tensor) -> float:
    eager = contestants[0].run(x)
    return max(float((c.run(x) - eager).abs().max()) for c in contestants[1:])


def summary(contestants: list[Contestant], times: dict[str, float]) -> Table:
    view = Table(title=f"{LAYERS} transformer blocks, {BATCH}x{LENGTH}x{WIDTH}, forward")
    for i, head in enumerate(("", "run ms", "over eager", "first call s", "kernels")):
        view.add_column(head, justify="right" if i else "left")
    for contestant in contestants:
        run_ms = times[contestant.name]
        faster = f"{times['eager'] / run_ms:.2f}x"
        first = f"{contestant.compile_s:.2f}" if contestant.compile_s else ""
        view.add_row(contestant.name, f"{run_ms:.2f}", faster, first, contestant.kernels)
    return view


if __name__ == "__main__":
    main()
