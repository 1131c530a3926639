"""Classes of kernels at random sizes and dtypes: eager, the peer and Perfuse on the CPU.

    python -m benchmarks.random_kernels --draws 4 --seed 1 --out rows.jsonl
    python -m benchmarks.random_kernels --peer --below 1.1 --out rows.jsonl
    python -m benchmarks.random_kernels --table --out rows.jsonl

The first measures eager and Perfuse, the second adds the peer where Perfuse is below that ratio of
eager; both go on where they stopped. The row of a draw has its seed. Processor time, in turns.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import perfuse  # noqa: F401  (a checkout that is not installed makes itself known)
from benchmarks.contest import snapshot
from benchmarks.random_cases import KINDS, Draw, Kernel

ROUNDS = 9
ROUND_S = 0.004


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draws", type=int, default=3, help="of each class")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--below", type=float, default=math.inf, help="of eager, for the peer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    if not chosen.table:
        torch.set_num_threads(chosen.threads)
        measure_all(chosen)
    print(table(read(chosen.out)))


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Rows by seed; the last one of a seed counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["seed"]: row for row in map(json.loads, lines)}


def measure_all(chosen: argparse.Namespace) -> None:
    rows, deadline = read(chosen.out), time.monotonic() + chosen.seconds
    for number in range(chosen.draws):
        for name in chosen.kinds:
            seed = f"{name}-{chosen.seed}-{number}"
            row = rows.get(seed)
            if row is not None and not (chosen.peer and is_wanted(row, chosen.below)):
                continue
            if time.monotonic() > deadline:
                return
            rivals = ["eager", "perfuse"] + ["inductor"] * (chosen.peer and row is not None)
            measured = measure(seed, rivals, chosen.threads)
            print(seed, measured["us"], measured["failures"] or "", file=sys.stderr, flush=True)
            with chosen.out.open("a") as file:
                file.write(json.dumps(measured) + "\n")


def is_wanted(row: dict[str, Any], below: float) -> bool:
    return "inductor" not in row["us"] and ratio(row, "eager") < below


def measure(seed: str, rivals: list[str], threads: int) -> dict[str, Any]:
    """The least time of each rival in microseconds, in turns."""
    function, args = drawn(seed)
    steps, failures = {}, {}
    results = {}
    for name in rivals:
        torch._dynamo.reset()
        run = function if name == "eager" else torch.compile(function, backend=name, dynamic=False)
        step = step_of(run, args)
        try:
            results[name] = snapshot(step())
            steps[name] = step
        except Exception as error:  # a rival that fails is a row, not the end
            failures[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    failures |= {name: "differs" for name in steps if differs(results[name], results["eager"])}
    us = least_us(steps, time.process_time if threads == 1 else time.perf_counter)
    what = [f"{str(a.dtype)[6:]}{list(a.shape)}" for a in args]
    trains = any(a.requires_grad for a in args)
    return {
        "seed": seed, "args": what, "trains": trains, "us": us, "failures": failures,
        "threads": threads, "simd": os.environ.get("PERFUSE_CPU_SIMD", "native"),
    }  # fmt: skip


def drawn(seed: str) -> Kernel:
    return KINDS[seed.split("-")[0]](Draw(seed))


def step_of(function: Callable[..., Any], args: list[Any]) -> Callable[[], Any]:
    wanted = [a for a in args if a.requires_grad]
    if not wanted:

        def forward() -> Any:
            with torch.no_grad():
                return function(*args)

        return forward
    gradient = torch.ones_like(function(*args))

    def train() -> Any:
        result = function(*args)
        return result, *torch.autograd.grad(result, wanted, gradient, allow_unused=True)

    return train


def differs(got: Any, eager: Any) -> bool:
    """A rough check; tests compare carefully. Random results only have to be as large."""
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(eager), strict=True):
        if not isinstance(a, Tensor) or a.is_complex():
            continue
        x, y = a.double(), b.double()
        if a.shape != b.shape or a.dtype != b.dtype:
            return True
        if not torch.allclose(
            x, y, rtol=0.05, atol=0.05 * float(y.abs().mean()) + 1e-3, equal_nan=True
        ):
            return True
    return False


def least_us(steps: dict[str, Callable[[], Any]], now: Callable[[], float]) -> dict[str, float]:
    counts = {}
    for name, step in steps.items():
        step()
        began = time.perf_counter()
        step()
        counts[name] = max(1, int(ROUND_S / max(time.perf_counter() - began, 1e-6)))
    best = dict.fromkeys(steps, math.inf)
    for _ in range(ROUNDS):
        for name, step in steps.items():
            step()
            began = now()
            for _ in range(counts[name]):
                step()
            best[name] = min(best[name], (now() - began) / counts[name] * 1e6)
    return {name: round(us, 2) for name, us in best.items()}


def ratio(row: dict[str, Any], rival: str) -> float:
    us = row["us"]
    return us[rival] / us["perfuse"] if rival in us and "perfuse" in us else math.nan


def table(rows: dict[str, dict[str, Any]]) -> str:
    """A row a draw, the worst first, then a mean for each class."""

    def worst(row: dict[str, Any]) -> float:
        ratios = [ratio(row, rival) for rival in ("eager", "inductor") if rival in row["us"]]
        return min((r for r in ratios if not math.isnan(r)), default=0.0)

    lines = ["| draw | arguments | eager us | peer us | Perfuse us | of eager | of the peer |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in sorted(rows.values(), key=worst):
        us = [str(row["us"].get(n, "")) for n in ("eager", "inductor", "perfuse")]
        ratios = [f"{ratio(row, n):.2f}x" if n in row["us"] else "" for n in ("eager", "inductor")]
        what = " ".join(row["args"]) + (" trained" if row["trains"] else "")
        what += "".join(f" **{k}: {v[:60]}**" for k, v in row["failures"].items())
        lines.append("| " + " | ".join([row["seed"], what[:140], *us, *ratios]) + " |")
    lines += [
        "",
        "| class | draws | of eager | least | of the peer | least |",
        "|---|---|---|---|---|---|",
    ]
    groups = {name: [r for r in rows.values() if kind_of(r) == name] for name in KINDS}
    for name, found in (*groups.items(), ("all", list(rows.values()))):
        ratios = f"{summary(found, 'eager')} | {summary(found, 'inductor')}"
        lines.append(f"| {name} | {len(found)} | {ratios} |")
    return "\n".join(lines)


def kind_of(row: dict[str, Any]) -> str:
    return str(row["seed"]).split("-")[0]


def summary(rows: list[dict[str, Any]], rival: str) -> str:
    ratios = [r for r in (ratio(row, rival) for row in rows) if not math.isnan(r)]
    if not ratios:
        return " | "
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{mean:.2f}x | {min(ratios):.2f}x"


if __name__ == "__main__":
    main()
