"""`AttentionFrame`: what the kernels of attention share.

Places of a program, blocks of operands, lists of blocks, and the user's functions of scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perfuse.codegen.emitter import Value
from perfuse.codegen.triton.emit import COLUMNS, ROWS, Block, Dialect, Emitter, Resolver, Scope
from perfuse.codegen.triton.frame import Frame
from perfuse.codegen.triton.spelling import NARROW_TYPE
from perfuse.codegen.triton.tiling import num_blocks
from perfuse.codegen.writer import Writer
from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom
from perfuse.ir.attention import SCORE, SCORE_GRADIENT, BlockList, score_atom, score_position
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.program import Buffer, View
from perfuse.schedule.plan import Kernel
from perfuse.schedule.tile import Tile

LOG2_E = 1.4426950408889634
SMALLEST = 16  # rows, columns and depth of what matrix units multiply


def padded(size: Dim) -> int:
    """The size of a block that holds a whole head."""
    assert isinstance(size, int)
    return max(SMALLEST, 1 << (size - 1).bit_length())


class ScoreEmitter(Emitter):
    """Positions of scores have 32 bits: int64 for each of them would take twice the time."""

    def at(self, scope: Scope, resolve: Resolver) -> ScoreEmitter:
        return ScoreEmitter(self.names, scope, self.block, resolve)

    def position(self, e: Expr) -> Value:
        lanes = self.block.lanes(e.variables())
        if not e.variables():
            return super().position(e)
        return Value(self.index(e.attr), e.dtype, lanes)


@dataclass(frozen=True, slots=True)
class Side:
    """The queries or the keys of a block of scores."""

    name: str  # q or k, the variable in the user's functions
    size: Dim
    step: int  # of them in a block of scores
    lanes: int  # ROWS or COLUMNS of that block

    @property
    def mask(self) -> str:
        return f"in_{self.name}"

    @property
    def is_masked(self) -> bool:
        """Whether the last block has positions past the end."""
        return not (isinstance(self.size, int) and self.size % self.step == 0)

    def across(self, text: str) -> str:
        """A vector along this side, as the block of scores has it."""
        return f"{text}[:, None]" if self.lanes == ROWS else f"{text}[None, :]"


class AttentionFrame(Frame):
    """One kernel of attention being written; rows of its blocks are queries, or keys."""

    def __init__(
        self, kernel: Kernel, buffers: Mapping[str, Buffer], tile: Tile, dialect: Dialect
    ) -> None:
        assert kernel.attention is not None
        super().__init__(kernel, buffers, tile, dialect)
        self.node = kernel.attention
        self.dtype = buffers[self.node.query.buffer].dtype
        self.names.is_rounded = self.dtype is DType.F32 and not dialect.approximates
        self.inner, self.outer = padded(self.node.query.shape[3]), padded(self.node.value.shape[3])
        self._outside: Scope | None = None  # where functions compute what varies in no loop

    # -- places ----------------------------------------------------------------------------

    def place_program(self, w: Writer, rows: Side, heads: Dim) -> None:
        """The batch, the head and the block of rows of a program."""
        w.line("tile = tl.program_id(0)")
        w.line(f"b = tl.program_id(1) // {self.count(heads)}")
        w.line(f"head = tl.program_id(1) % {self.count(heads)}")
        self.place(w, rows, f"tile * {rows.step}")

    def count(self, size: Dim) -> str:
        """A size in 32 bits, as positions are."""
        return str(size) if isinstance(size, int) else f"tl.cast({self.dim(size)}, tl.int32)"

    def place(self, w: Writer, side: Side, first: str) -> None:
        """The positions of a block of queries or keys, and which of them are inside."""
        w.line(f"{side.name}_at = {first} + tl.arange(0, {side.step})")
        if side.is_masked:
            w.line(f"{side.mask}_end = {side.name}_at < {self.count(side.size)}")
            w.line(f"{side.mask} = {side.across(f'{side.mask}_end')}")
        w.line(f"{side.name} = {side.across(f'{side.name}_at')}")

    def wide(self, position: str) -> str:
        return f"tl.cast({position}, tl.int64)" if self.is_wide else position

    def grid(self, rows: Side, heads: Dim) -> tuple[Dim, Dim, Dim]:
        return num_blocks(rows.size, rows.step), ix.mul(self.node.sizes[0], heads), 1

    # -- operands --------------------------------------------------------------------------

    def base(self, view: View, head: str) -> str:
        """The address of what a view has of one batch and head."""
        parts = [self.names.argument(view.buffer)]
        if view.offset != 0:
            parts.append(f"({self.dim(view.offset)})")
        for size, stride, place in zip(view.shape, view.strides, ("b", head), strict=False):
            if size != 1 and stride != 0:
                parts.append(f"{self.wide(place)} * ({self.dim(stride)})")
        return " + ".join(parts)

    def block_at(self, base: str, view: View, side: Side, width: int) -> str:
        """Addresses of a block of an operand: positions of a side by features of a head."""
        down, right = view.strides[2:]
        place = self.scaled(self.wide(f"{side.name}_at[:, None]"), down)
        return f"{base} + {place} + {self.scaled(f'tl.arange(0, {width})[None, :]', right)}"

    def scaled(self, position: str, stride: Dim) -> str:
        return position if stride == 1 else f"{position} * ({self.dim(stride)})"

    def block_mask(self, view: View, side: Side, width: int) -> str:
        """The mask of a block of an operand; "" where all of it is inside."""
        parts = [f"{side.mask}_end[:, None]"] if side.is_masked else []
        if view.shape[3] != width:
            parts.append(f"(tl.arange(0, {width}) < {view.shape[3]})[None, :]")
        return " & ".join(parts)

    def load_block(self, base: str, view: View, side: Side, width: int) -> str:
        """The text of a block of an operand, zero past the end."""
        at, mask = self.block_at(base, view, side, width), self.block_mask(view, side, width)
        return f"tl.load({at}, {mask}, other=0.0)" if mask else f"tl.load({at})"

    def load_numbers(self, view: View, head: str, side: Side) -> str:
        """The text of a vector with one number for each position of a side."""
        place = self.scaled(self.wide(f"{side.name}_at"), view.strides[2])
        mask = f", {side.mask}_end, other=0.0" if side.is_masked else ""
        return f"tl.load({self.base(view, head)} + {place}{mask})"

    def store_block(self, w: Writer, name: str, value: str, side: Side, head: str) -> None:
        """Store a block of a result that has a row for each position of a side."""
        view = self._result(name)
        width = padded(view.shape[3])
        at = self.block_at(self.base(view, head), view, side, width)
        mask = self.block_mask(view, side, width)
        w.line(f"tl.store({at}, {self.narrow(value)}{f', {mask}' if mask else ''})")

    def _result(self, name: str) -> View:
        buffer = self.buffers[name]
        return View(name, buffer.shape, buffer.strides)

    def store_numbers(self, w: Writer, name: str, value: str, side: Side, head: str) -> None:
        view = self._result(name)
        place = self.scaled(self.wide(f"{side.name}_at"), view.strides[2])
        mask = f", {side.mask}_end" if side.is_masked else ""
        w.line(f"tl.store({self.base(view, head)} + {place}, {value}{mask})")

    def narrow(self, value: str) -> str:
        """A block of float32 in the dtype of the operands."""
        if self.dtype is DType.F32:
            return value
        if self.dtype is DType.BF16 and not self.names.dialect.rounds_bf16:
            value = f"pf_round_bf16({value})"
        return f"{value}.to({NARROW_TYPE[self.dtype]})"

    def dot(self, left: str, right: str, added: str = "") -> str:
        # Left to itself, Triton rounds float32 to fewer bits.
        option = ", input_precision='ieee'" if self.dtype is DType.F32 else ""
        inner = f"{left}, {right}{f', {added}' if added else ''}"
        return f"tl.dot({inner}{option})"

    # -- blocks that are computed ----------------------------------------------------------

    def loop_over(
        self, w: Writer, name: str, blocks: BlockList, rows: str, side: Side, head: str
    ) -> str:
        """Write how many steps a list of blocks takes; the text of the first position of one.

        Blocks of the mask are walked in steps of a block of scores, one loop for all, so that
        what a step loads is on its way while the one before computes.
        """
        others = self.node.blocks.others
        is_one = blocks.indices.shape[3] == 1
        at = self.scaled(f"({rows})", blocks.counts.strides[2])
        place = "" if blocks.counts.shape[2] == 1 else f" + {at}"
        w.line(f"{name} = tl.load({self.base(blocks.counts, head)}{place})")
        if is_one:
            per = self.count(num_blocks(self._smaller(side.size, others), side.step))
            w.line(f"{name} = {name} * ({per})")
            return f"step * {side.step}"
        per_block = others // side.step
        at = self.scaled(f"({rows})", blocks.indices.strides[2])
        place = "" if blocks.indices.shape[2] == 1 else f" + {at}"
        w.line(f"{name}_list = {self.base(blocks.indices, head)}{place}")
        if per_block == 1:
            listed = self.scaled("step", blocks.indices.strides[3])
            return f"tl.load({name}_list + {listed}) * {others}"
        w.line(f"{name} = {name} * {per_block}")
        listed = self.scaled(f"(step // {per_block})", blocks.indices.strides[3])
        return f"tl.load({name}_list + {listed}) * {others} + step % {per_block} * {side.step}"

    def _smaller(self, size: Dim, block: int) -> Dim:
        return min(size, block) if isinstance(size, int) else size

    # -- functions of scores ---------------------------------------------------------------

    def functions(
        self, before: Writer, inside: Writer, rows: Side, columns: Side
    ) -> ScoreEmitter:
        """The emitter of the user's functions in a loop over columns.

        What does not vary along the loop is computed before it.
        """
        batch, heads, queries, keys = self.node.sizes
        b, h, q, k = score_position((batch, heads, queries, keys))
        of_side = {"q": q, "k": k}
        if self._outside is None:
            self._outside = Scope(before, _atoms((b, h, of_side[rows.name])), None)
        own = _atoms((of_side[columns.name],)) | {score_atom()}
        lanes_of = dict.fromkeys(_atoms((of_side[rows.name],)), ROWS)
        lanes_of |= dict.fromkeys(_atoms((of_side[columns.name],)), COLUMNS)
        masks = {side.lanes: side.mask for side in (rows, columns) if side.is_masked}
        zeros = {
            ROWS: f"tl.zeros([{rows.step}, 1], tl.int32)",
            COLUMNS: f"tl.zeros([1, {columns.step}], tl.int32)",
            ROWS | COLUMNS: f"tl.zeros([{rows.step}, {columns.step}], tl.int32)",
        }
        values = {
            SCORE: Value("scores", DType.F32, ROWS | COLUMNS),
            SCORE_GRADIENT: Value("slopes", DType.F32, ROWS | COLUMNS),
        }
        scope = Scope(inside, own, self._outside)
        return ScoreEmitter(self.names, scope, Block(lanes_of, masks, zeros), values.get)

    def in_block(self, value: Value, rows: Side, columns: Side) -> str:
        """A value as a whole block: it may not vary along both sides."""
        if value.lanes == ROWS | COLUMNS:
            return value.text
        return f"tl.broadcast_to({value.text}, [{rows.step}, {columns.step}])"

    def kept(self, emitter: ScoreEmitter, sides: Sequence[Side], *, is_full: bool) -> str:
        """Which scores of a block count; "" where all do."""
        parts = [side.mask for side in sides if side.is_masked]
        mask = self.node.mask
        if not is_full and not (mask.op == "const" and mask.attr):
            parts.append(f"({emitter.value(mask).text})")
        return " & ".join(parts)


def _atoms(places: Sequence[Dim]) -> frozenset[Atom]:
    found = (ix.as_atom(place) for place in places)
    return frozenset(atom for atom in found if atom is not None)
