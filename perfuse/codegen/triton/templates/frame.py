"""`ContractionFrame`: tiles in order, addresses of operands, and the epilogue of a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from perfuse.codegen.emitter import Formula, Value
from perfuse.codegen.triton.emit import COLUMNS, ROWS, Block, Dialect, Emitter, Scope
from perfuse.codegen.triton.frame import TritonFrame
from perfuse.codegen.triton.sources import TensorMap
from perfuse.codegen.triton.spelling import NARROW_TYPE
from perfuse.codegen.triton.templates.template import Template
from perfuse.codegen.triton.tiling import num_blocks
from perfuse.codegen.writer import Writer
from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.program import Buffer, Matmul, View
from perfuse.schedule.contract import depth_of, result_load, result_value, sizes_of
from perfuse.schedule.plan import Kernel, Member
from perfuse.schedule.turns import Scratch

GROUP = 8  # tiles of rows that run side by side, so that they share columns in the cache
BOTH = ROWS | COLUMNS

# Products of eight-bit floats that matrix units may sum in fewer bits where the caller asks for
# sums in float32: after as many, sums are added up there.
FEW_PRODUCTS = 128

ACCUMULATOR = {DType.F32: "tl.float32", DType.I32: "tl.int32", DType.F64: "tl.float64"}


class ContractionFrame(TritonFrame):
    """One kernel with a contraction being written."""

    def __init__(
        self, kernel: Kernel, buffers: Mapping[str, Buffer], template: Template, dialect: Dialect
    ) -> None:
        assert kernel.contraction is not None
        super().__init__(kernel, buffers, template.tile, dialect)
        self.template = template
        self.matmuls = kernel.contraction.matmuls
        *self.batch, self.height, self.width = sizes_of(self.matmuls[0])
        self.results: dict[str, Value] = {}  # of matmuls, for the block being written
        self.passed_maps: dict[str, TensorMap] = {}  # tensor maps of the host, by parameter
        self.maps: dict[str, str] = {}  # results that are stored by a tensor map, and its name

    # -- tiles -----------------------------------------------------------------------------

    @property
    def down(self) -> Dim:
        """Tiles along the rows of a matrix."""
        return num_blocks(self.height, self.template.rows)

    @property
    def across(self) -> Dim:
        """Tiles along the columns."""
        return num_blocks(self.width, self.template.columns)

    @property
    def tiles(self) -> Dim:
        """Tiles of all matrices of a batch."""
        return ix.product([*self.batch, self.down, self.across])

    def place_tile(self, w: Writer, number: str) -> None:
        """The tile of a number: groups of rows of tiles, each group column by column."""
        if self.batch:
            each = self.dim(ix.mul(self.down, self.across))
            w.line(f"batch = {number} // ({each})")
            w.line(f"number = {number} % ({each})")
            number = "number"
        if self.down == 1 or self.across == 1:
            is_row = self.down == 1
            w.line(f"tile_row = {f'{number} * 0' if is_row else number}")
            w.line(f"tile_column = {number if is_row else f'{number} * 0'}")
            return
        group = self.dim(ix.mul(self.across, GROUP))
        w.line(f"group = {number} // ({group})")
        w.line(f"group_rows = tl.minimum({self.dim(self.down)} - group * {GROUP}, {GROUP})")
        w.line(f"tile_row = group * {GROUP} + {number} % ({group}) % group_rows")
        w.line(f"tile_column = {number} % ({group}) // group_rows")

    def wide(self, position: str) -> str:
        """A position in as many bits as the largest index needs."""
        return f"tl.cast({position}, tl.int64)" if self.is_wide else position

    def coordinate(self, position: str) -> str:
        """A position for a tensor map, which takes 32 bits; sizes of the call have 64."""
        return f"tl.cast({position}, tl.int32)" if self.is_wide else position

    # -- operands --------------------------------------------------------------------------

    def lanes(self, w: Writer, name: str, first: str, count: int, size: Dim, stride: Dim) -> None:
        """Positions of a block along rows or columns of an operand, the last ones inside of it."""
        text = f"{self.wide(first)} + tl.arange(0, {count})"
        if not (isinstance(size, int) and size % count == 0):
            w.line(f"{name} = {text}")
            text = f"tl.where({name} < {self.dim(size)}, {name}, 0)"
            if stride == 1:
                # Otherwise each element is read by itself. What is read past the end is not used.
                text = f"tl.max_contiguous(tl.multiple_of({text}, {count}), {count})"
        w.line(f"{name} = {text}")

    def base(self, view: View) -> str:
        """The address of the matrix of an operand that belongs to this tile."""
        pointer, offset = self.names.argument(view.buffer), self.dim(view.offset)
        parts = [pointer] + ([f"({offset})"] if view.offset != 0 else [])
        if self.batch and view.shape[0] != 1:
            parts.append(f"{self.wide('batch')} * ({self.dim(view.strides[0])})")
        return " + ".join(parts)

    def scaled(self, position: str, stride: Dim) -> str:
        return position if stride == 1 else f"{position} * ({self.dim(stride)})"

    def widened(self, matmul: Matmul, view: View) -> str:
        """The conversion of an operand that is narrower than the other; nothing if it is not."""
        own = self.buffers[view.buffer].dtype
        if self.names.is_bits(own):
            return f".to({NARROW_TYPE[own]}, bitcast=True)"
        kinds = [self.buffers[v.buffer].dtype for v in (matmul.operands.a, matmul.operands.b)]
        wide = max(kinds, key=lambda dtype: dtype.num_bytes)
        is_narrow = own.num_bytes < wide.num_bytes
        # Through float32: Triton's interpreter converts nothing else to half precision.
        return f".to(tl.float32).to({NARROW_TYPE[wide]})" if is_narrow else ""

    def dot(self, left: str, right: str, accumulator: str) -> str:
        kinds = {self.buffers[m.operands.a.buffer].dtype for m in self.matmuls}
        # By default, Triton rounds float32 to fewer bits.
        precision = self.template.precision or ("ieee" if DType.F32 in kinds else "")
        option = f", input_precision='{precision}'" if precision else ""
        if any(k.is_float8 for k in kinds) and not all(m.has_fast_sums for m in self.matmuls):
            # Matrix units sum such products in fewer bits, unless each few are added up in float32.
            option += f", max_num_imprecise_acc={min(FEW_PRODUCTS, self.template.depth)}"
        kind = ACCUMULATOR[self.matmuls[0].accumulate]
        return f"tl.dot({left}, {right}, {accumulator}{option}, out_dtype={kind})"

    def depth(self, matmul: Matmul) -> Dim:
        return depth_of(matmul)

    # -- the epilogue ----------------------------------------------------------------------

    def find(
        self, load: Expr, reader: Member, results: dict[str, Value]
    ) -> Value | Formula[Value] | None:
        """Results of matmuls are in registers."""
        if load.buffer in self.results:
            return self.results[load.buffer]
        return self.read_ahead(load) or super().find(load, reader, results)

    def read_ahead(self, load: Expr) -> Value | None:
        """The block of a load that was read before the epilogue; None: it has to be read."""
        return None

    def finish(self, w: Writer, accumulators: Sequence[str], part: int = 0) -> None:
        """Compute and store everything the kernel derives from one block of accumulators."""
        masks: dict[int, str] = {}
        start = f"tile_column * {self.template.columns} + {part} * C" if part else (
            f"tile_column * {self.template.columns}"
        )  # fmt: skip
        self.place_block(w, start)
        self.mask_end(w, masks, "in_rows", "row", self.height, self.template.rows)
        self.mask_end(w, masks, "in_columns", "column", self.width, self.template.columns)
        batch = self.wide("batch")
        position = f"{batch} * ({self.dim(self.height)}) + row" if self.batch else "row"
        self.place_axes(w, self.rows, position)
        self.place_axes(w, self.columns, "column")
        self.first_column = start
        self._members(Scope(w, self.atoms(self.kernel.axes), None), self.block(masks), accumulators)

    def place_block(self, w: Writer, first_column: str) -> None:
        """Positions of a block's rows and columns."""
        w.line(f"row = {self.wide('tile_row * R')} + tl.arange(0, R)[:, None]")
        w.line(f"column = {self.wide(first_column)} + tl.arange(0, C)[None, :]")

    def _members(self, scope: Scope, block: Block, accumulators: Sequence[str]) -> None:
        self.results = {}
        for matmul, name in zip(self.matmuls, accumulators, strict=True):
            self.results[matmul.out] = self._result(matmul, name, scope, block)
        made: dict[str, Value] = {}
        for m in self.kernel.members:
            if m.loop.out in self.kernel.stored:
                emitter = self.emitter(scope, block, m, made)
                made[m.loop.out] = self.stored(emitter, m, BOTH)

    def _result(self, matmul: Matmul, name: str, scope: Scope, block: Block) -> Value:
        """A matmul's result as members see it: with its bias, and rounded as in memory."""
        product = ex.load(f"{matmul.out} sum", 0, matmul.accumulate)
        held = Value(name, matmul.accumulate, BOTH)
        resolve = lambda e: held if e is product else self.read_ahead(e)  # noqa: E731
        emitter = Emitter(self.names, scope, block, resolve)
        formula = result_value(matmul, self.kernel, product, self.buffers)
        value = emitter.value(formula)
        if matmul.out in self.kernel.stored:
            load = result_load(matmul, self.kernel, self.buffers)
            self._keep(emitter, matmul.out, load.index, value, formula)
        return value

    def store(self, emitter: Emitter, member: Member, value: Value, lanes: int) -> None:
        wide = Value(value.text, value.dtype, value.lanes | lanes)
        self._keep(emitter, member.loop.out, member.loop.index, wide, self.formula_of(member))

    def _keep(self, emitter: Emitter, name: str, index: Dim, value: Value, formula: Expr) -> None:
        """Store a block of a result: by its tensor map where it has one."""
        if name not in self.maps:
            emitter.store(name, index, value, formula)
            return
        text = emitter.narrow_text(name, value, formula)
        self.store_block(emitter, name, f"tl.broadcast_to({text}, [R, C])")

    def store_block(self, emitter: Emitter, name: str, block: str) -> None:
        """Store a block of a result by its tensor map."""
        at = f"{self.coordinate('tile_row * R')}, {self.coordinate(self.first_column)}"
        emitter.line(f"{self.maps[name]}.store([{at}], {block})")

    # -- shared depth ----------------------------------------------------------------------

    def partials(self) -> tuple[list[str], str]:
        """Scratch for the sums of programs that share a tile, and for their number."""
        tiles, block = self.tiles, self.template.rows * self.template.columns
        size = ix.product([tiles, block, self.template.splits])
        sums = [
            self.need(Scratch(f"{self.kernel.name}_sums{k}", matmul.accumulate, size))
            for k, matmul in enumerate(self.matmuls)
        ]
        done = Scratch(f"{self.kernel.name}_done", DType.I32, tiles, fill=0, is_kept=True)
        return sums, self.need(done)
