"""Figures of the wide benchmark: ratios of every row, what was asked for, a table and a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.report import OURS, PEER, TICKS, Row, geometric_mean, pyplot, ratio

Results = Mapping[str, Mapping[str, Any]]
LEAST_MEAN = {"cpu": 1.10, "cuda": 1.15}
NEAR, LEAST = 0.97, 0.9
MOST_BEHIND = 0.05  # the share of rows that may be below NEAR
MOST_OVER_EAGER, MOST_OVER_PEAK = 1.03, 1.02
NUM_NAMED = 12  # rows that a missed target names


def figures(name: str, result: Mapping[str, Any]) -> Row:
    """One row's times, ratios and peaks, flat."""
    library, architecture, size, task = name.split("/")

    def median(who: str) -> float | None:
        return result.get("ms", {}).get(who, {}).get("median")

    def best(who: str) -> float | None:
        return result.get("ms", {}).get(who, {}).get("best")

    def of(key: str, who: str) -> float | None:
        return result.get(key, {}).get(who)

    return {
        "name": name,
        "library": library,
        "architecture": architecture,
        "size": size,
        "task": task,
        "status": result["status"],
        "message": result.get("message", ""),
        "eager_ms": median("eager"),
        "peer_ms": median(PEER),
        "ours_ms": median(OURS),
        "over_peer": ratio(median(PEER), median(OURS)),
        "over_eager": ratio(median("eager"), median(OURS)),
        "best_over_peer": ratio(best(PEER), best(OURS)),
        "cores_of_others": result.get("cores_of_others"),
        "eager_peak_mb": of("peak_mb", "eager"),
        "peer_peak_mb": of("peak_mb", PEER),
        "ours_peak_mb": of("peak_mb", OURS),
        "peak_over_peer": ratio(of("peak_mb", OURS), of("peak_mb", PEER)),
        "peer_first_s": of("first_s", PEER),
        "ours_first_s": of("first_s", OURS),
        "peer_failure": result.get("failures", {}).get(PEER, ""),
        "commit": result.get("commit", ""),
    }


def worst_first(results: Results) -> list[Row]:
    """Rows without a ratio (failed, or skipped) before all others."""
    rows = [figures(name, result) for name, result in results.items()]
    return sorted(rows, key=lambda row: (row["over_peer"] or 0.0, row["name"]))


@dataclass(frozen=True, slots=True)
class Target:
    """A thing that was asked for, what was measured, and the rows that stand against it."""

    what: str
    found: str
    is_met: bool
    rows: tuple[str, ...] = ()

    def __str__(self) -> str:
        named = ", ".join(self.rows[:NUM_NAMED])
        more = f" and {len(self.rows) - NUM_NAMED} more" if len(self.rows) > NUM_NAMED else ""
        verdict = "met" if self.is_met else "MISSED"
        return f"{verdict}: {self.what}: {self.found}" + (f" ({named}{more})" if named else "")


def targets(rows: Sequence[Row], device: str) -> list[Target]:
    compared = [r for r in rows if r["over_peer"]]
    mean = geometric_mean(r["over_peer"] for r in compared) or 0.0
    near = [shown(r, "over_peer") for r in compared if r["over_peer"] < NEAR]
    share = len(near) / max(1, len(compared))
    far = [shown(r, "over_peer") for r in compared if r["over_peer"] < LEAST]
    slow = [shown(r, "over_eager") for r in rows if is_slower_than_eager(r)]
    peaks = [
        shown(r, "peak_over_peer") for r in rows if (r["peak_over_peer"] or 0) > MOST_OVER_PEAK
    ]
    wrong = [f"{r['name']} {r['status']}" for r in rows if r["status"] not in ("pass", "skip")]
    least = LEAST_MEAN[device]
    return [
        Target(f"geometric mean at least {least:.2f}x the peer", f"{mean:.3f}x", mean >= least),
        Target(
            f"at most {MOST_BEHIND:.0%} of rows below {NEAR}x",
            f"{len(near)} of {len(compared)}, {share:.0%}",
            share <= MOST_BEHIND,
        ),
        Target(f"none below {LEAST}x", str(len(far)), not far, tuple(far)),
        Target("none slower than eager by over 3 %", str(len(slow)), not slow, tuple(slow)),
        Target("no peak above the peer's by over 2 %", str(len(peaks)), not peaks, tuple(peaks)),
        Target("all right", f"{len(wrong)} are not", not wrong, tuple(wrong)),
    ]


def shown(row: Row, key: str) -> str:
    return f"{row['name']} {row[key]:.2f}x"


def is_slower_than_eager(row: Row) -> bool:
    return bool(row["over_eager"]) and row["over_eager"] * MOST_OVER_EAGER < 1


def summary(rows: Sequence[Row], device: str) -> list[str]:
    """Means of everything and of each group, then each target."""
    counts = Counter(row["status"] for row in rows)
    states = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    lines = [f"{len(rows)} rows ({states})"]
    groups = sorted({(r["library"], r["size"], r["task"]) for r in rows})
    for group in [None, *groups]:
        mine = [r for r in rows if group in (None, (r["library"], r["size"], r["task"]))]
        keys = ("over_peer", "best_over_peer", "over_eager")
        peer, best, eager = (geometric_mean(r[k] for r in mine) for k in keys)
        title = " ".join(group) if group else "all"
        if peer and best and eager:
            ratios = f"{peer:.3f}x the peer ({best:.3f}x by best rounds), {eager:.3f}x eager"
            lines.append(f"{title} ({len(mine)}): {ratios}")
    both = [r for r in rows if r["peer_first_s"] and r["ours_first_s"]]
    if both:
        peer_s, ours_s = (sum(r[f"{who}_first_s"] for r in both) for who in ("peer", "ours"))
        lines.append(f"first calls: {peer_s:.0f} s the peer, {ours_s:.0f} s ours")
    return [*lines, *map(str, targets(rows, device))]


def table_of(rows: Sequence[Row], title: str) -> Table:
    """Medians; `best` is the ratio of the best rounds, which other processes spoil least, and
    `others` the number of cores that those kept busy while the row was timed."""
    view = Table(title=title)
    times = ("eager ms", "peer ms", "ours ms")
    ratios = ("over eager", "over peer", "best")
    heads = ("row", *times, *ratios, "others", "peak MB", "of peer's", "first s", "peer's")
    for i, head in enumerate(heads):
        view.add_column(head, justify="right" if i else "left", no_wrap=i == 0)
    for row in rows:
        view.add_row(*cells(row))
        if row["status"] != "pass":
            view.add_row(f"  [red]{row['status']}: {row['message'][:100]}[/]")
        if row["peer_failure"]:
            view.add_row(f"  the peer: {row['peer_failure'][:100]}")
    return view


def cells(row: Row) -> list[str]:
    def number(key: str, places: int) -> str:
        return f"{row[key]:.{places}f}" if row[key] is not None else ""

    def factor(key: str, is_good: bool) -> str:
        return f"[{'green' if is_good else 'red'}]{row[key]:.2f}x[/]" if row[key] else ""

    return [
        row["name"],
        *(number(key, 3) for key in ("eager_ms", "peer_ms", "ours_ms")),
        factor("over_eager", not is_slower_than_eager(row)),
        factor("over_peer", (row["over_peer"] or 0) >= NEAR),
        factor("best_over_peer", (row["best_over_peer"] or 0) >= NEAR),
        number("cores_of_others", 2),
        number("ours_peak_mb", 1),
        factor("peak_over_peer", (row["peak_over_peer"] or 0) <= MOST_OVER_PEAK),
        number("ours_first_s", 1),
        number("peer_first_s", 1),
    ]


COLOURS = {"timm": "#2a6f97", "transformers": "#c77d0a", "diffusers": "#4f772d"}


def draw(path: Path, rows: Sequence[Row], title: str) -> None:
    """Speed over the peer's, a dot a row, sorted; eager beside it."""
    plt = pyplot()
    known = sorted((r for r in rows if r["over_peer"]), key=lambda row: float(row["over_peer"]))
    if plt is None or not known:
        return
    figure, axes = plt.subplots(figsize=(9, 0.17 * len(known) + 1.5), layout="constrained")
    places = range(len(known))
    eager = [ratio(r["peer_ms"], r["eager_ms"]) for r in known]
    axes.axvline(1.0, color="#a4243b", linewidth=1, label="TorchInductor")
    axes.scatter(eager, places, s=12, color="#c9ccd1", label="eager")
    for library, colour in COLOURS.items():
        mine = [i for i, row in enumerate(known) if row["library"] == library]
        values = [known[i]["over_peer"] for i in mine]
        axes.scatter(values, mine, s=18, color=colour, label=f"Perfuse, {library}")
    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    ticks = [t for t in TICKS if low <= t <= high]
    axes.set_xticks(ticks, [f"{t:g}x" for t in ticks], fontsize=7)
    axes.set_xticks([], minor=True)
    axes.set_yticks(list(places), [short_name(r) for r in known], fontsize=6)
    axes.set_ylim(len(known) - 0.5, -0.5)
    axes.grid(axis="x", linewidth=0.3)
    axes.set_xlabel("speed relative to TorchInductor (log scale), worst first")
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=7)
    # Without a date and with fixed ids: the same results give the same file.
    with plt.rc_context({"svg.hashsalt": "wide", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def short_name(row: Row) -> str:
    return f"{row['architecture']} {row['size']} {row['task']}"
