"""Results as a table to read, a CSV and JSON to keep, and a chart."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
PEER, OURS = "inductor", "perfuse"
TITLES = {PEER: "TorchInductor", OURS: "Perfuse"}


def run_row(name: str, runs: Sequence[Row]) -> Row:
    """One case's figures: medians over its processes, of ratios taken inside each of them."""

    def figure(key: str) -> float | None:
        return median(run["times_ms"].get(key, {}).get("median") for run in runs)

    def over(above: str, below: str, which: str = "median") -> float | None:
        times = [run["times_ms"] for run in runs]
        return median(
            ratio(t[above][which], t[below][which]) for t in times if above in t and below in t
        )

    return {
        "name": name,
        "eager_ms": figure("eager"),
        "peer_ms": figure(PEER),
        "ours_ms": figure(OURS),
        "over_eager": over("eager", OURS),
        "over_peer": over(PEER, OURS),
        "best_over_peer": over(PEER, OURS, "best"),
        "of_copy": over("copy", OURS),
        "peer_of_copy": over("copy", PEER),
        "of_memory": median(map(share_of_memory, runs)),
        "memory_gb_s": median(run.get("memory_gb_s") for run in runs),
        "runs": [run["times_ms"] for run in runs],
        "failures": "; ".join(
            sorted({f"{TITLES.get(k, k)}: {v}" for run in runs for k, v in run["failures"].items()})
        ),
    }


def share_of_memory(run: Row) -> float | None:
    """The bandwidth of ours over that of a copy no cache can hold."""
    if not run.get("memory_gb_s") or OURS not in run["times_ms"]:
        return None
    gb_s = run["bytes"] / run["times_ms"][OURS]["median"] / 1e6
    return float(gb_s / run["memory_gb_s"])


def median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def geometric_mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else None


def run_table(title: str, rows: Sequence[Row], unit: str = "ms") -> Table:
    view = Table(title=title)
    contestants = (f"{name} {unit}" for name in ("eager", "TorchInductor", "Perfuse"))
    heads = ("", *contestants, "over eager", "over peer", "best", "of copy", "of memory")
    scale = {"ms": 1.0, "us": 1e3}[unit]
    for i, head in enumerate(heads):
        view.add_column(head, justify="right" if i else "left")
    for row in rows:
        view.add_row(*run_cells(row, scale))
        if row["failures"]:
            view.add_row(f"  [red]{row['failures'][:120]}[/]")
    view.add_section()
    keys = ("over_eager", "over_peer", "best_over_peer")
    means = {key: geometric_mean(r[key] for r in rows) for key in keys}
    view.add_row(*run_cells({"name": "geometric mean", **means}))
    return view


def run_cells(row: Row, scale: float = 1.0) -> list[str]:
    def times(key: str) -> str:
        return f"{row[key] * scale:.2f}" if row.get(key) else ""

    def factor(key: str) -> str:
        value = row.get(key)
        colour = "green" if value and value >= 1 else "red"
        return f"[{colour}]{value:.2f}x[/]" if value else ""

    def share(key: str) -> str:
        return f"{row[key]:.0%}" if row.get(key) else ""

    return [
        row["name"],
        *(times(k) for k in ("eager_ms", "peer_ms", "ours_ms")),
        factor("over_eager"),
        factor("over_peer"),
        factor("best_over_peer"),
        share("of_copy"),
        share("of_memory"),
    ]


def compile_table(rows: Sequence[Row]) -> Table:
    view = Table(title="first call, seconds (imports left out)")
    view.add_column("")
    for heat in ("cold", "warm"):
        for name in ("TorchInductor", "Perfuse", "peer over ours"):
            view.add_column(f"{heat} {name}", justify="right")
    view.add_column("kernels", justify="right")
    total: Row = {"name": "sum"}
    keys = [f"{heat}_{who}" for heat in ("cold", "warm") for who in ("peer", "ours")]
    # A case that failed on one side counts on neither.
    complete = [r for r in rows if all(r[key] is not None for key in keys)]
    for key in keys:
        total[key] = sum(r[key] for r in complete)
    for row in (*rows, total):
        if row is total:
            view.add_section()
        view.add_row(*compile_cells(row))
    return view


def compile_cells(row: Row) -> list[str]:
    cells = [row["name"]]
    for heat in ("cold", "warm"):
        peer, ours = row[f"{heat}_peer"], row[f"{heat}_ours"]
        faster = ratio(peer, ours)
        cells += [f"{s:.2f}" if s is not None else "failed" for s in (peer, ours)]
        cells.append(f"{faster:.2f}x" if faster else "")
    counts = (row.get("kernels_peer"), row.get("kernels_ours"))
    return [*cells, " / ".join("?" if c is None else str(c) for c in counts)]


def save(folder: Path, document: Row, tables: Sequence[Table]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    for name in ("kernels", "models", "compile_time", "overhead", "memory", "partition"):
        if document.get(name):
            write_csv(folder / f"{name}.csv", document[name])
    with (folder / "tables.txt").open("w") as file:
        console = Console(file=file, width=120)
        console.print("\n".join(f"{k}: {v}" for k, v in document["machine"].items()), markup=False)
        for table in tables:
            console.print(table)
    draw_chart(folder / "chart.png", document)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="") as file:
        flat = [name for name, value in rows[0].items() if not isinstance(value, list)]
        writer = csv.DictWriter(file, fieldnames=flat, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


# Ratios worth a mark on the axis, whatever the range of the results.
TICKS = (0.125, 0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 2, 3, 4, 6, 8, 12, 16)


def pyplot() -> Any:
    """Charts without a display; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        print("no chart: matplotlib is not installed here")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as found

    return found


def draw_chart(path: Path, document: Row) -> None:
    """Speed relative to the peer, a bar a case; the peer is the line at 1."""
    plt = pyplot()
    if plt is None:
        return

    rows = [r for kind in ("kernels", "models") for r in document.get(kind, []) if r["peer_ms"]]
    if not rows:
        return
    figure, axes = plt.subplots(figsize=(9, 0.28 * len(rows) + 1.5))
    places = range(len(rows))
    eager = [ratio(r["peer_ms"], r["eager_ms"]) or 0 for r in rows]
    ours = [r["over_peer"] or 0 for r in rows]
    axes.barh([p - 0.2 for p in places], ours, height=0.4, label="Perfuse", color="#2a6f97")
    axes.barh([p + 0.2 for p in places], eager, height=0.4, label="eager", color="#c9ccd1")
    axes.axvline(1.0, color="#a4243b", linewidth=1, label="TorchInductor")
    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    ticks = [t for t in TICKS if low <= t <= high]
    axes.set_xticks(ticks, [f"{t:g}x" for t in ticks], fontsize=8)
    axes.set_xticks([], minor=True)
    axes.set_yticks(list(places), [r["name"] for r in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("speed relative to TorchInductor (log scale)")
    machine = document["machine"]
    axes.set_title(f"{machine['cpu']}, torch {machine['torch']}", fontsize=9)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
