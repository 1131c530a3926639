"""Gradients of attention: scores are recomputed, and weights from the sums that were saved.

One kernel has a block of queries per program and loops over the keys, for the gradient of the
queries; the other has a block of keys per program and loops over the queries, for those of keys and
values.
"""

from __future__ import annotations

from perfuse.codegen.triton.emit import COLUMNS, ROWS
from perfuse.codegen.triton.frame import KernelText
from perfuse.codegen.triton.templates.attention_frame import LOG2_E, AttentionFrame, Side, padded
from perfuse.codegen.writer import Writer
from perfuse.ir import expr as ex
from perfuse.ir.attention import SCORE, SCORE_GRADIENT, BlockList, Saved, ScoreScatter
from perfuse.ir.program import View


def query_gradient_text(frame: AttentionFrame) -> KernelText:
    return _QueryGradient(frame, "q", "k").text()


def key_gradient_text(frame: AttentionFrame) -> KernelText:
    return _KeyGradient(frame, "k", "q").text()


class _Gradient:
    """The gradients of a block of scores, which both kernels compute."""

    def __init__(self, frame: AttentionFrame, rows: str, columns: str) -> None:
        assert frame.node.saved is not None
        self.frame, self.node = frame, frame.node
        self.saved: Saved = frame.node.saved
        sizes = dict(zip(("b", "h", "q", "k"), self.node.sizes, strict=True))
        self.rows = Side(rows, sizes[rows], frame.tile.rows, ROWS)
        self.columns = Side(columns, sizes[columns], frame.tile.columns, COLUMNS)
        self.queries = self.rows if rows == "q" else self.columns
        is_plain = self.node.score is SCORE and self.node.score_gradient is SCORE_GRADIENT
        self.is_scaled = frame.is_late or not is_plain
        self.factor = frame.factor(is_scaled=self.is_scaled)
        self.before = Writer()  # what functions compute before the loops

    def loops(self, w: Writer) -> None:
        """Write the loops over the blocks of the mask."""
        self.before, loops = w.child(), w.child()
        self._loop(loops, "partial", self.node.blocks.partial, is_full=False)
        if self.node.blocks.full is not None:
            self._loop(loops, "full", self.node.blocks.full, is_full=True)
        w.take(self.before)
        w.take(loops)

    def _loop(self, w: Writer, name: str, blocks: BlockList, *, is_full: bool) -> None:
        start = self.frame.loop_over(w, name, blocks, self.columns)
        with w.indented(f"for step in tl.range(0, {name}):"):
            self.frame.place(w, self.columns, start)
            self.step(w, is_full=is_full)

    def step(self, w: Writer, *, is_full: bool) -> None:
        raise NotImplementedError

    def load(self, w: Writer, name: str, view: View, head: str, side: Side) -> None:
        width = padded(view.shape[3])
        w.line(f"{name} = {self.frame.load_block(view, head, side, width)}")

    def load_numbers(self, w: Writer) -> None:
        """Two numbers for each query, as vectors along its side of a block of scores."""
        numbers = self.frame.load_numbers(self.saved.logsumexp, "h", self.queries)
        w.line(f"sums = {numbers}")
        # A query without keys has no weights.
        of_base = f" * {1 / LOG2_E!r}" if self.frame.is_late else ""
        w.line(f"sums = tl.where(sums == float('-inf'), 0.0, sums{of_base})")
        w.line(f"delta = {self.frame.load_numbers(self.saved.delta, 'h', self.queries)}")

    def weights(self, w: Writer, product: str, *, is_full: bool) -> str:
        """Write the weights of a block of scores; which of them count, "" for all."""
        frame, sides = self.frame, (self.rows, self.columns)
        w.line(f"scores = {product}")
        if self.is_scaled:
            w.line(f"scores = scores * {self.node.scale!r}")
        self.emitter = frame.functions(self.before, w, *sides)
        score = "scores"
        if self.node.score is not SCORE:
            score = frame.in_block(self.emitter.value(self.node.score), *sides)
        sums = self.queries.across("sums")
        w.line(f"weights = {frame.power(score, sums, self.factor)}")
        kept = frame.kept(self.emitter, [self.columns], is_full=is_full)
        if kept:
            w.line(f"kept = {kept}")
            w.line("weights = tl.where(kept, weights, 0.0)")
        return "kept" if kept else ""

    def slopes(self, w: Writer, product: str, kept: str) -> None:
        """Write the gradients of a block of scores, from those of its weights."""
        delta = self.queries.across("delta")
        w.line(f"slopes = weights * ({product} - {delta})")
        for scatter in self.node.scatters:
            self._scatter(w, scatter, kept)
        gradient = self.node.score_gradient
        assert gradient is not None
        if gradient is not SCORE_GRADIENT:
            value = self.emitter.value(gradient)
            w.line(f"slopes = {self.frame.in_block(value, self.rows, self.columns)}")
            if kept:
                w.line(f"slopes = tl.where({kept}, slopes, 0.0)")

    def _scatter(self, w: Writer, scatter: ScoreScatter, kept: str) -> None:
        """Add what a block of scores contributes to a captured tensor's gradient.

        What goes to one element is summed first, as far as its place shows.
        """
        frame, emitter = self.frame, self.emitter
        added = frame.in_block(emitter.value(scatter.value), self.rows, self.columns)
        masks = [side.mask for side in (self.rows, self.columns) if side.is_masked]
        masks += [kept] if kept else []
        if masks:
            added = f"tl.where({' & '.join(dict.fromkeys(masks))}, {added}, 0.0)"
        lanes = emitter.block.lanes(ex.index_variables(scatter.index))
        for axis, side in ((1, self.columns), (0, self.rows)):
            if not lanes & side.lanes:
                added = f"tl.sum({added}, {axis}, keep_dims=True)"
        at, own = emitter.place(scatter.buffer, scatter.index, lanes)
        mask = emitter.block.mask(own)
        if not lanes:
            at = f"{at} + tl.zeros([1, 1], tl.int32)"
        w.line(f"tl.atomic_add({at}, {added}{f', {mask}' if mask else ''}, sem='relaxed')")


class _QueryGradient(_Gradient):
    def text(self) -> KernelText:
        frame, node, w, rows = self.frame, self.node, self.frame.w, self.rows
        heads, groups = node.sizes[1], node.groups
        frame.place_program(w, rows, heads)
        w.line("h = head")
        w.line(f"shared = {'h' if groups == 1 else f'h // {frame.count(groups)}'}")
        self.load(w, "queries", node.query, "h", rows)
        self.load(w, "grads", self.saved.grad_out, "h", rows)
        self.load_numbers(w)
        w.line(f"acc = tl.zeros([{rows.step}, {frame.inner}], tl.float32)")
        self.loops(w)
        frame.store_block(w, node.results[0], f"(acc * {node.scale!r})", rows, "h")
        return frame.whole_text(rows, heads)

    def step(self, w: Writer, *, is_full: bool) -> None:
        frame, node = self.frame, self.node
        self.load(w, "keys", node.key, "shared", self.columns)
        kept = self.weights(w, frame.dot("queries", "tl.trans(keys)"), is_full=is_full)
        self.load(w, "values", node.value, "shared", self.columns)
        self.slopes(w, frame.dot("grads", "tl.trans(values)"), kept)
        w.line(f"acc = {frame.dot(frame.narrow('slopes'), 'keys', 'acc')}")


class _KeyGradient(_Gradient):
    def text(self) -> KernelText:
        frame, node, w, rows = self.frame, self.node, self.frame.w, self.rows
        heads, groups = node.key.shape[1], node.groups
        frame.place_program(w, rows, heads)
        self.load(w, "keys", node.key, "head", rows)
        self.load(w, "values", node.value, "head", rows)
        w.line(f"of_keys = tl.zeros([{rows.step}, {frame.inner}], tl.float32)")
        w.line(f"of_values = tl.zeros([{rows.step}, {frame.outer}], tl.float32)")
        if groups == 1:
            self._head(w, "head")
        else:
            count = frame.count(groups)
            with w.indented(f"for group in range({count}):"):
                self._head(w, f"head * {count} + group")
        of_key, of_value = node.results
        frame.store_block(w, of_key, f"(of_keys * {node.scale!r})", rows, "head")
        frame.store_block(w, of_value, "of_values", rows, "head")
        return frame.whole_text(rows, heads)

    def _head(self, w: Writer, head: str) -> None:
        """Add what one head of queries contributes."""
        w.line(f"h = {head}")
        self.loops(w)

    def step(self, w: Writer, *, is_full: bool) -> None:
        frame, node, columns = self.frame, self.node, self.columns
        self.load(w, "queries", node.query, "h", columns)
        self.load_numbers(w)
        kept = self.weights(w, frame.dot("keys", "tl.trans(queries)"), is_full=is_full)
        self.load(w, "grads", self.saved.grad_out, "h", columns)
        w.line(f"of_values = {frame.dot(frame.narrow('weights'), 'grads', 'of_values')}")
        self.slopes(w, frame.dot("values", "tl.trans(grads)"), kept)
        w.line(f"of_keys = {frame.dot(frame.narrow('slopes'), 'queries', 'of_keys')}")
