"""`Explanation`: the result of compiling a call, first as one screen, then stage by stage."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, ConsoleOptions
from rich.text import Text

from perfuse.errors import PerfuseError, UnknownOption
from perfuse.precision.conversion import Conversion
from perfuse.report.memory import TrainingReport, draw
from perfuse.report.rows import CallRow as CallRow
from perfuse.report.rows import GraphReport as GraphReport
from perfuse.report.rows import KernelRow as KernelRow
from perfuse.report.screen import screen
from perfuse.report.stages import STAGES
from perfuse.report.tables import html_page, stage_text
from perfuse.torch_compat.records import DynamoEvents


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """The result of compiling a call: `print` it, or query its fields and stages."""

    graphs: tuple[GraphReport, ...]
    counters: dict[str, int]
    seconds: float  # the whole first call, capture included
    training: tuple[TrainingReport, ...] = ()  # each capture that has a backward
    events: DynamoEvents = field(default_factory=DynamoEvents)  # graph breaks, recompiles
    layers: Conversion | None = None  # linear layers in FP8 and others, where a recipe was given

    @property
    def sources(self) -> list[str]:
        """Every generated source: for each graph its kernels, then the host program."""
        return [text for graph in self.graphs for text in graph.sources]

    @property
    def num_kernels(self) -> int:
        return sum(len(graph.kernels) for graph in self.graphs)

    def __str__(self) -> str:
        return "\n".join(line.text for line in screen(self))

    __repr__ = __str__

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for line in screen(self):
            yield Text(line.text, style="bold" if line.is_title else "", no_wrap=True)

    def stage(self, name: str, graph: int | None = None) -> str:
        """The text of one stage, for every graph or for the one with this number.

        The compiler's artefacts are "graph", "program", "plan", "sources" and "host"; "kernels",
        "calls", "refusals", "memory", "times" and "counters" are tables.
        """
        if name not in STAGES:
            raise UnknownOption(name, STAGES, what="stage")
        if graph is not None and not 0 <= graph < len(self.graphs):
            raise PerfuseError(
                f"there is no graph {graph}", hint=f"give a number from 0 to {len(self.graphs) - 1}"
            )
        return stage_text(self, name, graph)

    def to_png(self, path: str | Path) -> Path:
        """Plot memory over time, for each capture that has a backward."""
        if not self.training:
            raise PerfuseError("there is no memory to plot: the function has no backward")
        return draw(self.training, path)

    def to_html(self, path: str | Path) -> Path:
        """Write the explanation as one HTML page."""
        made = Path(path)
        made.write_text(html_page(self))
        return made
