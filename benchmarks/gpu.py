"""Eager, TorchInductor and Perfuse on a GPU: run time, bandwidth, cost of a call, compile time.

    python -m benchmarks.gpu --kernels --only '^softmax'
    python -m benchmarks.gpu --host --models --time-limit 500 --results DIR
    python -m benchmarks.gpu --device cpu --shrink 64 --quick      proves the benchmark itself

Contestants take turns in one process; a case that breaks the process costs that case alone. Every
row is printed when it is known, and all of them are kept in DIR/gpu.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # also when started as a script
    sys.path.insert(0, str(ROOT))

from benchmarks import machine  # noqa: E402
from benchmarks.cases import Case  # noqa: E402
from benchmarks.gpu_cases import TARGETS, gpu_cases  # noqa: E402
from benchmarks.report import OURS, PEER, geometric_mean, ratio  # noqa: E402
from benchmarks.turns import TURN  # noqa: E402
from tests.harness.pool import Result, Task, run_tasks  # noqa: E402

GROUPS = {"host": "overhead", "kernels": "kernel", "models": "model"}
BUDGET_S = {"kernel": 2.0, "model": 5.0, "overhead": 2.0}
QUICK_BUDGET_S = {"kernel": 0.6, "model": 2.0, "overhead": 1.0}
TIMEOUT_S = {"kernel": 60.0, "model": 240.0, "overhead": 60.0}
MODEL_MEAN, MODEL_LEAST, COMPILE_SHARE = 1.1, 0.98, 0.5
HEAD = (
    f"{'case':<22}{'eager':>9}{'peer':>9}{'ours':>9}{'/peer':>7}{'dev peer':>9}{'dev ours':>9}"
    f"{'/peer':>7}{'TB/s':>6}{'of copy':>8}{'MB peer':>8}{'MB ours':>8}{'cold s':>12}"
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for group in GROUPS:
        parser.add_argument(f"--{group}", action="store_true")
    parser.add_argument("--only", default="", help="regular expression on the names of cases")
    parser.add_argument("--quick", action="store_true", help="shorter rounds")
    parser.add_argument("--results", type=Path, help="where the results go")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds in all")
    parser.add_argument("--backend", default=OURS, help="what stands in the Perfuse column")
    parser.add_argument("--peer", default=PEER, help="the peer, `inductor:max-autotune` say")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shrink", type=int, default=1, help="divide all sizes")
    parser.add_argument(
        "--together",
        action="store_true",
        help="all cases compile at once, "
        "in a process each, then run one by one: first calls say little",
    )
    arguments = parser.parse_args()
    if not any(getattr(arguments, group) for group in GROUPS):
        for group in GROUPS:
            setattr(arguments, group, True)
    return arguments


def main() -> None:
    arguments = parse_arguments()
    deadline = time.monotonic() + arguments.time_limit
    folder = arguments.results or default_folder()
    document: dict[str, Any] = {"machine": machine.describe(), "groups": {}}
    print(" ".join(f"{k}={v}" for k, v in document["machine"].items() if k in SHOWN), flush=True)
    cases = [c for c in gpu_cases(arguments.shrink).values() if re.search(arguments.only, c.name)]
    for group, kind in GROUPS.items():
        chosen = [c for c in cases if c.kind == kind]
        if getattr(arguments, group) and chosen:
            rows = document["groups"][group] = []
            run_group(chosen, arguments, rows, deadline - time.monotonic())
            print(summary(group, rows), flush=True)
            save(folder, document)
    print(f"results in {folder}")


SHOWN = ("gpu", "torch", "triton", "perfuse", "commit")


def default_folder() -> Path:
    date = datetime.date.today().isoformat()
    return ROOT / "benchmarks" / "results" / f"{date}-gpu-{machine.describe()['host']}"


def run_group(
    cases: Sequence[Case], arguments: argparse.Namespace, rows: list[dict[str, Any]], limit_s: float
) -> None:
    """The cases of one kind, in a process of their own, on caches nobody has filled."""
    kind = cases[0].kind
    common = {
        "backends": ["eager", arguments.peer, arguments.backend],
        "device": arguments.device,
        "shrink": arguments.shrink,
        "budget_s": (QUICK_BUDGET_S if arguments.quick else BUDGET_S)[kind],
    }
    jobs = len(cases) if arguments.together else 1
    tasks = [{"case": case.name, **common, "num_together": jobs} for case in cases]
    print(HEAD, flush=True)

    def record(task: Task, result: Result) -> None:
        rows.append(row_of(task["case"], result, arguments))
        print(line(rows[-1], kind), flush=True)

    with tempfile.TemporaryDirectory(prefix="bench-cache-") as cache:
        turn = {TURN: os.path.join(cache, "turn")} if arguments.together else {}
        run_tasks(
            "benchmarks.gpu_worker",
            tasks,
            jobs=jobs,
            timeout_s=TIMEOUT_S[kind],
            on_result=record,
            env={**cache_folders(cache), **turn},
            time_limit_s=limit_s,
        )
    known = {row["name"] for row in rows}
    for task in tasks:
        if task["case"] not in known:
            rows.append(row_of(task["case"], {"status": "not reached"}, arguments))


def cache_folders(cache: str) -> dict[str, str]:
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PERFUSE_CACHE_DIR")
    folders = {name: os.path.join(cache, name.lower()) for name in names}
    for folder in folders.values():
        os.makedirs(folder, mode=0o700, exist_ok=True)
    return folders


def row_of(name: str, result: Result, arguments: argparse.Namespace) -> dict[str, Any]:
    """One case's medians, the peer and ours under their roles."""
    roles = {"eager": "eager", "peer": arguments.peer, "ours": arguments.backend, "copy": "copy"}
    row: dict[str, Any] = {"name": name, "status": result["status"]}
    failures = dict(result.get("failures", {}))
    if result["status"] != "pass":
        failures["the case"] = f"{result['status']} {result.get('message', '')}"
    row["failures"] = failures
    row["bytes"] = result.get("bytes")
    for key in ("ms", "device_ms", "host_us"):
        times = result.get(key, {})
        row |= {f"{role}_{key}": times[n]["median"] for role, n in roles.items() if n in times}
    for role, backend in roles.items():
        row[f"{role}_first_s"] = result.get("first_s", {}).get(backend)
        row[f"{role}_peak_mb"] = result.get("memory_mb", {}).get(backend, {}).get("peak")
    return row | ratios(row)


def ratios(row: dict[str, Any]) -> dict[str, Any]:
    main = "host_us" if "ours_host_us" in row or "peer_host_us" in row else "ms"
    found = {
        "over_eager": ratio(row.get(f"eager_{main}"), row.get(f"ours_{main}")),
        "over_peer": ratio(row.get(f"peer_{main}"), row.get(f"ours_{main}")),
        "device_over_peer": ratio(row.get("peer_device_ms"), row.get("ours_device_ms")),
        "of_copy": ratio(row.get("copy_device_ms"), row.get("ours_device_ms")),
        "peer_of_copy": ratio(row.get("copy_device_ms"), row.get("peer_device_ms")),
        "cold_share": ratio(row["ours_first_s"], row["peer_first_s"]),
    }
    if row["bytes"] and row.get("ours_device_ms"):
        found["tb_s"] = row["bytes"] / row["ours_device_ms"] / 1e9
        found["copy_tb_s"] = row["bytes"] / row["copy_device_ms"] / 1e9
    return found


def line(row: dict[str, Any], kind: str) -> str:
    main = "host_us" if kind == "overhead" else "ms"

    def cell(key: str, width: int, places: int) -> str:
        value = row.get(key)
        return f"{value:>{width}.{places}f}" if value is not None else " " * width

    places = 1 if kind == "overhead" else 4
    text = f"{row['name']:<22}"
    text += "".join(cell(f"{who}_{main}", 9, places) for who in ("eager", "peer", "ours"))
    text += cell("over_peer", 7, 2) + cell("peer_device_ms", 9, 4) + cell("ours_device_ms", 9, 4)
    text += cell("device_over_peer", 7, 2) + cell("tb_s", 6, 2) + cell("of_copy", 8, 2)
    text += cell("peer_peak_mb", 8, 0) + cell("ours_peak_mb", 8, 0)
    text += cell("peer_first_s", 6, 1) + cell("ours_first_s", 6, 1)
    failures = [f"\n    ! {who}: {why[:230]}" for who, why in row["failures"].items()]
    return text + "".join(failures)


def summary(group: str, rows: Sequence[dict[str, Any]]) -> str:
    """Means, what is missed of what is asked, and the compile times of both."""
    means = {k: geometric_mean(r.get(k) for r in rows) for k in ("over_eager", "over_peer")}
    means["device_over_peer"] = geometric_mean(r.get("device_over_peer") for r in rows)
    shown = ", ".join(f"{k} {v:.2f}x" for k, v in means.items() if v)
    both = [r for r in rows if r.get("ours_first_s") and r.get("peer_first_s")]
    cold = [sum(r[f"{who}_first_s"] for r in both) for who in ("peer", "ours")]
    copies = [r["copy_tb_s"] for r in rows if r.get("copy_tb_s")]
    missed = [text for row in rows for text in misses(group, row)]
    return "\n".join(
        [
            f"{group}: {len(rows)} cases, geometric means: {shown}",
            f"{group}: first calls {cold[0]:.1f} s the peer, {cold[1]:.1f} s ours"
            + (f"; copy at most {max(copies):.2f} TB/s" if copies else ""),
            f"{group}: missed {len(missed)}: " + "; ".join(missed)[:2500],
            "",
        ]
    )


def misses(group: str, row: dict[str, Any]) -> list[str]:
    """Targets that the case missed."""
    name = row["name"]
    if row["failures"] or row.get("over_peer") is None:
        return [f"{name} failed" if row["status"] != "not reached" else f"{name} not reached"]
    if group == "models":
        wanted = [("over_peer", MODEL_LEAST), ("over_eager", 1.0)]
    else:
        target = TARGETS[name]
        wanted = [("over_peer", target.over_peer)]
        wanted += [("of_copy", target.of_copy)] if row["bytes"] else []
    found = [f"{name} {k} {row[k]:.2f} < {least}" for k, least in wanted if row[k] < least]
    peaks = (row.get("ours_peak_mb"), row.get("peer_peak_mb"))
    if group == "models" and all(peaks) and peaks[0] > peaks[1]:
        found.append(f"{name} peak {peaks[0]:.0f} MB > {peaks[1]:.0f}")
    return found


def save(folder: Path, document: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
