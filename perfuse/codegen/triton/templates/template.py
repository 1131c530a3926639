"""`Template`: one way to compute a contraction on a GPU, as a choice that tuning searches."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from perfuse.decision import FUSED, Choice
from perfuse.schedule.tile import Tile, TileKind

SOURCE = "triton"

POINTERS = "pointers"  # blocks read by address: any strides
PERSISTENT = "persistent"  # blocks read by tensor maps, a program loops over tiles
MAPPED = "mapped"  # blocks read by tensor maps, one tile per program
PING_PONG = "ping-pong"  # two groups of warps take turns: one multiplies while one stores
COOPERATIVE = "cooperative"  # two groups of warps share a tile, each with half of its rows
SPECIALISED = (PING_PONG, COOPERATIVE)  # one more warp loads, by tensor maps
GROUPS = 2  # of warps that multiply
GROUP_WARPS = 4  # that issue one instruction for a matmul together
VECTOR = "vector"  # one row: sums of products, without matrix units


@dataclass(frozen=True, slots=True)
class Template:
    """A kind of kernel and the sizes of its blocks: rows x columns of the result, depth a step."""

    kind: str
    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    splits: int = 1  # programs that share the depth of one tile
    programs: int = 0  # of a persistent kernel
    parts: int = 1  # column parts in which a tile is stored
    is_swapped: bool = False  # computes the transposed tile, for results of few rows
    precision: str = ""  # of float32 products: ieee, tf32, tf32x3, bf16x6

    def __str__(self) -> str:
        split = f" / {self.splits}" if self.splits > 1 else ""
        swapped = " swapped" if self.is_swapped else ""
        precision = f" {self.precision}" if self.precision else ""
        size = f"{self.rows}x{self.columns}x{self.depth}"
        shape = f"{self.num_warps} warps, {self.num_stages} stages"
        return f"{self.kind}{swapped}{precision} {size}{split}, {shape}"

    @property
    def choice(self) -> Choice:
        return Choice(SOURCE, str(self), tuple(asdict(self).items()))

    @staticmethod
    def of(choice: Choice) -> Template:
        """The template of a choice; TypeError if its options are those of another version."""
        options: dict[str, Any] = dict(choice.options)
        options.pop(FUSED, None)
        return Template(**options)

    @property
    def tile(self) -> Tile:
        """The block that an epilogue is computed for."""
        rows = self.rows // 2 if self.kind == COOPERATIVE else self.rows
        warps = GROUP_WARPS if self.kind in SPECIALISED else self.num_warps
        return Tile(TileKind.TEMPLATE, rows, self.columns // self.parts, warps, self.num_stages)
