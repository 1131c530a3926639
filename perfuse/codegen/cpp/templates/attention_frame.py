"""`CppAttentionFrame`: what the C++ kernels of attention share.

Operands, sizes, the lists of a block mask, and the user's functions of scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from perfuse.codegen.cpp.emit import Emitter, Resolver, Scope, Value
from perfuse.codegen.cpp.frame import CppFrame
from perfuse.codegen.cpp.kernel import KernelText, parameters_of
from perfuse.codegen.cpp.spelling import literal
from perfuse.codegen.writer import Writer
from perfuse.context import Context
from perfuse.ir.atoms import Atom
from perfuse.ir.attention import (
    SCORE,
    SCORE_GRADIENT,
    Attention,
    AttentionPart,
    BlockList,
    position_atoms,
    score_atom,
)
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.narrow import in_32_bits
from perfuse.ir.program import Buffer, View
from perfuse.schedule.plan import Kernel
from perfuse.target import Target

# Multiplications and additions that are worth a second thread, for each element of cpu.grain.
_WORK_PER_ELEMENT = 8


@dataclass(frozen=True, slots=True)
class CppAttentionTile:
    """How the templates cut attention. The side whose positions are lanes is that of the rows."""

    tile_rows: int  # of the tile of registers
    vectors: int  # the same
    rows: int  # in a block: queries, or keys where their gradients are computed
    columns: int  # of the other side in a tile
    few: int  # queries up to which keys are lanes
    keys_of_few: int = 256  # in a tile then

    @staticmethod
    def of(target: Target, size: Dim) -> CppAttentionTile:
        """The tile for a side of this size, if it is known."""
        tile, lanes = CppAttentionTile._of(target.isa), target.lanes
        if not isinstance(size, int) or size > (tile.vectors - 1) * lanes:
            return tile
        # A narrow side: fewer vectors, and more rows of registers.
        vectors = max(1, -(-size // lanes))
        return replace(tile, tile_rows=8, vectors=vectors, rows=vectors * lanes)

    @staticmethod
    def _of(isa: str) -> CppAttentionTile:
        # 24 of 32 registers are sums, or 12 of 16. On Zen 4, 8 heads of 64, 2048 keys: queries as
        # lanes take 1.2 ms up to 16 of them, keys as lanes 0.26 for 2, 0.79 for 8 (0.82, 0.28 and
        # 0.86 with AVX2).
        if isa == "avx512":
            return CppAttentionTile(6, 4, 128, 64, few=12)
        if isa == "avx2":
            return CppAttentionTile(6, 2, 128, 64, few=7)
        return CppAttentionTile(4, 1, 64, 64, few=7)


class ScoreEmitter(Emitter):
    """No input of the scores changes in the kernel: whatever can be read early is."""

    def at(self, scope: Scope, resolve: Resolver) -> ScoreEmitter:
        return ScoreEmitter(self.names, scope, self.lane, self.tail, resolve)

    def stays(self, e: Expr) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Side:
    """The queries or the keys: the name of a position, its variable if it varies, and sizes."""

    name: str
    atoms: frozenset[Atom]
    size: Dim
    block: int | None  # of the mask

    @property
    def lane(self) -> Atom | None:
        return next(iter(self.atoms), None)

    def is_whole(self, lanes: int) -> bool:
        """Whether blocks of this side are whole vectors."""
        sizes = (self.size,) if self.block is None else (self.size, self.block)
        return all(isinstance(each, int) and each % lanes == 0 for each in sizes)


# Writes what is computed of one vector of products.
Body = Callable[[ScoreEmitter, "Where"], None]
_REGISTERS = {
    SCORE: Value("scores", DType.F32, 1),
    SCORE_GRADIENT: Value("slopes", DType.F32, 1),
}


@dataclass(frozen=True, slots=True)
class Where:
    """The place of a body: inside a full block, and the variable of the live lanes of a part."""

    is_full: bool
    tail: str | None
    before: Writer
    after: Writer


def _in_32_bits(node: Attention) -> Attention:
    """The node with functions that compute with positions of 32 bits."""
    gradient = node.score_gradient
    return replace(
        node,
        score=in_32_bits(node.score),
        mask=in_32_bits(node.mask),
        score_gradient=None if gradient is None else in_32_bits(gradient),
        scatters=tuple(replace(each, value=in_32_bits(each.value)) for each in node.scatters),
    )


class CppAttentionFrame(CppFrame):
    """One kernel of attention being written."""

    def __init__(
        self, kernel: Kernel, buffers: Mapping[str, Buffer], context: Context,
        over: Mapping[str, str],
    ) -> None:  # fmt: skip
        assert kernel.attention is not None
        super().__init__(kernel, buffers, context, frozenset(), over)
        self.node: Attention = _in_32_bits(kernel.attention)
        self.scale = literal(self.node.scale, DType.F32)
        self.b, self.h, q, k = position_atoms(self.node.sizes)
        _, _, queries, keys = self.node.sizes
        blocks, is_by_key = self.node.blocks, self.node.part is AttentionPart.KEY_GRADIENT
        self.tile = CppAttentionTile.of(context.target, keys if is_by_key else queries)
        row, other = blocks.rows, blocks.others
        if blocks.is_causal:
            row, other = self.tile.rows, self.tile.columns
        self.queries = Side("q", q, queries, other if is_by_key else row)
        self.keys = Side("k", k, keys, row if is_by_key else other)
        self.rows, self.columns = self.queries, self.keys
        if is_by_key:
            self.rows, self.columns = self.keys, self.queries

    def finished(self, w: Writer) -> KernelText:
        names = self.names
        missing = [name for name in self.kernel.stored if not names.is_written(name)]
        assert not missing, f"{self.kernel.name} does not store {missing}"
        passed = (tuple(names.arguments), tuple(names.symbols), names.needs_status)
        return KernelText(parameters_of(self), w.text(), *passed)

    def tile_text(self) -> str:
        tile, heads = self.tile, (self.node.query.shape[3], self.node.value.shape[3])
        numbers = (*heads, tile.tile_rows, tile.vectors, tile.rows, tile.columns)
        return f"pf::AttentionTile<{', '.join(map(str, numbers))}>"

    # -- operands --------------------------------------------------------------------------

    def start(self, view: View) -> str:
        offset = "" if view.offset == 0 else f" + {self.dim(view.offset)}"
        return f"{self.names.argument(view.buffer)}{offset}"

    def step(self, view: View, dim: int) -> str:
        """The step along a dimension; one of size one is shared by all places."""
        return f"int64_t({0 if view.shape[dim] == 1 else self.dim(view.strides[dim])})"

    def operand(self, w: Writer, name: str, view: View) -> None:
        steps = ", ".join(self.step(view, dim) for dim in range(4))
        kind = f"pf::Operand<{self.names.storage(view.buffer)}>"
        w.line(f"const {kind} {name} = {{{self.start(view)}, {steps}}};")

    def target_of(self, name: str) -> str:
        """The pointer to a result; null if it is unused."""
        return self.names.target(name) if name in self.kernel.stored else "nullptr"

    def steps_of(self, name: str) -> list[str]:
        """The steps of a result from batch to batch, head to head and row to row."""
        return [self.whole(stride) for stride in self.buffers[name].strides[:3]]

    def sizes(self, w: Writer) -> None:
        """The sizes, and the number of threads that they are worth."""
        node = self.node
        batch, heads, queries, keys = (self.whole(size) for size in node.sizes)
        # A size that is known when it runs may be zero; a block has something.
        blocks = [
            f"pf::high({self.whole(side.size)}, int64_t(1))"
            if side.block is None
            else str(side.block)
            for side in (self.rows, self.columns)
        ]
        numbers = (batch, heads, self.whole(node.groups), queries, keys, *blocks)
        w.line(f"const pf::AttentionSizes sizes = {{{', '.join(numbers)}}};")
        inner, outer = node.query.shape[3], node.value.shape[3]
        work = f"{batch} * {heads} * {queries} * {keys} * ({inner} + {outer})"
        least = self.settings.cpu.grain_elements * _WORK_PER_ELEMENT
        w.line(f"if ({work} < {least}) threads = 1;")

    def whole(self, size: Dim) -> str:
        return f"int64_t({self.dim(size)})"

    # -- the block mask --------------------------------------------------------------------

    def lists(self, w: Writer) -> None:
        """The number of blocks that a block of rows has, and the first position of each."""
        mask = self.node.blocks
        if mask.is_causal:
            is_by_key = "true" if self.rows is self.keys else "false"
            w.line(f"const pf::CausalBlocks count = {{sizes, {is_by_key}}}, place = count;")
            return
        given, kind = "int64_t b, int64_t h, int64_t row", "PF_INLINED -> int64_t {"
        with w.block(f"const auto count = [=]({given}, bool is_full) {kind}", "};"):
            full = "0" if mask.full is None else self._listed(mask.full.counts, "1")
            w.line(f"if (is_full) return {full};")
            w.line(f"return {self._listed(mask.partial.counts, '1')};")
        with w.block(f"const auto place = [=]({given}, int64_t n, bool is_full) {kind}", "};"):
            if mask.full is not None:
                w.line(f"if (is_full) return {self._first(mask.full)};")
            w.line(f"return {self._first(mask.partial)};")

    def _first(self, blocks: BlockList) -> str:
        listed = self._listed(blocks.indices, "0")
        return listed if blocks.indices is None else f"{listed} * {self.node.blocks.others}"

    def _listed(self, view: View | None, known: str) -> str:
        """The entry of a table for a block of rows, or the number known without one."""
        if view is None:
            return known
        places = ("b", "h", "row", "n")[: len(view.shape)]
        at = " + ".join(f"{place} * {self.step(view, i)}" for i, place in enumerate(places))
        kind = self.names.storage(view.buffer)
        return f"int64_t(pf::load1<{kind}>({self.start(view)} + {at}))"

    # -- functions of scores ---------------------------------------------------------------

    def full_or_not(self, w: Writer, write: Callable[[bool], None]) -> None:
        """Write the case of a full block, if it differs, and that of one the mask decides."""
        blocks = self.node.blocks
        if not self.node.is_masked or (blocks.full is None and not blocks.is_causal):
            write(False)
            return
        with w.block("if (is_full) {"):
            write(True)
        with w.block("else {"):
            write(False)

    def by_rows(self, w: Writer, body: Body, *, is_full: bool) -> None:
        """A vector of rows and one column after another: lanes are rows."""
        rows, columns = self.rows, self.columns
        for condition, tail in (("if (live == pf::lanes)", None), ("else", "live")):
            if tail and rows.is_whole(self.lanes):
                break
            with w.block(f"{condition} {{"):
                before, loop, after = w.child(), w.child(), w.child()
                outside = Scope(before, self.b | self.h | rows.atoms, None)
                inside = Scope(loop, columns.atoms | {score_atom()}, outside)
                with loop.block("for (int64_t n = 0; n < columns; ++n) {"):
                    loop.line(f"const int64_t {columns.name} = first + n;")
                    loop.line(f"const int64_t at = n * {self.tile.vectors} * pf::lanes;")
                    emitter = ScoreEmitter(self.names, inside, rows.lane, tail, _REGISTERS.get)
                    body(emitter, Where(is_full, tail, before, after))
                for piece in (before, loop, after):
                    w.take(piece)

    def by_columns(self, w: Writer, body: Body, *, is_full: bool) -> None:
        """One row and a vector of columns after another: lanes are columns."""
        rows, columns = self.rows, self.columns
        before, loops, after = w.child(), w.child(), w.child()
        outside = Scope(before, self.b | self.h | rows.atoms, None)
        loops.line("int64_t at = 0;")
        for opening, tail in (
            ("for (; at + pf::lanes <= columns; at += pf::lanes) {", None),
            ("if (at < columns) {", "live"),
        ):
            if tail and columns.is_whole(self.lanes):
                break
            with loops.block(opening):
                loops.line(f"const int64_t {columns.name} = first + at;")
                if tail:
                    loops.line(f"const int {tail} = (int)(columns - at);")
                inside = Scope(loops, columns.atoms | {score_atom()}, outside)
                emitter = ScoreEmitter(self.names, inside, columns.lane, tail, _REGISTERS.get)
                body(emitter, Where(is_full, tail, before, after))
        for piece in (before, loops, after):
            w.take(piece)

    def score(self, emitter: ScoreEmitter) -> str:
        """The score of products that are in `scores`."""
        node = self.node
        return "scores" if node.score is SCORE else emitter.value(node.score).vector

    def kept(self, emitter: ScoreEmitter, *, is_full: bool) -> str:
        """Which scores count; "" where all do."""
        if is_full or not self.node.is_masked:
            return ""
        return emitter.value(self.node.mask).vector
