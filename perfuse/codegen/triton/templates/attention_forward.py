"""Attention forward: a block of queries per program, which loops over keys with a running softmax.

For each query it keeps the largest score so far, the sum of weights and the weighted sum of values;
a larger score rescales what was summed before it. Scores never reach memory. Where there are few
queries, several programs share the keys of a block, and the last of them joins what all found.
"""

from __future__ import annotations

from perfuse.codegen.triton.emit import COLUMNS, ROWS
from perfuse.codegen.triton.frame import KernelText
from perfuse.codegen.triton.templates.attention_frame import LOG2_E, AttentionFrame, Side
from perfuse.codegen.triton.tiling import num_blocks
from perfuse.codegen.writer import Writer
from perfuse.ir import index as ix
from perfuse.ir.attention import SCORE, BlockList
from perfuse.ir.dtype import DType
from perfuse.schedule.turns import Scratch


def forward_text(frame: AttentionFrame) -> KernelText:
    return _Forward(frame).text()


class _Forward:
    def __init__(self, frame: AttentionFrame) -> None:
        self.frame, self.node = frame, frame.node
        _, self.heads, queries, keys = self.node.sizes
        self.rows = Side("q", queries, frame.tile.rows, ROWS)
        self.columns = Side("k", keys, frame.tile.columns, COLUMNS)
        # A score that is only scaled is scaled while it is exponentiated.
        is_plain = self.node.score is SCORE and self.node.scale > 0
        self.is_scaled = frame.is_late or not is_plain
        self.before = Writer()
        self.factor = frame.factor(is_scaled=self.is_scaled)

    def text(self) -> KernelText:
        frame, w, rows = self.frame, self.frame.w, self.rows
        frame.place_program(w, rows, self.heads)
        w.line("h = head")
        groups = self.node.groups
        w.line(f"shared = {'h' if groups == 1 else f'h // {frame.count(groups)}'}")
        w.line(f"queries = {frame.load_block(self.node.query, 'h', rows, frame.inner)}")
        self._start(w)
        self.before, loops = w.child(), w.child()
        mask = self.node.blocks
        self._loop(loops, "partial", mask.partial, is_full=False)
        if mask.full is not None:
            self._loop(loops, "full", mask.full, is_full=True)
        w.take(self.before)
        w.take(loops)
        if frame.tile.splits == 1:
            self._finish(w)
        else:
            self._join(w)
        return frame.whole_text(rows, self.heads)

    def _loop(self, w: Writer, name: str, blocks: BlockList, *, is_full: bool) -> None:
        frame, columns = self.frame, self.columns
        start = frame.loop_over(w, name, blocks, columns)
        steps = f"0, {name}"
        if (splits := frame.tile.splits) > 1:
            w.line("split = tl.program_id(2)")
            w.line(f"share = ({name} + {splits - 1}) // {splits}")
            steps = f"split * share, tl.minimum({name}, split * share + share)"
        with w.indented(f"for step in tl.range({steps}):"):
            frame.place(w, columns, start)
            w.line(f"keys = {frame.load_block(self.node.key, 'shared', columns, frame.inner)}")
            w.line(f"scores = {frame.dot('queries', 'tl.trans(keys)')}")
            self._score(w, is_full=is_full)
            self._accumulate(w)

    def _score(self, w: Writer, *, is_full: bool) -> None:
        frame, sides = self.frame, (self.rows, self.columns)
        if self.is_scaled:
            w.line(f"scores = scores * {self.node.scale!r}")
        emitter = frame.functions(self.before, w, *sides)
        score = "scores"
        if self.node.score is not SCORE:
            score = frame.in_block(emitter.value(self.node.score), *sides)
        kept = frame.kept(emitter, [self.columns], is_full=is_full)
        w.line(f"x = tl.where({kept}, {score}, float('-inf'))" if kept else f"x = {score}")

    def _accumulate(self, w: Writer) -> None:
        frame = self.frame
        to_base = "" if frame.is_late else f" * {self.factor!r}"
        w.line(f"higher = tl.maximum(top, tl.max(x, 1){to_base})")
        # Where nothing counts so far the weights are zero, not NaN.
        w.line("shift = tl.where(higher == float('-inf'), 0.0, higher)")
        w.line(f"weights = {frame.power('x', 'shift[:, None]', self.factor)}")
        w.line(f"rescale = {frame.power('top', 'shift')}")
        w.line("total = total * rescale + tl.sum(weights, 1)")
        w.line("acc = acc * rescale[:, None]")
        value = frame.load_block(self.node.value, "shared", self.columns, frame.outer)
        w.line(f"values = {value}")
        w.line(f"acc = {frame.dot(frame.narrow('weights'), 'values', 'acc')}")
        w.line("top = higher")

    def _join(self, w: Writer) -> None:
        """The program that finishes a block of queries last combines the results of all."""
        frame, splits, rows = self.frame, self.frame.tile.splits, self.rows.step
        tiles = ix.product((*self.node.sizes[:2], num_blocks(self.rows.size, rows)))
        parts = {"acc": frame.outer, "top": 1, "total": 1}
        for name, width in parts.items():
            size = ix.product((tiles, splits, rows, width))
            held = Scratch(f"{frame.kernel.name}_{name}", DType.F32, size)
            w.line(f"all_{name} = {frame.need(held)}")
        counter = Scratch(f"{frame.kernel.name}_done", DType.I32, tiles, fill=0, is_kept=True)
        done = frame.need(counter)
        w.line("place = tl.program_id(1) * tl.num_programs(0) + tile")
        w.line(f"line = tl.arange(0, {rows})")
        w.line(f"within = line[:, None] * {frame.outer} + tl.arange(0, {frame.outer})[None, :]")
        ahead = frame.wide("(place * {splits} + {split})")
        at = ahead.format(splits=splits, split="split")
        w.line(f"tl.store(all_acc + {at} * {rows * frame.outer} + within, acc)")
        for name in ("top", "total"):
            w.line(f"tl.store(all_{name} + {at} * {rows} + line, {name})")
        with w.indented(f"if pf_last_block({done} + place, {splits}):"):
            self._start(w)
            with w.indented(f"for other in range({splits}):"):
                at = ahead.format(splits=splits, split="other")
                found = f"tl.load(all_acc + {at} * {rows * frame.outer} + within, volatile=True)"
                w.line(f"found = {found}")
                for name in ("top", "total"):
                    text = f"tl.load(all_{name} + {at} * {rows} + line, volatile=True)"
                    w.line(f"its_{name} = {text}")
                self._add(w)
            self._finish(w)
            w.line(f"tl.store({done} + place, 0)")

    def _start(self, w: Writer) -> None:
        rows = self.rows.step
        w.line(f"top = tl.full([{rows}], float('-inf'), tl.float32)")
        w.line(f"total = tl.zeros([{rows}], tl.float32)")
        w.line(f"acc = tl.zeros([{rows}, {self.frame.outer}], tl.float32)")

    def _add(self, w: Writer) -> None:
        """Add another program's results, rescaled to the larger of the largest scores."""
        w.line("higher = tl.maximum(top, its_top)")
        w.line("shift = tl.where(higher == float('-inf'), 0.0, higher)")
        w.line(f"rescale = {self.frame.power('top', 'shift')}")
        w.line(f"rescale_its = {self.frame.power('its_top', 'shift')}")
        w.line("total = total * rescale + its_total * rescale_its")
        w.line("acc = acc * rescale[:, None] + found * rescale_its[:, None]")
        w.line("top = higher")

    def _finish(self, w: Writer) -> None:
        frame, rows, stored = self.frame, self.rows, self.frame.kernel.stored
        out, logsumexp, largest = self.node.results
        if frame.is_late:
            w.line(f"top = top * {LOG2_E!r}")
        if out in stored:
            w.line("acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]")
            frame.store_block(w, out, "acc", rows, "h")
        if logsumexp in stored:
            w.line("sums = tl.where(total == 0.0, float('-inf'), top + tl.log2(total))")
            frame.store_numbers(w, logsumexp, "sums", rows, "h")
        if largest in stored:
            frame.store_numbers(w, largest, "top", rows, "h")
