"""Training steps of a Llama block on a GPU, in bfloat16 and with torchao's float8 linear layers.

    python -m benchmarks.fp8_block                           all contestants, interleaved
    python -m benchmarks.fp8_block --profile --only perfuse  every kernel of a step, in order

A contestant is a recipe of torchao (or bf16) and who compiles it. torchao is looked for in
`.device_torchao` too: `pip install --no-deps --target .device_torchao torchao==0.18.*`. Errors are
those of results and gradients against bf16 by eager, as relative norms; memory is the peak of a
step beyond parameters and inputs.
"""

from __future__ import annotations

import argparse
import copy
import gc
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / ".device_torchao")]

import perfuse  # noqa: E402, F401  (a checkout that is not installed makes itself known)

RECIPES = ("bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp")
NAMES = (
    "bf16 eager",
    "bf16 inductor",
    "bf16 perfuse",
    "tensorwise inductor",
    "tensorwise perfuse",
    "rowwise inductor",
    "rowwise perfuse",
)
STEPS = 4  # of a contestant, one after the other, in each round
MEGA = 1e6
Step = Callable[[], list[Tensor]]


class Block(nn.Module):
    """Attention and a gated MLP behind RMS norms; linear layers without bias, as in Llama."""

    def __init__(self, width: int, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.first_norm, self.second_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first_norm(x)
        q, k, v = (self._heads(linear(y)) for linear in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(-2))
        y = self.second_norm(x)
        gated: Tensor = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + gated

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def with_recipe(block: Block, recipe: str) -> Block:
    """A copy of the block whose linear layers train in float8; as it is for bf16."""
    block = copy.deepcopy(block)
    if recipe != "bf16":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(block, config=config)
    return block


@dataclass(frozen=True, slots=True)
class Contestant:
    """A recipe by a compiler, ready to run: one step returns the result and all gradients."""

    name: str
    step: Step
    first_s: float
    peak_mb: float
    error: float


def step_of(block: Block, backend: str, x: Tensor, grad: Tensor) -> Step:
    call = block if backend == "eager" else torch.compile(block, backend=backend, fullgraph=True)
    leaves = [x, *block.parameters()]

    def step() -> list[Tensor]:
        for leaf in leaves:
            leaf.grad = None
        result = call(x)
        result.backward(grad)
        return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    return step


def relative_error(got: list[Tensor], exact: list[Tensor]) -> float:
    """The largest of the relative norms of the differences; NaN where anything is NaN."""
    pairs = [(a.float(), b.float()) for a, b in zip(got, exact, strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def prepared(name: str, step: Step, exact: list[Tensor]) -> Contestant:
    """Compile, check, and measure the peak memory of the second step."""
    began = time.perf_counter()
    error = relative_error(step(), exact)
    torch.cuda.synchronize()
    first_s = time.perf_counter() - began
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    peak_mb = (torch.cuda.max_memory_allocated() - before) / MEGA
    return Contestant(name, step, first_s, peak_mb, error)


def interleaved_ms(contestants: list[Contestant], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of a step, by contestant: rounds in which everybody has a few in a row."""
    found: dict[str, list[float]] = {c.name: [] for c in contestants}
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(found[contestants[0].name]) < 5:
        for contestant in contestants:
            contestant.step()
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            for _ in range(STEPS):
                contestant.step()
            ended.record()
            ended.synchronize()
            found[contestant.name].append(began.elapsed_time(ended) / STEPS)
    return found


def show_kernels(contestant: Contestant) -> None:
    """Every kernel of one step, in the order in which they ran, and the sum."""
    contestant.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as watched:
        contestant.step()
        torch.cuda.synchronize()
    events = [e for e in watched.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    total = sum(event.device_time_total for event in events)
    print(f"\n{contestant.name}: {total:.0f} us in {len(events)} kernels")
    for event in events:
        print(f"  {event.device_time_total:8.1f} us  {event.name[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="regular expression on contestants")
    parser.add_argument(
        "--also", nargs="*", default=[], help="such as 'rowwise_with_gw_hp perfuse'"
    )
    parser.add_argument("--sizes", type=int, nargs=5, default=[4, 2048, 4096, 14336, 32])
    parser.add_argument("--seconds", type=float, default=12.0, help="of measuring")
    parser.add_argument("--profile", action="store_true", help="show the kernels of a step")
    arguments = parser.parse_args()
    batch, length, width, hidden, num_heads = arguments.sizes
    torch.manual_seed(0)
    with torch.device("cuda"):
        block = Block(width, hidden, num_heads).bfloat16()
        x, grad = (torch.randn(batch, length, width, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    blocks = {recipe: with_recipe(block, recipe) for recipe in RECIPES}
    exact = [t.clone() for t in step_of(block, "eager", x, grad)()]
    contestants = []
    for name in (*NAMES, *arguments.also):
        recipe, backend = name.split()
        if re.search(arguments.only, name):
            try:
                step = step_of(blocks[recipe], backend, x, grad)
                contestants.append(prepared(name, step, exact))
            except Exception as error:  # a contestant that cannot run is a row, not the end
                print(f"{name}: {type(error).__name__}: {str(error)[:2000]}", flush=True)
    times = interleaved_ms(contestants, arguments.seconds) if contestants else {}
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.sizes}")
    print(f"{'':32} median ms   best ms  peak MB  first s  error against bf16")
    for c in contestants:
        row = f"{statistics.median(times[c.name]):9.3f} {min(times[c.name]):9.3f}"
        print(f"{c.name:32} {row} {c.peak_mb:8.0f} {c.first_s:8.1f}  {c.error:.4f}")
    for contestant in contestants if arguments.profile else []:
        show_kernels(contestant)


if __name__ == "__main__":
    main()
