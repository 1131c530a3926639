"""`Tile`: how a kernel is cut into blocks on a GPU, where that is decided before its code is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TileKind(StrEnum):
    """The form of a kernel's blocks, and with it the function that writes the kernel."""

    FLAT = "flat"  # consecutive elements
    GROUPED = "grouped"  # consecutive elements, neighbours along the last axis kept together
    STACKED = "stacked"  # consecutive elements, for several steps of the first axis
    TRANSPOSED, SCATTER, SCAN = "transposed", "scatter", "scan"
    ROWS, COLUMNS = "rows", "columns"
    SPLIT = "split"  # several blocks share a row
    JOIN = "join"  # reduces what the blocks of another kernel left
    BATCH, TEMPLATE, ATTENTION = "batch", "template", "attention"


@dataclass(frozen=True, slots=True)
class Tile:
    """One way to cut a kernel: a point of the space that tuning searches."""

    kind: TileKind
    rows: int  # rows of a block
    columns: int  # columns of a block; elements of a flat one
    num_warps: int
    num_stages: int = 1
    is_swept: bool = False  # rows are longer than a block
    programs: int | None = None  # persistent blocks; None: one block per piece of work
    splits: int = 1  # blocks that share one row, or one column
    streams: bool = True  # large buffers read once are the first that caches evict

    def __str__(self) -> str:
        swept = " swept" if self.is_swept else ""
        shared = f" / {self.splits}" if self.splits > 1 else ""
        rounds = f", {self.programs} programs" if self.programs else ""
        stages = f", {self.num_stages} stages" if self.num_stages > 1 else ""
        cached = "" if self.streams else ", cached"
        size = f"{self.rows}x{self.columns}{shared}"
        return f"{self.kind}{swept} {size}, {self.num_warps} warps{stages}{rounds}{cached}"
