"""Attention forward: a call of `attention.h`, with the user's functions in a lambda.

The template multiplies; the lambda makes scores of the products of some queries and keys.
"""

from __future__ import annotations

from perfuse.codegen.cpp.kernel import KernelText
from perfuse.codegen.cpp.templates.attention_frame import CppAttentionFrame, ScoreEmitter, Where
from perfuse.codegen.writer import Writer
from perfuse.ir.attention import SCORE


def forward_text(frame: CppAttentionFrame) -> KernelText:
    return _Forward(frame).text()


class _Forward:
    def __init__(self, frame: CppAttentionFrame) -> None:
        self.frame, self.node = frame, frame.node
        # A score that is only scaled is scaled while it is exponentiated.
        self.is_plain = self.node.score is SCORE and self.node.scale > 0

    def text(self) -> KernelText:
        frame, node, w = self.frame, self.node, Writer(1)
        for name, view in (("query", node.query), ("key", node.key), ("value", node.value)):
            frame.operand(w, name, view)
        out, *numbers = node.results
        kind = f"pf::AttentionResults<{frame.names.storage(out)}>"
        given = [frame.target_of(out), *frame.steps_of(out), *map(frame.target_of, numbers)]
        given += ["true"] if node.has_natural_sums else []
        w.line(f"const {kind} results = {{{', '.join(given)}}};")
        frame.sizes(w)
        frame.lists(w)
        self._call(w)
        return frame.finished(w)

    def _call(self, w: Writer) -> None:
        """The call by the number of queries, which may not show before it runs."""
        size, block, few = self.frame.queries.size, self.frame.queries.block, self.frame.tile.few
        if not isinstance(size, int):
            with w.block(f"if (sizes.queries <= {few} && sizes.queries <= sizes.row_block) {{"):
                self._few(w)
                w.line("return;")
        if isinstance(size, int) and size <= few and (block is None or size <= block):
            self._few(w)
        else:
            self._many(w)

    def _many(self, w: Writer) -> None:
        frame = self.frame
        with w.block(_opening("int64_t q, int live"), "};"):
            w.line("pf::vec<float> most = pf::minus_infinity();")
            frame.full_or_not(w, lambda is_full: frame.by_rows(w, self._body, is_full=is_full))
            w.line(f"return most{self._late_scale};")
        self._run(w, "attention", frame.tile_text())

    def _few(self, w: Writer) -> None:
        frame, heads = self.frame, (self.node.query.shape[3], self.node.value.shape[3])
        with w.block(_opening("int64_t q"), "};"):
            w.line("pf::vec<float> most = pf::minus_infinity();")
            frame.full_or_not(w, lambda is_full: frame.by_columns(w, self._row, is_full=is_full))
            w.line(f"return pf::hmax(most){self._late_scale};")
        numbers = (*heads, frame.tile.few, frame.tile.keys_of_few)
        self._run(w, "attention_few", f"pf::AttentionFew<{', '.join(map(str, numbers))}>")

    @property
    def _late_scale(self) -> str:
        return f" * {self.frame.scale}" if self.is_plain else ""

    def _run(self, w: Writer, function: str, tile: str) -> None:
        factor = self.frame.scale if self.is_plain else "1.0f"
        given = f"query, key, value, results, sizes, {factor}, threads, count, place, score"
        w.line(f"pf::{function}<{tile}>({given});")

    def _row(self, emitter: ScoreEmitter, where: Where) -> None:
        self._body(emitter, where, pads=where.tail is not None)

    def _body(self, emitter: ScoreEmitter, where: Where, *, pads: bool = False) -> None:
        """One vector of scores; `pads`: what is behind the last of them does not count."""
        frame, w = self.frame, emitter.scope.writer
        scaled = "" if self.is_plain else f" * {frame.scale}"
        w.line(f"const pf::vec<float> scores = pf::loadv<float>(products + at){scaled};")
        score, kept = frame.score(emitter), frame.kept(emitter, is_full=where.is_full)
        masks = [kept] if kept else []
        masks += [f"pf::first_lanes({where.tail})"] if pads else []
        for mask in masks:
            score = f"pf::where({mask}, {score}, pf::minus_infinity())"
        w.line(f"const pf::vec<float> x = {score};")
        if masks or not self.is_plain:
            w.line("pf::storev<float>(products + at, x);")
        w.line("most = pf::max(most, x);")


def _opening(query: str) -> str:
    given = f"float* products, int64_t b, int64_t h, {query}, int64_t first, int64_t columns"
    return f"const auto score = [=]({given}, bool is_full) PF_INLINED {{"
