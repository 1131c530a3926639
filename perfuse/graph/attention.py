"""Attention written out by hand becomes one call of the fused kernel (see attention_match.py),
which the library computes, or a generated kernel (lower/families/dot_product_attention.py).

By hand the scores travel through memory; the kernel keeps a block of them in cache. Measured on
one core of the build machine, milliseconds (two matmuls and our softmax -> kernel):

    float32    (4,8,512,64) 34.6 -> 29.8    (4,8,32,64) 0.22 -> 0.17    (1,8,2048,64) 123 -> 104
    float16    (4,8,512,64)  547 -> 63      bfloat16, which the processor multiplies: 17.4 -> 29.7

So half types stay as they are where the library has fast matmuls for them. Our own kernel, beside
such matmuls, in bfloat16 on Zen 5, microseconds (two matmuls and our softmax -> kernel):

    (4,4,16,64) 52 -> 21     (4,4,64,64) 129 -> 116
    (1,8,128,64) 242 -> 196  (1,8,512,64) 1932 -> 2723

So it takes them up to 128 keys.

By hand, a row whose scores are all -inf is NaN; the kernel makes it zero. Where the mask has such
a row NaN is put back. (Without a mask such scores come from infinite queries or keys alone: those
rows are the kernel's.) A mask that chooses, by `where` or `masked_fill`, also hides NaN of the
scores, which an added one does not: it does not match.
"""

import functools
import math
import operator
from collections.abc import Iterator, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from perfuse.context import Context
from perfuse.graph.aliases import mutated_inputs
from perfuse.graph.attention_choice import AttentionProblem, library_reason
from perfuse.graph.attention_match import RESHAPES, Attention, Mask, match_attention
from perfuse.graph.facts import is_same_size, is_same_tensor, known_tensor, packet_name
from perfuse.graph.rewrite import NodeBuilder, replace_calls, scalar_of

aten = torch.ops.aten
_LOOKS = (*RESHAPES, "expand", "unsqueeze", "squeeze", "slice", "clone")


def fuse_attention(gm: GraphModule, context: Context) -> GraphModule:
    """The pass."""
    halves = AttentionProblem(is_half=True)
    reason = library_reason(context.settings, context.target.isa, halves)
    matches = _matches(gm.graph, has_fast_halves=reason is None and context.target.gpu is None)
    found = {match.product: match for match in matches if _can_shape(match)}
    return replace_calls(gm, found, lambda _, match, build, copy: _Call(match, build, copy).emit())


def _matches(graph: Graph, has_fast_halves: bool) -> Iterator[Attention]:
    """Every match; the kernel reads later than the first product did, so none behind a write."""
    for node in graph.nodes:
        if mutated_inputs(node):
            return
        is_product = node.target is aten.bmm.default
        match = match_attention(node, has_fast_halves) if is_product else None
        if match is not None:
            yield match


def _has_heads(match: Attention) -> bool:
    """The batches of the matmuls are known to be sequences times heads."""
    sizes = [n for node in (match.scores, match.product) for n in known_tensor(node).shape]
    return known_tensor(match.scores).dim() == 4 and all(isinstance(n, int) for n in sizes)


def _can_shape(match: Attention) -> bool:
    """The masks have separate sequence and head dimensions, or need none."""
    if _has_heads(match) or known_tensor(match.scores).dim() == 3:
        return True
    shapes = [known_tensor(mask.node).shape for mask in match.masks]
    return all(is_same_size(n, 1) for shape in shapes for n in shape[:-2])


class _Call:
    """Writes one call of the kernel; all operands as (sequences, heads, rows, columns)."""

    def __init__(self, match: Attention, build: NodeBuilder, copy: dict[Node, Node]) -> None:
        self._match, self._build, self._copy = match, build, copy
        self._has_heads = _has_heads(match)

    def emit(self) -> Node:
        """The node that replaces the last matmul."""
        match = self._match
        key = self._call(aten.transpose.int, self._operand(match.key, -2), -2, -1)
        operands = self._operand(match.query), key, self._operand(match.value)
        masks = [self._mask(mask) for mask in match.masks]
        mask = functools.reduce(self._sum, masks) if masks else None
        kernel = aten._scaled_dot_product_flash_attention_for_cpu.default
        both = self._call(kernel, *map(self._dense, operands), attn_mask=mask, scale=match.scale)
        result = self._call(operator.getitem, both, 0)
        if mask is not None and not _are_finite(match.masks):
            result = self._with_masked_rows(result, mask)
        return self._joined(result)

    def _call(self, target: object, *args: object, **kwargs: object) -> Node:
        return self._build.call(self._match.product, target, *args, **kwargs)

    def _operand(self, node: Node, axis: int = -1) -> Node:
        if not self._has_heads:
            return self._call(aten.unsqueeze.default, self._copy[node], 1)
        shape = [*known_tensor(self._match.scores).shape[:2], *known_tensor(node).shape[-2:]]
        source = _before_joining(node, shape, axis)
        if source is not None:
            return self._copy[source]
        return self._call(aten.view.default, self._copy[node], shape)

    def _dense(self, node: Node) -> Node:
        """The kernel takes any strides but those within a row."""
        if known_tensor(node).stride()[-1] == 1:
            return node
        return self._call(aten.clone.default, node, memory_format=torch.contiguous_format)

    def _sum(self, a: Node, b: Node) -> Node:
        return self._call(aten.add.Tensor, a, b)

    def _mask(self, given: Mask) -> Node:
        mask = self._copy[given.node]
        if given.factor != 1.0:
            mask = self._call(aten.mul.Tensor, mask, given.factor)
        if not self._has_heads and known_tensor(mask).dim() == 3:
            return self._call(aten.unsqueeze.default, mask, 1)
        while known_tensor(mask).dim() not in (2, 4):
            mask = self._call(aten.unsqueeze.default, mask, 0)
        return mask

    def _with_masked_rows(self, result: Node, mask: Node) -> Node:
        """NaN in the rows that the mask hides entirely: what -inf minus itself is."""
        largest = self._call(aten.amax.default, mask, [-1], True)
        nothing = self._call(aten.sub.Tensor, largest, largest)
        return self._call(aten.sub.Tensor, result, nothing)

    def _joined(self, result: Node) -> Node:
        """The result in the shape and strides of the matmul it replaces."""
        wanted = known_tensor(self._match.product)
        if not self._has_heads:
            result = self._call(aten.squeeze.dim, result, 1)
        if not known_tensor(result).is_contiguous():
            result = self._call(aten.clone.default, result, memory_format=torch.contiguous_format)
        if self._has_heads:
            result = self._call(aten.view.default, result, list(wanted.shape))
        assert is_same_tensor(known_tensor(result), wanted), "not the product's result"
        return result


def _before_joining(node: Node, shape: list[int], axis: int) -> Node | None:
    """An operand before its batch dimensions were flattened by a copy; rows along `axis`."""
    found = None
    while packet_name(node) in (*RESHAPES, "clone") and isinstance(node.args[0], Node):
        node = node.args[0]
        if list(known_tensor(node).shape) == shape and _has_rows(known_tensor(node), axis):
            found = node
    return found


def _has_rows(tensor: torch.Tensor, axis: int) -> bool:
    """Neighbours along an axis are neighbours in memory, and no element stands for several."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.stride()[axis] == 1 and all(n == 1 or step != 0 for n, step in steps)


def _are_finite(masks: Sequence[Mask]) -> bool:
    """The masks have no hidden row; several large numbers may overflow."""
    return len(masks) == 1 and masks[0].factor <= 1.0 and _is_finite(masks[0].node)


def _is_finite(mask: Node | None) -> bool:
    """The mask is a choice between finite numbers."""
    while mask is not None and packet_name(mask) in _LOOKS:
        mask = mask.args[0] if isinstance(mask.args[0], Node) else None
    if mask is None or packet_name(mask) != "where":
        return False
    numbers = [scalar_of(value) for value in mask.args[1:]]
    return all(isinstance(n, int | float) and math.isfinite(n) for n in numbers)
