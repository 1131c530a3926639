"""Loads that run across the lanes: each tile is transposed once, then read along them."""

from __future__ import annotations

from perfuse.codegen.cpp.emit import Value
from perfuse.codegen.cpp.frame import CppFrame
from perfuse.codegen.cpp.shape import TILE_COLUMNS, TILE_ROWS
from perfuse.codegen.writer import Writer
from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom, Indirect
from perfuse.ir.expr import Expr


class Tiles:
    """The transposed loads of a kernel, each with a small buffer per thread."""

    def __init__(self, frame: CppFrame) -> None:
        self.frame = frame
        self.loads: dict[Expr, str] = {}
        tile, lane = frame.shape.tile_axis, frame.shape.lane
        if tile is None or tile.atom is None or lane is None:
            return
        made = {m.loop.out for m in frame.kernel.members}
        for member in frame.kernel.members:
            for read in member.loop.reads():
                along = ix.coefficient_of(read.index, tile.atom)
                across = ix.coefficient_of(read.index, lane)
                if read.args or along != 1 or across in (0, 1, None) or read.buffer in made:
                    continue
                if any(isinstance(atom, Indirect) for atom in ix.atoms_of(read.index)):
                    continue  # where it reads is data
                self.loads.setdefault(read, f"tile{len(self.loads)}")

    def declare(self, w: Writer) -> None:
        for read, tile in self.loads.items():
            kind = self.frame.names.storage(read.buffer)
            w.line(f"alignas(64) {kind} {tile}[{TILE_ROWS * TILE_COLUMNS}];")

    def turn(self, w: Writer) -> None:
        """Fill the tiles of the item at hand."""
        if not self.loads:
            return
        frame = self.frame
        axis, lane_axis = frame.shape.tile_axis, frame.shape.lane_axis
        assert axis is not None and lane_axis is not None and lane_axis.atom is not None
        left = f"int64_t({frame.dim(lane_axis.size)}) - first"
        w.line(f"const int wide = (int)({left} < {TILE_COLUMNS} ? {left} : {TILE_COLUMNS});")
        for read, tile in self.loads.items():
            buffer, index = read.attr
            pointer, kind = frame.names.argument(buffer), frame.names.storage(buffer)
            step = ix.coefficient_of(index, lane_axis.atom)
            assert step is not None
            source = f"{pointer} + {ix.render(index, self._at_corner)}, {frame.dim(step)}"
            target = f"{tile}, {TILE_COLUMNS}, wide, (int)(bottom - top)"
            w.line(f"pf::transpose_tile<{kind}>({source}, {target});")

    def _at_corner(self, atom: Atom) -> str:
        """Index atoms at the first element of the tile."""
        shape = self.frame.shape
        if shape.tile_axis is not None and atom is shape.tile_axis.atom:
            return "top"
        return "first" if atom is shape.lane else self.frame.names.atom(atom)

    def read(self, load: Expr) -> Value | None:
        tile = self.loads.get(load)
        if tile is None:
            return None
        axis, lane_axis = self.frame.shape.tile_axis, self.frame.shape.lane_axis
        assert axis is not None and lane_axis is not None
        kind = self.frame.names.storage(load.buffer)
        at = f"({axis.name} - top) * {TILE_COLUMNS} + {lane_axis.name} - first"
        return Value(f"pf::loadv<{kind}>({tile} + {at})", load.dtype, True)
