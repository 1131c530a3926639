"""`AttentionFrame`: what the kernels of attention share.

Places of a program, blocks of operands, lists of blocks, and the user's functions of scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from perfuse.codegen.emitter import Value
from perfuse.codegen.triton.emit import COLUMNS, ROWS, Block, Dialect, Emitter, Resolver, Scope
from perfuse.codegen.triton.frame import KernelText, TritonFrame
from perfuse.codegen.triton.sources import SWIZZLED_BYTES, TensorMap
from perfuse.codegen.triton.spelling import NARROW_TYPE
from perfuse.codegen.triton.templates.maps import map_type
from perfuse.codegen.triton.templates.persistent import ALIGNMENT
from perfuse.codegen.triton.tiling import num_blocks
from perfuse.codegen.writer import Writer
from perfuse.ir import index as ix
from perfuse.ir.attention import SCORE, SCORE_GRADIENT, BlockList, position_atoms, score_atom
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


@dataclass(frozen=True, slots=True)
class Matrix:
    """An operand as one matrix, of which each head is some rows, or some columns."""

    rows: int
    columns: int
    stride: int
    batch_rows: int
    head_rows: int
    head_columns: int


def matrix_of(view: View) -> Matrix | None:
    """The matrix of which an operand is a part; None where its strides are not those of one."""
    dims = (*view.shape, *view.strides)
    if not all(isinstance(d, int) for d in dims):
        return None
    batch, heads, size, width, of_batch, of_head, stride, along = map(int, dims)  # type: ignore[arg-type]
    if along != 1 or stride < width or (batch > 1 and of_batch % stride):
        return None
    batch_rows = of_batch // stride if batch > 1 else 0
    rows = (batch - 1) * batch_rows + size
    if heads == 1:
        return Matrix(rows, width, stride, batch_rows, 0, 0)
    if of_head % stride == 0:
        rows += (heads - 1) * (of_head // stride)
        return Matrix(rows, width, stride, batch_rows, of_head // stride, 0)
    is_beside = width <= of_head and (heads - 1) * of_head + width <= stride
    columns = (heads - 1) * of_head + width
    return Matrix(rows, columns, stride, batch_rows, 0, of_head) if is_beside else None


class AttentionFrame(TritonFrame):
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
        self.passed_maps: dict[str, TensorMap] = {}  # of the launcher, by parameter
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
        w.line(f"{side.name}_first = {first}")
        w.line(f"{side.name}_at = {side.name}_first + tl.arange(0, {side.step})")
        if side.is_masked:
            w.line(f"{side.mask}_end = {side.name}_at < {self.count(side.size)}")
            w.line(f"{side.mask} = {side.across(f'{side.mask}_end')}")
        w.line(f"{side.name} = {side.across(f'{side.name}_at')}")

    def wide(self, position: str) -> str:
        return f"tl.cast({position}, tl.int64)" if self.is_wide else position

    def whole_text(self, rows: Side, heads: Dim) -> KernelText:
        """The function, a program for each block of rows of each head."""
        batch = self.node.sizes[0]
        text = self.text((num_blocks(rows.size, rows.step), ix.mul(batch, heads), self.tile.splits))
        maps = self.passed_maps
        passed = ((name, map_type(made, is_gluon=False)) for name, made in maps.items())
        return replace(text, parameters=(*text.parameters, *passed), maps=tuple(maps.values()))

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

    def load_block(self, view: View, head: str, side: Side, width: int) -> str:
        """The text of a block of an operand, positions by features, zero past the end."""
        found = self._mapped(view, head, side, width)
        if found is not None:
            return found
        at, mask = self._block_at(view, head, side, width), self._block_mask(view, side, width)
        return f"tl.load({at}, {mask}, other=0.0)" if mask else f"tl.load({at})"

    def _mapped(self, view: View, head: str, side: Side, width: int) -> str | None:
        """A block that is copied by a tensor map of the launcher; None where there can be none."""
        is_whole = not side.is_masked and view.shape[3] == width
        matrix = matrix_of(view) if is_whole and self.names.dialect.maps_on_host else None
        buffer = self.buffers[view.buffer]
        if matrix is None or not buffer.is_aligned or width * self.dtype.num_bytes < SWIZZLED_BYTES:
            return None
        apart = (matrix.stride, view.offset, matrix.head_columns)
        if any(not isinstance(n, int) or n * self.dtype.num_bytes % ALIGNMENT for n in apart):
            return None
        assert isinstance(view.offset, int)
        shape, block = (matrix.rows, matrix.columns), (side.step, width)
        made = TensorMap(view.buffer, view.offset, self.dtype, shape, matrix.stride, block)
        known = {each: name for name, each in self.passed_maps.items()}
        name = known.get(made, f"map{len(known)}")
        self.passed_maps[name] = made
        row = f"b * {matrix.batch_rows} + {head} * {matrix.head_rows} + {side.name}_first"
        return f"{name}.load([{row}, {head} * {matrix.head_columns}])"

    def _block_at(self, view: View, head: str, side: Side, width: int) -> str:
        """Addresses of a block of an operand: positions of a side by features of a head."""
        down, right = view.strides[2:]
        place = self.scaled(self.wide(f"{side.name}_at[:, None]"), down)
        feature = self.scaled(f"tl.arange(0, {width})[None, :]", right)
        return f"{self.base(view, head)} + {place} + {feature}"

    def scaled(self, position: str, stride: Dim) -> str:
        return position if stride == 1 else f"{position} * ({self.dim(stride)})"

    def _block_mask(self, view: View, side: Side, width: int) -> str:
        """The mask of a block of an operand; "" where all of it is inside."""
        parts = [f"{side.mask}_end[:, None]"] if side.is_masked else []
        if view.shape[3] != width:
            parts.append(f"(tl.arange(0, {width}) < {view.shape[3]})[None, :]")
        return " & ".join(parts)

    def load_numbers(self, view: View, head: str, side: Side) -> str:
        """The text of a vector with one number for each position of a side."""
        place = self.scaled(self.wide(f"{side.name}_at"), view.strides[2])
        mask = f", {side.mask}_end, other=0.0" if side.is_masked else ""
        return f"tl.load({self.base(view, head)} + {place}{mask})"

    def store_block(self, w: Writer, name: str, value: str, side: Side, head: str) -> None:
        """Store a block of a result that has a row for each position of a side."""
        view = self._result(name)
        width = padded(view.shape[3])
        at, mask = self._block_at(view, head, side, width), self._block_mask(view, side, width)
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
        # By default, Triton rounds float32 to fewer bits.
        option = ", input_precision='ieee'" if self.dtype is DType.F32 else ""
        inner = f"{left}, {right}{f', {added}' if added else ''}"
        return f"tl.dot({inner}{option})"

    # -- powers ----------------------------------------------------------------------------

    @property
    def is_late(self) -> bool:
        """Whether scores are brought to base 2 after a difference is taken: of large ones the
        product would be rounded, which halves hide."""
        return self.dtype is DType.F32

    def factor(self, *, is_scaled: bool) -> float:
        """The factor of a score, which is the product alone or scaled already, in base 2."""
        return LOG2_E if is_scaled else LOG2_E * self.node.scale

    def power(self, score: str, shift: str, factor: float = 1.0) -> str:
        """e to a score less a shift; the shift, and a score without a factor, are of base 2 unless
        differences are taken first."""
        if self.is_late:
            return f"tl.exp2(({score} - {shift}) * {LOG2_E!r})"
        return f"tl.exp2({score}{'' if factor == 1.0 else f' * {factor!r}'} - {shift})"

    # -- blocks that are computed ----------------------------------------------------------

    def loop_over(self, w: Writer, name: str, blocks: BlockList, side: Side) -> str:
        """Write the number of steps that a list of blocks takes; the text of a step's first
        position.

        Blocks of the mask are walked in steps of a block of scores, one loop for all, so that
        what a step loads is on its way while the one before computes.
        """
        others, step = self.node.blocks.others, side.step
        per_block = num_blocks(side.size if others is None else others, step)
        count = "1" if blocks.counts is None else f"tl.load({self._entry(blocks.counts)})"
        each = "" if per_block == 1 else f" * {self.count(per_block)}"
        w.line(f"{name} = {count}{each}")
        if blocks.indices is None:
            return f"step * {step}"
        w.line(f"{name}_list = {self._entry(blocks.indices)}")
        stride = blocks.indices.strides[3]
        if per_block == 1:
            return f"tl.load({name}_list + {self.scaled('step', stride)}) * {others}"
        listed = self.scaled(f"(step // {per_block})", stride)
        return f"tl.load({name}_list + {listed}) * {others} + step % {per_block} * {step}"

    def _entry(self, view: View) -> str:
        """The address of what a table has for the block of rows of a program."""
        base, rows = self.base(view, "h"), self.node.blocks.rows
        if rows is None:
            return base
        return f"{base} + {self.scaled(f'(tile * {self.tile.rows} // {rows})', view.strides[2])}"

    # -- functions of scores ---------------------------------------------------------------

    def functions(self, before: Writer, inside: Writer, rows: Side, columns: Side) -> ScoreEmitter:
        """The emitter of the user's functions in a loop over columns.

        What does not vary along the loop is computed before it.
        """
        b, h, q, k = position_atoms(self.node.sizes)
        of_side = {"q": q, "k": k}
        if self._outside is None:
            self._outside = Scope(before, b | h | of_side[rows.name], None)
        own = of_side[columns.name] | {score_atom()}
        lanes_of = dict.fromkeys(of_side[rows.name], ROWS)
        lanes_of |= dict.fromkeys(of_side[columns.name], COLUMNS)
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
        if self.node.is_masked and not is_full:
            parts.append(f"({emitter.value(self.node.mask).text})")
        return " & ".join(parts)
