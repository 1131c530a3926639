"""Attention as one C++ function: a call of `attention.h`, with the user's functions in lambdas.

The template multiplies; a lambda makes scores of the products of a vector of queries and some keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perfuse.codegen.cpp.emit import Emitter, Resolver, Scope, Value
from perfuse.codegen.cpp.frame import CppFrame
from perfuse.codegen.cpp.kernel import KernelText, parameters_of
from perfuse.codegen.cpp.spelling import literal
from perfuse.codegen.writer import Writer
from perfuse.context import Context
from perfuse.ir.atoms import Atom
from perfuse.ir.attention import SCORE, Attention, BlockList, position_atoms, score_atom
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.program import Buffer, View
from perfuse.schedule.plan import Kernel

# Multiplications and additions that are worth a second thread, for each element of cpu.grain.
_WORK_PER_ELEMENT = 8


@dataclass(frozen=True, slots=True)
class CppAttentionTile:
    """How the template cuts attention."""

    rows: int  # of the tile of registers
    vectors: int  # the same
    queries: int  # in a block
    keys: int  # in a tile
    few: int  # queries up to which keys are lanes
    keys_of_few: int = 256  # in a tile then

    @staticmethod
    def of(isa: str) -> CppAttentionTile:
        # 24 of 32 registers are sums, or 12 of 16.
        if isa == "avx512":
            return CppAttentionTile(6, 4, 128, 64, few=4)
        if isa == "avx2":
            return CppAttentionTile(6, 2, 128, 64, few=3)
        return CppAttentionTile(4, 1, 64, 64, few=3)


@dataclass(frozen=True, slots=True)
class _Lanes:
    """The variable that lanes run along, if it varies, and the number of live ones in a part."""

    atom: Atom | None
    tail: str | None

    @staticmethod
    def of(atoms: frozenset[Atom], tail: str | None) -> _Lanes:
        return _Lanes(next(iter(atoms), None), tail)


_SCORES = {SCORE: Value("scores", DType.F32, 1)}


class ScoreEmitter(Emitter):
    """Nothing that scores are computed of changes in the kernel: what can be read early, is."""

    def at(self, scope: Scope, resolve: Resolver) -> ScoreEmitter:
        return ScoreEmitter(self.names, scope, self.lane, self.tail, resolve)

    def stays(self, e: Expr) -> bool:
        return False


def generate_attention(
    kernel: Kernel, buffers: Mapping[str, Buffer], context: Context, over: Mapping[str, str]
) -> KernelText:
    """Write the forward of attention."""
    return _Forward(CppFrame(kernel, buffers, context, frozenset(), over)).text()


class _Forward:
    def __init__(self, frame: CppFrame) -> None:
        assert frame.kernel.attention is not None
        self.frame = frame
        self.node: Attention = frame.kernel.attention
        self.tile = CppAttentionTile.of(frame.target.isa)
        # A score that is only scaled is scaled while it is exponentiated.
        self.is_plain = self.node.score is SCORE and self.node.scale > 0
        self.scale = literal(self.node.scale, DType.F32)

    def text(self) -> KernelText:
        frame, node, w = self.frame, self.node, Writer(1)
        for name, view in (("query", node.query), ("key", node.key), ("value", node.value)):
            self._operand(w, name, view)
        self._results(w)
        self._sizes(w)
        self._lists(w)
        few = self._has_few()
        if few is None:
            with w.block(f"if (sizes.queries <= {self.tile.few} && sizes.queries <= sizes.row_block) {{"):
                self._few(w)
                w.line("return;")
        if few:
            self._few(w)
        else:
            self._many(w)
        names = frame.names
        assert all(names.is_written(name) for name in frame.kernel.stored)
        passed = (tuple(names.arguments), tuple(names.symbols), names.needs_status)
        return KernelText(parameters_of(frame), w.text(), *passed)

    def _has_few(self) -> bool | None:
        """Whether there are so few queries that keys are lanes; None: that shows when it runs."""
        queries, rows = self.node.sizes[2], self.node.blocks.rows
        if isinstance(queries, int):
            return queries <= self.tile.few and (rows is None or queries <= rows)
        return None

    def _many(self, w: Writer) -> None:
        tile = self.tile
        self._scores(w, is_row=False)
        self._call(w, "attention", "Tile", (tile.rows, tile.vectors, tile.queries, tile.keys))

    def _few(self, w: Writer) -> None:
        self._scores(w, is_row=True)
        self._call(w, "attention_few", "Few", (self.tile.few, self.tile.keys_of_few))

    def _call(self, w: Writer, function: str, kind: str, numbers: tuple[int, ...]) -> None:
        heads = (self.node.query.shape[3], self.node.value.shape[3])
        tile = f"pf::Attention{kind}<{', '.join(map(str, (*heads, *numbers)))}>"
        factor = self.scale if self.is_plain else "1.0f"
        given = f"query, key, value, results, sizes, {factor}, threads, count, place, score"
        w.line(f"pf::{function}<{tile}>({given});")

    # -- operands --------------------------------------------------------------------------

    def _start(self, view: View) -> str:
        offset = "" if view.offset == 0 else f" + {self.frame.dim(view.offset)}"
        return f"{self.frame.names.argument(view.buffer)}{offset}"

    def _step(self, view: View, dim: int) -> str:
        """The step along a dimension; one of size one is shared by all places."""
        return f"int64_t({0 if view.shape[dim] == 1 else self.frame.dim(view.strides[dim])})"

    def _operand(self, w: Writer, name: str, view: View) -> None:
        steps = ", ".join(self._step(view, dim) for dim in range(4))
        kind = f"pf::Operand<{self.frame.names.storage(view.buffer)}>"
        w.line(f"const {kind} {name} = {{{self._start(view)}, {steps}}};")

    def _results(self, w: Writer) -> None:
        frame, stored = self.frame, self.frame.kernel.stored
        out, *numbers = self.node.results
        buffer = frame.buffers[out]
        steps = [f"int64_t({frame.dim(stride)})" for stride in buffer.strides[:3]]
        kind = f"pf::AttentionResults<{frame.names.storage(out)}>"
        first, *rest = (
            frame.names.target(name) if name in stored else "nullptr" for name in (out, *numbers)
        )
        w.line(f"const {kind} results = {{{', '.join([first, *steps, *rest])}}};")

    def _sizes(self, w: Writer) -> None:
        frame, node, blocks = self.frame, self.node, self.node.blocks
        batch, heads, queries, keys = (self._count(size) for size in node.sizes)
        row_block = queries if blocks.rows is None else blocks.rows
        key_block = keys if blocks.others is None else blocks.others
        groups = self._count(node.groups)
        numbers = (batch, heads, groups, queries, keys, row_block, key_block)
        w.line(f"const pf::AttentionSizes sizes = {{{', '.join(map(str, numbers))}}};")
        inner, outer = node.query.shape[3], node.value.shape[3]
        work = f"{batch} * {heads} * {queries} * {keys} * ({inner} + {outer})"
        least = frame.settings.cpu.grain_elements * _WORK_PER_ELEMENT
        w.line(f"if ({work} < {least}) threads = 1;")

    def _count(self, size: Dim) -> str:
        return f"int64_t({self.frame.dim(size)})"

    # -- the block mask --------------------------------------------------------------------

    def _lists(self, w: Writer) -> None:
        """The number of blocks that a block of queries has, and the first key of each."""
        mask = self.node.blocks
        given = "int64_t b, int64_t h, int64_t row"
        with w.block(f"const auto count = [=]({given}, bool is_full) PF_INLINED -> int64_t {{", "};"):
            full = "0" if mask.full is None else self._listed(mask.full.counts, "1")
            w.line(f"if (is_full) return {full};")
            w.line(f"return {self._listed(mask.partial.counts, '1')};")
        opening = f"const auto place = [=]({given}, int64_t n, bool is_full) PF_INLINED -> int64_t {{"
        with w.block(opening, "};"):
            if mask.full is not None:
                w.line(f"if (is_full) return {self._first_key(mask.full)};")
            w.line(f"return {self._first_key(mask.partial)};")

    def _first_key(self, blocks: BlockList) -> str:
        listed = self._listed(blocks.indices, "0")
        return listed if blocks.indices is None else f"{listed} * {self.node.blocks.others}"

    def _listed(self, view: View | None, known: str) -> str:
        """What a table has for a block of queries, or what is known without one."""
        if view is None:
            return known
        places = ("b", "h", "row", "n")[: len(view.shape)]
        at = " + ".join(f"{place} * {self._step(view, i)}" for i, place in enumerate(places))
        kind = self.frame.names.storage(view.buffer)
        return f"int64_t(pf::load1<{kind}>({self._start(view)} + {at}))"

    # -- functions of scores ---------------------------------------------------------------

    def _scores(self, w: Writer, *, is_row: bool) -> None:
        """The lambda that makes scores of products, and returns the largest."""
        number = "int64_t q" if is_row else "int64_t q, int live"
        given = f"float* products, int64_t b, int64_t h, {number}, int64_t first, int64_t keys"
        with w.block(f"const auto score = [=]({given}, bool is_full) PF_INLINED {{", "};"):
            w.line("pf::vec<float> most = pf::minus_infinity();")
            write = self._keys if is_row else self._queries
            if self.node.is_masked and self.node.blocks.full is not None:
                with w.block("if (is_full) {"):
                    write(w, is_full=True)
                with w.block("else {"):
                    write(w, is_full=False)
            else:
                write(w, is_full=False)
            found = "pf::hmax(most)" if is_row else "most"
            w.line(f"return {found}{f' * {self.scale}' if self.is_plain else ''};")

    def _queries(self, w: Writer, *, is_full: bool) -> None:
        """The scores of a vector of queries, key by key."""
        b, h, q, k = position_atoms(self.node.sizes)
        for condition, tail in (("if (live == pf::lanes)", None), ("else", "live")):
            if tail and self._is_whole(self.node.sizes[2], self.node.blocks.rows):
                break
            with w.block(f"{condition} {{"):
                before, loop = w.child(), w.child()
                inside = Scope(loop, k | {score_atom()}, Scope(before, b | h | q, None))
                with loop.block("for (int64_t n = 0; n < keys; ++n) {"):
                    loop.line("const int64_t k = first + n;")
                    loop.line(f"float* const at = products + n * {self.tile.vectors} * pf::lanes;")
                    self._body(inside, _Lanes.of(q, tail), is_full=is_full)
                w.take(before)
                w.take(loop)

    def _keys(self, w: Writer, *, is_full: bool) -> None:
        """The scores of one query, a vector of keys after another."""
        b, h, q, k = position_atoms(self.node.sizes)
        before, loops = w.child(), w.child()
        outside = Scope(before, b | h | q, None)
        loops.line("int64_t n = 0;")
        for opening, tail in (
            ("for (; n + pf::lanes <= keys; n += pf::lanes) {", None),
            ("if (n < keys) {", "live"),
        ):
            if tail and self._is_whole(self.node.sizes[3], self.node.blocks.others):
                break
            with loops.block(opening):
                loops.line("const int64_t k = first + n;")
                loops.line("float* const at = products + n;")
                if tail:
                    loops.line(f"const int {tail} = (int)(keys - n);")
                inside = Scope(loops, k | {score_atom()}, outside)
                self._body(inside, _Lanes.of(k, tail), is_full=is_full, pads=tail is not None)
        w.take(before)
        w.take(loops)

    def _is_whole(self, size: Dim, block: int | None) -> bool:
        """Whether blocks of this side are whole vectors."""
        sizes = (size,) if block is None else (size, block)
        return all(isinstance(each, int) and each % self.frame.lanes == 0 for each in sizes)

    def _body(self, scope: Scope, lanes: _Lanes, *, is_full: bool, pads: bool = False) -> None:
        """One vector of scores."""
        node, w = self.node, scope.writer
        emitter = ScoreEmitter(self.frame.names, scope, lanes.atom, lanes.tail, _SCORES.get)
        scaled = "" if self.is_plain else f" * {self.scale}"
        w.line(f"const pf::vec<float> scores = pf::loadv<float>(at){scaled};")
        score = "scores" if node.score is SCORE else emitter.value(node.score).vector
        kept = [f"pf::first_lanes({lanes.tail})"] if pads else []
        if node.is_masked and not is_full:
            kept.append(emitter.value(node.mask).vector)
        for mask in kept:
            score = f"pf::where({mask}, {score}, pf::minus_infinity())"
        w.line(f"const pf::vec<float> x = {score};")
        if kept or not self.is_plain:
            w.line("pf::storev<float>(at, x);")
        w.line("most = pf::max(most, x);")
