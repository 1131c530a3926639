"""Contractions whose operands are read by address: any strides, sizes and dtypes."""

from __future__ import annotations

from collections.abc import Sequence

from perfuse.codegen.triton.frame import KernelText
from perfuse.codegen.triton.templates.frame import ACCUMULATOR, ContractionFrame
from perfuse.codegen.triton.templates.template import VECTOR
from perfuse.codegen.triton.tiling import num_blocks
from perfuse.codegen.writer import Writer
from perfuse.ir import index as ix
from perfuse.ir.index import Dim
from perfuse.ir.program import Matmul, View

Phase = tuple[int, ...]  # numbers of matmuls that share their first operand, and so one loop


def pointers_text(frame: ContractionFrame) -> KernelText:
    """One tile per program, or a share of its depth."""
    w, template = frame.w, frame.template
    w.line("tile = tl.program_id(0)")
    if template.splits > 1:
        w.line("split = tl.program_id(1)")
    frame.place_tile(w, "tile")
    for number, phase in enumerate(phases(frame.matmuls)):
        _Loop(frame, number, phase).write(w)
    accumulators = [f"acc{k}" for k in range(len(frame.matmuls))]
    if template.splits == 1:
        frame.finish(w, accumulators)
    else:
        join(frame, w, accumulators)
    return frame.text((frame.tiles, template.splits, 1))


def phases(matmuls: Sequence[Matmul]) -> list[Phase]:
    """Matmuls with one first operand run in one loop, the others one after another."""
    found: dict[View, list[int]] = {}
    for number, matmul in enumerate(matmuls):
        found.setdefault(matmul.operands.a, []).append(number)
    return [tuple(numbers) for numbers in found.values()]


class _Loop:
    """The loop over the depth of the matmuls of a phase."""

    def __init__(self, frame: ContractionFrame, number: int, phase: Phase) -> None:
        self.frame, self.template, self.phase = frame, frame.template, phase
        self.a = frame.matmuls[phase[0]].operands.a
        self.size: Dim = frame.depth(frame.matmuls[phase[0]])
        self.own = str(number)
        self.is_vector = self.template.kind == VECTOR
        self.is_swapped = self.template.is_swapped
        step = self.template.depth * self.template.splits
        self.is_masked = not (isinstance(self.size, int) and self.size % step == 0)

    def write(self, w: Writer) -> None:
        template, frame = self.template, self.frame
        self._bounds(w)
        self._addresses(w)
        shape = f"[{template.depth}, C]" if self.is_vector else self._shape("R", "C")
        for k in self.phase:
            kind = ACCUMULATOR[frame.matmuls[k].accumulate]
            w.line(f"acc{k} = tl.zeros({shape}, {kind})")
        with w.indented(
            f"for step in tl.range(first{self.own}, last{self.own}, {template.depth}):"
        ):
            self._body(w)
        for k in self.phase:
            if self.is_vector:
                w.line(f"acc{k} = tl.sum(acc{k}, 0)[None, :]")
            elif self.is_swapped:
                w.line(f"acc{k} = tl.trans(acc{k})")

    def _bounds(self, w: Writer) -> None:
        frame, template = self.frame, self.template
        size, own = frame.dim(self.size), self.own
        if template.splits == 1:
            w.line(f"first{own} = 0")
            w.line(f"last{own} = {size}")
            return
        steps = num_blocks(num_blocks(self.size, template.depth), template.splits)
        share = frame.dim(ix.mul(steps, template.depth))
        w.line(f"first{own} = split * ({share})")
        w.line(f"last{own} = tl.minimum({size}, first{own} + ({share}))")

    def _addresses(self, w: Writer) -> None:
        frame, own = self.frame, self.own
        depth = self.template.depth
        (down, along), rows = self.a.strides[-2:], self.a.shape[-2]
        start = "" if self.template.splits == 1 else f" + first{own}"
        w.line(f"k{own} = {frame.wide(f'tl.arange(0, {depth}){start}')}")
        if not self.is_vector:
            frame.lanes(w, f"a_row{own}", "tile_row * R", self.template.rows, rows, down)
            outer = f"a_row{own}{self._across('R')}"
            inner = f"k{own}{self._across('K')}"
            at = f"({frame.scaled(outer, down)} + {frame.scaled(inner, along)})"
        else:
            at = f"({frame.scaled(f'k{own}', along)})"
        w.line(f"a_at{own} = {frame.base(self.a)} + {at}")
        for k in self.phase:
            b = frame.matmuls[k].operands.b
            (down, along), columns = b.strides[-2:], b.shape[-1]
            first = f"tile_column * {self.template.columns}"
            frame.lanes(w, f"b_column{k}", first, self.template.columns, columns, along)
            inner, outer = f"k{own}{self._along('K')}", f"b_column{k}{self._along('C')}"
            at = f"({frame.scaled(inner, down)} + {frame.scaled(outer, along)})"
            w.line(f"b_at{k} = {frame.base(b)} + {at}")

    def _body(self, w: Writer) -> None:
        frame, own, depth = self.frame, self.own, self.template.depth
        inside = f"tl.arange(0, {depth}) < last{own} - step"
        if self.is_masked:
            w.line(f"inside = {inside}")
        a_mask = "" if self.is_vector else self._across("K")
        first = frame.matmuls[self.phase[0]]
        w.line(f"a = {self._load(f'a_at{own}', a_mask)}{frame.widened(first, first.operands.a)}")
        for k in self.phase:
            right = frame.widened(frame.matmuls[k], frame.matmuls[k].operands.b)
            w.line(f"b = {self._load(f'b_at{k}', self._along('K'))}{right}")
            if self.is_vector:
                kind = ACCUMULATOR[frame.matmuls[k].accumulate]
                wide = f"tl.broadcast_to(a.to({kind})[:, None], [{depth}, C])"
                w.line(f"acc{k} = tl.fma({wide}, b.to({kind}), acc{k})")
            elif self.is_swapped:
                w.line(f"acc{k} = {frame.dot('b', 'a', f'acc{k}')}")
            else:
                w.line(f"acc{k} = {frame.dot('a', 'b', f'acc{k}')}")
            stride = frame.matmuls[k].operands.b.strides[-2]
            w.line(f"b_at{k} += {frame.dim(ix.mul(stride, depth))}")
        w.line(f"a_at{own} += {frame.dim(ix.mul(self.a.strides[-1], depth))}")

    def _load(self, address: str, lanes: str) -> str:
        if not self.is_masked:
            return f"tl.load({address})"
        return f"tl.load({address}, inside{lanes}, other=0)"

    # Blocks of `a` are [rows, depth] and of `b` [depth, columns]; swapped, they are transposed.

    def _shape(self, rows: str, columns: str) -> str:
        return f"[{columns}, {rows}]" if self.is_swapped else f"[{rows}, {columns}]"

    def _across(self, axis: str) -> str:
        """How a vector along rows (R) or depth (K) stands in a block of `a`."""
        return "[:, None]" if (axis == "R") != self.is_swapped else "[None, :]"

    def _along(self, axis: str) -> str:
        """How a vector along depth (K) or columns (C) stands in a block of `b`."""
        return "[:, None]" if (axis == "K") != self.is_swapped else "[None, :]"


def join(frame: ContractionFrame, w: Writer, accumulators: Sequence[str]) -> None:
    """The program that finishes a tile last adds all partial sums, always in the same order."""
    sums, done = frame.partials()
    block = "tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]"
    tiles, splits = frame.dim(frame.tiles), frame.template.splits
    w.line(f"within = {block}")
    for name, place in zip(accumulators, sums, strict=True):
        w.line(f"tl.store({place} + (split * ({tiles}) + tile) * (R * C) + within, {name})")
    with w.indented(f"if pf_last_block({done} + tile, {splits}):"):
        for k, (name, place) in enumerate(zip(accumulators, sums, strict=True)):
            kind = ACCUMULATOR[frame.matmuls[k].accumulate]
            w.line(f"{name} = tl.zeros([R, C], {kind})")
            with w.indented(f"for other in range({splits}):"):
                at = f"{place} + (other * ({tiles}) + tile) * (R * C) + within"
                w.line(f"{name} += tl.load({at}, volatile=True)")
        frame.finish(w, accumulators)
        w.line(f"tl.store({done} + tile, 0)")
