"""FlexAttention on a GPU: Perfuse against the peer, forward and with the backward, time and memory.

python -m benchmarks.flex --rows bias-2048x128 window-2048x128 --limit 100
python -m benchmarks.flex --device cpu               # the rows of flex_cpu.py
python -m benchmarks.flex --tiles 128 --limit 60     # times of tiles by kernel, heads of 128
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks import flex_cpu
from perfuse import graph_cache
from perfuse.autotune.run_alone import built
from perfuse.backends import backend_of
from perfuse.context import Context
from perfuse.pipeline import Compiled
from perfuse.runtime.host_names import Call
from perfuse.schedule.plan import Plan
from perfuse.schedule.tile import Tile, TileKind

Run = Callable[[], object]
WINDOW = 512
ROUNDS = 5
BACKENDS = ("inductor", "perfuse")


@dataclass(frozen=True)
class Row:
    """Attention of one kind, by length and size of a head, over 131,072 queries in all."""

    kind: str  # plain, bias, causal, window
    length: int
    head: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.length}x{self.head}"

    @property
    def batch(self) -> int:
        return max(1, 8192 // self.length)

    def operands(self) -> list[Tensor]:
        shape, half = (self.batch, 16, self.length, self.head), torch.bfloat16
        return [torch.randn(shape, dtype=half, device="cuda", requires_grad=True) for _ in "qkv"]

    def function(self) -> Callable[..., Tensor]:
        mask = _MASKS.get(self.kind)
        size = self.length
        blocks = None if mask is None else create_block_mask(mask, None, None, size, size, "cuda")
        score = _SCORES.get(self.kind)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            made: Any = flex_attention(q, k, v, score_mod=score, block_mask=blocks)
            return made  # type: ignore[no-any-return]

        return attend


def _by_distance(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score - (q - k).abs() * 0.01


def _causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def _window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k < WINDOW)


_SCORES = {"bias": _by_distance}
_MASKS = {"causal": _causal, "window": _window}
ROWS = [
    *(Row(kind, 2048, 128) for kind in ("bias", "window")),
    *(
        Row(kind, n, head)
        for n in (1024, 8192)
        for head in (64, 128)
        for kind in ("bias", "causal")
    ),
]


def milliseconds(runs: Sequence[Run], seconds: float = 0.15) -> list[float]:
    """The best of some medians of each, taken in turns, by the GPU's clock."""
    best = [float("inf")] * len(runs)
    for _ in range(ROUNDS):
        for number, run in enumerate(runs):
            best[number] = min(best[number], _median(run, seconds / ROUNDS))
    return best


def _median(run: Run, seconds: float) -> float:
    run()
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < stop and len(times) < 200):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        run()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after))
    return sorted(times)[len(times) // 2]


def peak_megabytes(run: Run) -> float:
    """The most memory that a run takes besides what was there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - start) / 1e6


def compare(row: Row) -> dict[str, Any]:
    """Times and memory of both compilers, and how far their results are apart."""
    attend, operands = row.function(), row.operands()
    grad = torch.randn_like(operands[0])
    forwards: dict[str, Run] = {}
    steps: dict[str, Run] = {}
    results = {}
    for backend in BACKENDS:
        torch._dynamo.reset()
        compiled = torch.compile(attend, backend=backend)
        forwards[backend], steps[backend] = _runs(compiled, operands, grad)
        out = compiled(*operands)
        results[backend] = [out.detach(), *torch.autograd.grad(out, operands, grad)]
    apart = [float((a - b).abs().max()) for a, b in zip(*results.values(), strict=True)]
    found: dict[str, Any] = {"row": str(row), "largest difference": apart}
    for name, runs in (("forward", forwards), ("step", steps)):
        times = dict(zip(runs, milliseconds(list(runs.values())), strict=True))
        memory = {backend: peak_megabytes(run) for backend, run in runs.items()}
        found[name] = {"ms": times, "MB": memory, "ratio": times["inductor"] / times["perfuse"]}
    return found


def _runs(compiled: Callable[..., Tensor], operands: list[Tensor], grad: Tensor) -> tuple[Run, Run]:
    def forward() -> object:
        with torch.no_grad():
            return compiled(*operands)

    def step() -> object:
        return torch.autograd.grad(compiled(*operands), operands, grad)

    forward(), step()
    return forward, step


# -- tiles ---------------------------------------------------------------------------------

SIZES = ((64, 64), (64, 128), (128, 64), (128, 128))
SHAPES = ((4, 2), (4, 3), (8, 2), (8, 3))


def race_tiles(row: Row, limit: float) -> Iterator[str]:
    """The times of both graphs with each tile for one of their kernels."""
    made: list[Compiled] = []
    original = graph_cache.compile_graph

    def keep(*args: Any, **kwargs: Any) -> Compiled:
        made.append(original(*args, **kwargs))
        return made[-1]

    stop = time.perf_counter() + limit
    graph_cache.compile_graph = keep
    attend, operands = row.function(), row.operands()
    torch.autograd.grad(torch.compile(attend, backend="perfuse")(*operands).sum(), operands)
    graph_cache.compile_graph = original
    for compiled in made:
        yield from _race_graph(row, compiled, stop)


def _race_graph(row: Row, compiled: Compiled, stop: float) -> Iterator[str]:
    context, plan = compiled.context, compiled.plan
    inputs = [_input(compiled, name) for name in plan.program.inputs]
    for kernel in plan.kernels:
        if kernel.attention is None:
            continue
        tiles = [Tile(TileKind.ATTENTION, *size, *shape) for size in SIZES for shape in SHAPES]
        plans = [replace(plan, tiles={**plan.tiles, kernel.name: tile}) for tile in tiles]
        with ThreadPoolExecutor(16) as pool:
            fits = list(pool.map(lambda made: _fits(made, context), plans))
        for tile, made, fit in zip(tiles, plans, fits, strict=True):
            if not fit or time.perf_counter() > stop:
                continue
            call = _loaded(made, context)
            (best,) = milliseconds([lambda call=call: call(list(inputs))], 0.03)  # type: ignore[misc]
            yield f"{row} {kernel.attention.part} {tile}: {best:.4f} ms"


def _loaded(plan: Plan, context: Context) -> Call:
    backend, (sources, entries) = backend_of(context.target), built(plan, context)
    host = backend.host(plan, sources, context)
    return backend.load(host, entries, plan.program.constants, context)


def _fits(plan: Plan, context: Context) -> bool:
    try:
        built(plan, context)
    except Exception:  # too large, or not compiled
        return False
    return True


def _input(compiled: Compiled, name: str) -> Tensor:
    buffer = compiled.program.buffers[name]
    placeholders = compiled.module.graph.find_nodes(op="placeholder")
    value = placeholders[compiled.program.inputs.index(name)].meta["val"]
    if not buffer.dtype.is_float:
        return torch.ones(value.shape, dtype=value.dtype, device="cuda")
    return torch.randn(value.shape, device="cuda").to(value.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rows", nargs="*", default=[])
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"], help="on a CPU")
    parser.add_argument("--tiles", nargs="*", type=int, default=[], help="sizes of heads")
    parser.add_argument("--limit", type=float, default=100, help="seconds in all")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    for head in given.tiles:
        for line in race_tiles(Row("bias", 2048, head), given.limit / len(given.tiles)):
            print(line, flush=True)
    if given.tiles:
        return
    on_cpu = given.device == "cpu"
    rows = (
        flex_cpu.compare_all(given.rows, given.dtypes, given.limit)
        if on_cpu
        else _compare_all(given.rows, given.limit)
    )
    found = []
    for made in rows:
        found.append(made)
        print(json.dumps(made), flush=True)
        if given.out is not None:
            given.out.write_text(json.dumps(found, indent=1))


def _compare_all(rows: Sequence[str], limit: float) -> Iterator[dict[str, Any]]:
    stop = time.perf_counter() + limit
    for row in ROWS:
        if (not rows or str(row) in rows) and time.perf_counter() < stop:
            yield compare(row)


if __name__ == "__main__":
    main()
