"""Losses over a large vocabulary, in chunks of rows: the full logits are never in memory.

    loss = cross_entropy(h @ w.T, targets)

Logits, and their gradient, are often the largest tensors of a language model. Both are needed for
one row at a time. So a chunk of rows is multiplied, reduced to its part of the loss, turned into
the gradient of its logits, and that into a part of the gradients of `h` and `w`, before the next
chunk starts. The gradient of the loss is not known then: it is a factor of everything, applied in
the backward. `row_region.py` finds what is computed row by row, whatever the loss is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from perfuse.config import MIB
from perfuse.context import Context
from perfuse.graph.chunk_ops import matmul_after
from perfuse.graph.copying import GraphCopy
from perfuse.graph.dead_code import eliminate_dead_code
from perfuse.graph.facts import EARLY, ancestors, is_pure, known_tensor, packet_name, tensor_of
from perfuse.graph.rewrite import NodeBuilder
from perfuse.graph.row_chunk import Chunk, Inputs
from perfuse.graph.row_region import RowRegion, numel, shape_of
from perfuse.ir.matmul import matmul_op
from perfuse.torch_compat.graphs import module_of

aten = torch.ops.aten

# A chunk on a CPU fits no cache anyway: it is as small as its matmuls allow. The gradient of the
# weight is read and written once for each chunk, which takes 3% of the time of 256 rows.
_CPU_CHUNK_BYTES, _FEWEST_ROWS = 64 * MIB, 256
# With fewer chunks there is little to save: a chunk and its gradient are in memory as well.
_FEWEST_CHUNKS = 4
# Each chunk is written down in the program.
_MOST_CHUNKS = 64
# In half precision on a GPU the gradient of the weight is rounded after each chunk. For random
# signs the variance of its error grows from 2 roundings (gradient of the logits, result) to
# 1 + chunks / 2: at eight chunks, 1.6 times the error of one matmul.
_MOST_HALF_CHUNKS = 8
_HALVES = (torch.bfloat16, torch.float16)
_ALIGNED_BYTES = 16


def chunk_joint_heads(gm: GraphModule, context: Context) -> GraphModule:
    """The pass on joint graphs; regions of the user's checkpoints stay as they are."""
    if any("recompute" in node.meta for node in gm.graph.nodes):
        return gm
    inputs = gm.graph.find_nodes(op="placeholder")
    return _chunked(gm, context, [node for node in inputs if "tangents" in str(node.target)])


def chunk_heads(gm: GraphModule, context: Context) -> GraphModule:
    """The pass on graphs in which every input is known."""
    return _chunked(gm, context, [])


@dataclass(frozen=True, slots=True)
class _Head:
    """Logits, what is computed of each row, and the rows of a chunk."""

    region: RowRegion
    step: int

    @property
    def bounds(self) -> list[tuple[int, int]]:
        rows = self.region.num_rows
        return [(start, min(start + self.step, rows)) for start in range(0, rows, self.step)]


def _chunked(gm: GraphModule, context: Context, tangents: list[Node]) -> GraphModule:
    if not any(_rows_in_chunk(node, context) for node in gm.graph.nodes):
        return gm
    gm = eliminate_dead_code(gm)
    names = {node.name for node in tangents}
    inputs = [n for n in gm.graph.find_nodes(op="placeholder") if n.name in names]
    for node in gm.graph.nodes:
        head = _head_at(node, inputs, context)
        if head is not None:
            context.counters.inc("graph.chunked_heads")
            # One at a time: what is below it has new nodes now.
            gm = eliminate_dead_code(_Rewrite(gm, head, bool(tangents)).run())
            return _chunked(gm, context, tangents)
    return gm


def _head_at(node: Node, tangents: list[Node], context: Context) -> _Head | None:
    step = _rows_in_chunk(node, context)
    if step is None:
        return None
    region = RowRegion(node, tangents)
    if node in region.after or not region.is_head():
        return None  # a matmul for a gradient has no rows of a loss
    gradients = [known_tensor(n).dtype for n in (*region.lead, *region.totals) if n in region.after]
    if torch.float16 in gradients:
        return None  # a loss is scaled so that the factor is in the gradient of the logits
    outside = {n for made in (*region.makes, *region.totals) for n in made.all_input_nodes}
    outside = {n for n in outside if n not in region.lead and n not in region.after}
    late = (n for n in ancestors(outside) if n.op == "call_function" and not is_pure(n))
    if any(n > node for n in late):
        return None  # a random number or an effect would come earlier than it did
    return _Head(region, step)


def _rows_in_chunk(node: Node, context: Context) -> int | None:
    """The rows of a chunk, where a matmul is large enough to be computed in several."""
    limit = context.settings.logits_chunk_bytes
    row = None if limit == 0 else matmul_op(node.target)
    if row is None or row.rank != 2:
        return None
    shape, tensor = shape_of(node), tensor_of(node)
    if shape is None or tensor is None or not tensor.is_floating_point() or node.kwargs:
        return None
    bias = row.operands(node.args).bias
    if bias is not None and known_tensor(bias).dim() > 1:
        return None  # a bias with rows of its own
    is_gpu = context.target.gpu is not None
    rows, row_bytes = shape[0], shape[1] * tensor.element_size()
    if is_gpu and row_bytes % _ALIGNED_BYTES:
        return None  # padded, or written with aligned stores (`pad_matmuls`)
    fewest = 1
    if limit is None:
        if is_gpu:
            return None  # what it costs in time on a GPU has not been measured
        limit, fewest = _CPU_CHUNK_BYTES, _FEWEST_ROWS
    if rows * row_bytes < _FEWEST_CHUNKS * limit or rows < 2 * fewest:
        return None
    step = max(limit // row_bytes, fewest, 1)
    most = _MOST_HALF_CHUNKS if is_gpu and tensor.dtype in _HALVES else _MOST_CHUNKS
    num_chunks = min(math.ceil(rows / step), most)
    return math.ceil(rows / num_chunks)


class _Rewrite:
    """The graph with chunks where the logits were."""

    def __init__(self, gm: GraphModule, head: _Head, is_joint: bool) -> None:
        self._gm = gm
        self._head = head
        self._region = head.region
        self._is_joint = is_joint
        self._new = GraphCopy(gm.graph)
        self._build = NodeBuilder(self._new.graph)
        self._results: dict[Node, Node] = {}  # of the region, gradients for a seed of one
        self._ones: dict[Node, Node] = {}

    def run(self) -> GraphModule:
        for node in self._gm.graph.nodes:
            if node is self._region.logits:
                self._compute()
            if node in self._new.of:
                continue  # an operand of the chunks
            if node in self._results:
                self._new.of[node] = self._result(node)
            elif node not in self._region.lead and not self._is_dropped(node):
                self._new.of[node] = self._new.copy(node)
        return module_of(self._gm, self._new.graph)

    def _is_dropped(self, node: Node) -> bool:
        return any(n not in self._new.of for n in node.all_input_nodes)

    # -- values ----------------------------------------------------------------------------

    def _call(self, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        made = self._build.call(like, target, *args, **kwargs)
        made.meta.pop("partitioner_tag", None)
        if self._is_joint:
            made.meta[EARLY] = True
        return made

    def _given(self, node: Node) -> Node:
        """A value from outside, before the logits; the seed is one."""
        if node in self._region.after:
            return self._for_seed_of_one(node)
        missing, waiting = [], [node]
        while waiting:  # not by recursion: what a loss reads may be the end of a long chain
            last = waiting.pop()
            if last not in self._new.of:
                missing.append(last)
                waiting += last.all_input_nodes
        for each in sorted(set(missing)):
            self._new.of[each] = self._new.copy(each)
        return self._new.of[node]

    def _for_seed_of_one(self, node: Node) -> Node:
        if node not in self._ones:
            tensor = known_tensor(node)
            if node in self._region.seeds:
                options = {"dtype": tensor.dtype, "device": tensor.device}
                made = self._call(node, aten.full.default, list(tensor.shape), 1, **options)
            else:
                args, kwargs = map_arg((node.args, dict(node.kwargs)), self._given)
                made = self._call(node, node.target, *args, **kwargs)
            self._ones[node] = made
        return self._ones[node]

    # -- chunks ----------------------------------------------------------------------------

    def _compute(self) -> None:
        region = self._region
        inputs = Inputs(region.num_rows, self._call, self._given)
        leaving = region.leaving()
        parts: dict[Node, list[Node]] = {node: [] for node in (*leaving, *region.totals)}
        chunk, after = None, list[Node]()
        order = [n for n in self._gm.graph.nodes if n in region.makes or n in region.totals]
        for start, stop in self._head.bounds:
            before, chunk = chunk, Chunk(inputs, start, stop, after)
            chunk.totals = {} if before is None else before.totals
            chunk.of[region.logits] = self._logits(chunk, after)
            for node in order:
                if node in region.makes:
                    chunk.of[node] = region.makes[node](chunk)
                else:
                    self._add(chunk, node, parts[node])
            for node in leaving:
                parts[node].append(chunk.of[node])
            after = [chunk.of[node] for node in leaving]
            after += [parts[node][-1] for node in region.totals]
        for node in leaving:
            self._results[node] = self._call(node, aten.cat.default, parts[node])
        for node in region.totals:
            self._results[node] = self._total(node, parts[node])

    def _logits(self, chunk: Chunk, after: list[Node]) -> Node:
        logits = self._region.logits
        row = matmul_op(logits.target)
        assert row is not None, "logits are a matmul"
        operands = row.operands(logits.args)
        rows, matrix = chunk.operand_rows(operands.a), self._given(operands.b)
        added = None if operands.bias is None else self._given(operands.bias)
        # A half is rounded once, by the library; a float may be added by the kernel that reads it.
        is_half = known_tensor(logits).dtype in _HALVES
        made = self._call(logits, matmul_after, rows, matrix, added if is_half else None, after)
        if added is None or is_half:
            return made
        return self._call(logits, aten.add.Tensor, made, added)

    def _add(self, chunk: Chunk, node: Node, parts: list[Node]) -> None:
        """A matmul and a large sum are totals so far, small ones are added at the end."""
        part = self._region.totals[node](chunk)
        if node in self._region.matmuls:
            chunk.totals[node] = part
        elif parts and numel(node) > 1:
            part = self._call(node, aten.add.Tensor, parts[-1], part)
        parts.append(part)

    def _total(self, node: Node, parts: list[Node]) -> Node:
        if node in self._region.matmuls or numel(node) > 1:
            return parts[-1]
        total = parts[0]
        for part in parts[1:]:
            total = self._call(node, aten.add.Tensor, total, part)
        return total

    def _result(self, node: Node) -> Node:
        """The value for the rest of the graph: with the seed, in the shape and type it had."""
        made, tensor = self._results[node], known_tensor(node)
        source = node.all_input_nodes[0]
        if packet_name(node) == "mean" and node in self._region.totals:
            made = self._build.call(node, aten.div.Tensor, made, numel(source) // numel(node))
        if node in self._region.after:
            (seed,) = self._region.seeds
            factor = self._new.of[seed]
            if known_tensor(factor).dim() > 0:
                factor = self._build.call(seed, aten.view.default, factor, [])
            made = self._build.call(node, aten.mul.Tensor, made, factor)
        if known_tensor(made).dtype != tensor.dtype:
            made = self._build.call(node, aten._to_copy.default, made, dtype=tensor.dtype)
        if known_tensor(made).shape != tensor.shape:
            made = self._build.call(node, aten.view.default, made, list(tensor.shape))
        return made
