"""Optimiser steps over many tensors: eager (foreach and fused), the peer, Perfuse.

python -m benchmarks.optimisers --device cuda
python -m benchmarks.optimisers --tensors 300 --cases adamw lion --peer

Every contestant has parameters of its own; after a few steps they are compared with eager's. Times
are medians of interleaved rounds of whole steps, host included; beside them the time of the GPU
alone. "dynamo" is a backend that computes nothing: what the guards and the bookkeeping of
torch.compile take, below which no compiled step can get. Cases that would begin after `--limit`
seconds are left out, and named.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import perfuse
from benchmarks.machine import describe

ROUNDS, STEPS_COMPARED = 15, 3
SIZES = {
    "mixed": (64, 1000, 4096, 65_536, 262_144, 1 << 20),
    "small": (64, 128, 300, 1024),
    # The weights and biases of a GPT-2 medium, which has 292 of them.
    "model": (1024, 3072, 4096, 1 << 20, 3 << 20, 4 << 20),
}
Step = Callable[[], Any]
NOTHING = "dynamo"


def compute_nothing(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., tuple[Any, ...]]:
    """A backend whose results are zeros, made once."""
    (outputs,) = graph.graph.output_node().args
    made = tuple(torch.zeros_like(o.meta["example_value"]) for o in outputs)
    real = tuple(torch.zeros(m.shape, dtype=m.dtype, device=m.device) for m in made)
    return lambda *_: real


class Lion:
    """Lion, written with ops over lists."""

    def __init__(self, params: list[Tensor], lr: float = 1e-3) -> None:
        self.params, self.lr = params, lr
        self.momenta = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self) -> None:
        grads = [p.grad for p in self.params if p.grad is not None]
        update = torch._foreach_lerp(grads, self.momenta, 0.9)
        torch._foreach_mul_(self.params, 1 - self.lr * 0.1)
        torch._foreach_add_(self.params, torch._foreach_sign(update), alpha=-self.lr)
        torch._foreach_lerp_(self.momenta, grads, 0.01)


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "sgd_momentum": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "adam_amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "lion": (Lion, {}),
}


def parameters(count: int, sizes: tuple[int, ...], device: str) -> list[Tensor]:
    choose, generator = random.Random(0), torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        size = choose.choice(sizes)
        start, slope = (torch.randn(size, generator=generator) for _ in range(2))
        parameter = torch.nn.Parameter(start.to(device))
        parameter.grad = slope.to(device)
        found.append(parameter)
    return found


def contestants(name: str, make_params: Callable[[], list[Tensor]], peer: bool) -> dict[str, Any]:
    """By name: the parameters, and the step before compilation or after."""
    make, options = CASES[name]
    kinds: dict[str, tuple[dict[str, Any], Any]] = {"foreach": ({"foreach": True}, None)}
    if make is not Lion:
        kinds["fused"] = ({"fused": True}, None)
    else:
        kinds = {"foreach": ({}, None)}
    kinds["perfuse"] = ({}, "perfuse")
    if peer:
        kinds["inductor"] = ({}, "inductor")
    found = {}
    for kind, (flags, backend) in kinds.items():
        params = make_params()
        optimiser = make(params, **options, **flags)
        step = optimiser.step if backend is None else torch.compile(optimiser.step, backend=backend)
        found[kind] = (params, step)
    return found


def dynamo_alone(name: str, params: list[Tensor], device: str, count: int) -> list[float]:
    """Measured last: the steps of one class share a cache, and each call tries its entries."""
    make, options = CASES[name]
    torch._dynamo.reset()
    step = torch.compile(make(params, **options).step, backend=compute_nothing)
    for _ in range(STEPS_COMPARED):
        step()
    return [milliseconds(step, device, count) for _ in range(ROUNDS)]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(step: Step, device: str, count: int) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start) / count


def on_gpu(step: Step) -> tuple[int, float]:
    """Kernels that one step runs on the GPU, and their milliseconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    kernels = [e for e in seen.key_averages() if e.self_device_time_total > 0]
    return sum(e.count for e in kernels), sum(e.self_device_time_total for e in kernels) / 1e3


def measure(name: str, arguments: argparse.Namespace, sizes: str) -> dict[str, Any]:
    device = arguments.device
    running = contestants(
        name, lambda: parameters(arguments.tensors, SIZES[sizes], device), arguments.peer
    )
    first: dict[str, float] = {}
    torch._dynamo.reset()
    for kind, (_, step) in running.items():
        start = time.perf_counter()
        for _ in range(STEPS_COMPARED):
            step()
        synchronize(device)
        first[kind] = time.perf_counter() - start
    eager = running["foreach"][0]
    wrong = {
        kind: max(float((a - b).detach().abs().max()) for a, b in zip(params, eager, strict=True))
        for kind, (params, _) in running.items()
    }
    count = max(1, min(20, int(20 / milliseconds(running["foreach"][1], device, 3))))
    times: dict[str, list[float]] = {kind: [] for kind in running}
    for _ in range(ROUNDS):
        for kind, (_, step) in running.items():
            times[kind].append(milliseconds(step, device, count))
    gpu = {k: on_gpu(s) for k, (_, s) in running.items()} if device == "cuda" else {}
    spare = parameters(arguments.tensors, SIZES[sizes], device)
    times[NOTHING] = dynamo_alone(name, spare, device, count)
    return {
        "case": name, "sizes": sizes, "tensors": arguments.tensors, "first_s": first,
        "furthest": wrong, "gpu": gpu,
        "median_ms": {kind: statistics.median(found) for kind, found in times.items()},
        "fastest_ms": {kind: min(found) for kind, found in times.items()},
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    for kind, median in row["median_ms"].items():
        launches, busy = row["gpu"].get(kind, (0, 0.0))
        off = f"{row['furthest'][kind]:.1e}" if kind in row["furthest"] else "-"
        print(
            f"{row['case']:14}{row['sizes']:7}{kind:10}{median:9.3f} ms"
            f"  fastest {row['fastest_ms'][kind]:8.3f}"
            f"  first calls {row['first_s'].get(kind, 0.0):7.1f} s"
            f"  furthest from eager {off}  {launches} launches, {busy:.3f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--sizes", nargs="+", default=["mixed"], choices=list(SIZES))
    parser.add_argument("--peer", action="store_true", help="the peer too, which compiles long")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds to begin cases in")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    start, rows, left_out = time.perf_counter(), [], []
    for sizes in arguments.sizes:
        for name in arguments.cases:
            if time.perf_counter() - start > arguments.limit:
                left_out.append(f"{name} {sizes}")
                continue
            before = perfuse.counters.snapshot().get("schedule.kernels", 0)
            row = measure(name, arguments, sizes)
            row["kernels"] = perfuse.counters.snapshot().get("schedule.kernels", 0) - before
            rows.append(row)
            show(row)
            print(f"{'':21}{row['kernels']} kernels of Perfuse's", flush=True)
    if left_out:
        print(f"left out for want of time: {', '.join(left_out)}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
