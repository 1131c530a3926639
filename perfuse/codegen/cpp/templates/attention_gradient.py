"""Gradients of attention: calls of `attention_gradient.h`, with the user's functions in a lambda.

One kernel has queries as lanes and goes over the keys, for the gradient of the queries; the other
has keys as lanes and goes over the queries, for those of keys and values. Both recompute weights
from the sums that the forward saved.
"""

from __future__ import annotations

import math

from perfuse.codegen.cpp.kernel import KernelText
from perfuse.codegen.cpp.templates.attention_frame import CppAttentionFrame, ScoreEmitter, Where
from perfuse.codegen.writer import Writer
from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.attention import SCORE_GRADIENT, AttentionPart, ScoreScatter, score_position
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.program import View


def gradient_text(frame: CppAttentionFrame) -> KernelText:
    return _Gradient(frame).text()


class _Gradient:
    def __init__(self, frame: CppAttentionFrame) -> None:
        assert frame.node.saved is not None
        self.frame, self.node, self.saved = frame, frame.node, frame.node.saved
        self.is_by_key = frame.node.part is AttentionPart.KEY_GRADIENT

    def text(self) -> KernelText:
        frame, node, w = self.frame, self.node, Writer(1)
        operands = {"query": node.query, "key": node.key, "value": node.value}
        operands["grad"] = self.saved.grad_out
        for name, view in operands.items():
            frame.operand(w, name, view)
        for number, name in enumerate(node.results):
            kind = f"pf::GradientRows<{frame.names.storage(name)}>"
            given = [frame.target_of(name), *frame.steps_of(name)]
            w.line(f"const {kind} result{number} = {{{', '.join(given)}}};")
        frame.sizes(w)
        frame.lists(w)
        given_text = f"int64_t b, int64_t h, int64_t {frame.rows.name}, int live, int64_t first"
        opening = f"const auto slope = [=](float* products, float* grads, {given_text}, "
        with w.block(f"{opening}int64_t columns, bool is_full) PF_INLINED {{", "};"):
            frame.full_or_not(w, lambda is_full: frame.by_rows(w, self._body, is_full=is_full))
        results = "result0, result1" if self.is_by_key else "result0"
        function = "key_gradient" if self.is_by_key else "query_gradient"
        given_text = f"query, key, value, grad, {results}, sizes, {frame.scale}, threads"
        w.line(f"pf::{function}<{frame.tile_text()}>({given_text}, count, place, slope);")
        return frame.finished(w)

    def _number(self, view: View) -> Expr:
        """One of the two numbers that are saved for each query."""
        b, h, q, _ = score_position(self.node.sizes)
        index = ix.add(view.offset, ix.dot((b, h, q), view.strides))
        return ex.load(view.buffer, index, DType.F32)

    def _sums(self) -> Expr:
        """The logarithm of a query's sum; a query without keys has no weights."""
        saved = self._number(self.saved.logsumexp)
        if self.node.has_natural_sums:
            return saved
        nothing = ex.apply("eq", saved, ex.const(-math.inf, DType.F32))
        natural = ex.apply("mul", saved, ex.const(math.log(2), DType.F32))
        return ex.apply("where", nothing, ex.const(0.0, DType.F32), natural)

    def _body(self, emitter: ScoreEmitter, where: Where) -> None:
        """Weights in the place of products, and gradients of scores in that of weights'."""
        frame, w = self.frame, emitter.scope.writer
        w.line(f"const pf::vec<float> scores = pf::loadv<float>(products + at) * {frame.scale};")
        score, sums = frame.score(emitter), emitter.value(self._sums()).vector
        kept = frame.kept(emitter, is_full=where.is_full)
        # A weight is at most one, whatever rounding made of a large sum.
        weights = f"pf::weight_of(pf::low(pf::vec<float>{{}}, {score} - {sums}))"
        if kept:
            w.line(f"const pf::mask kept = {kept};")
            weights = f"pf::where(kept, {weights}, pf::vec<float>{{}})"
        w.line(f"const pf::vec<float> weights = {weights};")
        delta = emitter.value(self._number(self.saved.delta)).vector
        grad = f"pf::loadv<float>(grads + at) - {delta}"
        w.line(f"const pf::vec<float> slopes = weights * ({grad});")
        for number, scatter in enumerate(self.node.scatters):
            self._scatter(emitter, where, scatter, number, is_masked=bool(kept))
        gradient = self.node.score_gradient
        assert gradient is not None
        result = "slopes" if gradient is SCORE_GRADIENT else emitter.value(gradient).vector
        if kept and gradient is not SCORE_GRADIENT:
            result = f"pf::where(kept, {result}, pf::vec<float>{{}})"
        if self.is_by_key:
            w.line("pf::storev<float>(products + at, weights);")
        w.line(f"pf::storev<float>(grads + at, {result});")

    def _scatter(
        self, emitter: ScoreEmitter, where: Where, scatter: ScoreScatter, number: int, *,
        is_masked: bool,
    ) -> None:  # fmt: skip
        """Add what a vector of scores contributes to a captured tensor's gradient.

        What goes to one element is summed first, as far as its place shows.
        """
        frame, w = self.frame, emitter.scope.writer
        added = emitter.value(scatter.value).vector
        masks = [f"pf::first_lanes({where.tail})"] if where.tail else []
        masks += ["kept"] if is_masked else []
        for mask in masks:
            added = f"pf::where({mask}, {added}, pf::vec<float>{{}})"
        pointer = frame.names.target(scatter.buffer)
        variables = ex.index_variables(scatter.index)
        if frame.rows.atoms & variables:
            at, _ = emitter.lane_index(scatter.index)
            w.line(f"pf::add_shared({pointer}, {at}, {added}, {where.tail or 'pf::lanes'});")
        elif frame.columns.atoms & variables:
            at = emitter.index(scatter.index)
            w.line(f"pf::add_shared({pointer} + {at}, pf::hsum({added}));")
        else:
            where.before.line(f"pf::vec<float> sum{number} = {{}};")
            w.line(f"sum{number} = sum{number} + {added};")
            outside = emitter.scope.parent
            assert outside is not None
            at = emitter.at(outside, emitter.resolve).index(scatter.index)
            where.after.line(f"pf::add_shared({pointer} + {at}, pf::hsum(sum{number}));")
