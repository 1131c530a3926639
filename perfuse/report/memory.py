"""The memory of a training capture: what is saved, what is recomputed, and a plot over time."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from perfuse.budget.simulate import simulate
from perfuse.context import Context
from perfuse.errors import PerfuseError
from perfuse.graph.partition import Cut
from perfuse.graph.saving.costs import num_bytes, num_flops
from perfuse.schedule.timeline import Timeline
from perfuse.sizes import spell_bytes
from perfuse.torch_compat.graphs import GraphKind, source_line
from perfuse.torch_compat.records import module_path

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 76  # of the sparkline: a terminal's 80 columns, indented
KINDS = ("results", "saved", "gradients", "temporaries", "workspace")


@dataclass(frozen=True, slots=True)
class ValueRow:
    """A value of the forward: the bytes to save it, and the flops to compute it."""

    name: str
    what: str
    num_bytes: int
    num_flops: int
    origin: str
    module: str

    @staticmethod
    def of(node: Node) -> "ValueRow":
        value: Any = node.meta.get("val")
        shape = f" {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
        is_input = node.op == "placeholder"
        what = "input" if is_input else str(node.target)
        return ValueRow(
            node.name,
            what + shape,
            0 if is_input else num_bytes(node),  # owned by the caller
            0 if is_input else num_flops(node),
            source_line(node),
            module_path(node),
        )


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """One training capture: saved and recomputed values, and its memory turn by turn."""

    saved: tuple[ValueRow, ...]  # the largest first
    recomputed: tuple[ValueRow, ...]  # the most expensive first; views left out
    timeline: Timeline
    budget: str  # as it was set, "" without one

    @staticmethod
    def of(cut: Cut, context: Context) -> "TrainingReport":
        saved = sorted(map(ValueRow.of, cut.saved), key=lambda row: (-row.num_bytes, row.name))
        again = [ValueRow.of(node) for node in cut.recomputed]
        again.sort(key=lambda row: (-row.num_flops, row.name))
        budget = context.settings.memory_budget
        return TrainingReport(
            tuple(saved),
            tuple(row for row in again if row.num_flops),
            simulate(cut, context),
            "" if budget is None else str(budget),
        )

    @property
    def recomputed_flops(self) -> int:
        return sum(row.num_flops for row in self.recomputed)

    @property
    def peak(self) -> int:
        return self.timeline.peak

    def sparkline(self) -> str:
        """Memory over time in one line, forward and backward separated by a bar."""
        parts = []
        for half in (GraphKind.FORWARD, GraphKind.BACKWARD):
            totals = [m.total for m in self.timeline.moments if m.half == half]
            parts.append("".join(_bar(total, self.peak) for total in _shortened(totals)))
        return "|".join(parts)

    def peak_text(self) -> str:
        """The peak, the budget it had to meet, and when it is reached."""
        moment = self.timeline.peak_moment
        where = f", in the {moment.half} at {moment.label}" if moment is not None else ""
        limit = f" (memory_budget {self.budget})" if self.budget else ""
        return f"peak {spell_bytes(self.peak)}{limit}{where}"

    def headline(self) -> str:
        return (
            f"{self.peak_text()}; "
            f"saved {spell_bytes(self.timeline.saved_bytes)}; "
            f"recomputed {self.recomputed_flops:,} flops"
        )


def _bar(value: int, most: int) -> str:
    return BARS[min(len(BARS) * value // max(most, 1), len(BARS) - 1)]


def _shortened(totals: Sequence[int]) -> list[int]:
    """At most half a line of columns, each the largest of the values it represents."""
    step = -(-len(totals) // ((WIDTH - 1) // 2)) or 1
    return [max(totals[i : i + step]) for i in range(0, len(totals), step)]


def draw(reports: Sequence[TrainingReport], path: str | Path) -> Path:
    """Plot memory over time as a PNG, one plot per training capture."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(
        len(reports), 1, figsize=(10, 4 * len(reports)), squeeze=False, layout="constrained"
    )
    for number, report in enumerate(reports):
        _draw_one(axes[number][0], report)
    made = Path(path)
    figure.savefig(made, dpi=120)
    pyplot.close(figure)
    return made


def _draw_one(axis: Any, report: TrainingReport) -> None:
    moments = report.timeline.moments
    series = [[getattr(m, kind) / 2**20 for m in moments] for kind in KINDS]
    axis.stackplot(range(len(moments)), series, labels=KINDS, step="mid")
    num_forward = sum(m.half is GraphKind.FORWARD for m in moments)
    axis.axvline(num_forward - 0.5, color="black", linestyle=":")
    axis.axhline(report.peak / 2**20, color="red", linewidth=0.8)
    axis.set_xlabel("turn: forward, then backward")
    axis.set_ylabel("MiB")
    axis.set_title(report.headline(), fontsize=9)
    axis.legend(loc="upper left", fontsize=8)


def _pyplot() -> Any:
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise PerfuseError(
            "plots need matplotlib, which is not installed",
            hint="pip install 'perfuse[bench]'; the text report does not need it.",
        ) from error
