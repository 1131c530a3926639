"""Where a graph computes attention by hand: softmax(q @ k^T * scale + masks) @ v, in ATen's calls.

The search walks back from the last matmul. Every step goes into `inner`; a match needs all
uses of those to be inner as well, since what is used elsewhere has to be computed anyway. So a
training forward, whose softmax is saved for the backward, does not match.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from perfuse.graph.facts import is_same_shape, is_same_size, packet_name, tensor_of
from perfuse.graph.rewrite import dtype_of, scalar_of
from perfuse.torch_compat.ops import has_fast_matmuls

RESHAPES = ("view", "_unsafe_view")
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32})
_MOST_HALF_KEYS = 128  # for which our kernel beats fast matmuls of halves, see attention.py
_SOFTMAX = ("mul", "exp", "reciprocal", "sum", "sub", "amax")  # as decompose_softmax.py spells it


@dataclass(frozen=True, slots=True)
class Mask:
    """A summand of scores: a tensor times a number."""

    node: Node
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Attention:
    """The operands of the fused kernel, and the nodes it replaces."""

    query: Node
    key: Node  # the second operand of the first product: still transposed
    value: Node
    scale: float
    masks: tuple[Mask, ...]
    scores: Node  # of the shape that the masks fit
    product: Node  # the last one: its result is what the kernel computes
    inner: frozenset[Node]

    @property
    def operands(self) -> tuple[Node, Node, Node]:
        return self.query, self.key, self.value

    @property
    def leaves(self) -> tuple[Node, ...]:
        return (*self.operands, *(mask.node for mask in self.masks))


def match_attention(product: Node, has_fast_halves: bool = False) -> Attention | None:
    """The attention that ends in this matmul, if the kernel can compute it and is worth it."""
    walk = _Walk()
    weights = walk.through_casts(walk.through_reshapes(_input(product, 0)))
    logits = walk.through_softmax(weights)
    if logits is None:
        return None
    scores = walk.through_casts(logits)
    for sum_ in _sums(_Sum(scores, walk)):
        match = _match_scores(product, scores, sum_)
        if match is not None and _is_supported(match, has_fast_halves):
            return match
    return None


@dataclass(frozen=True, slots=True)
class _Sum:
    """Scores as a factor of one summand, still to be walked through, and the others."""

    first: Node | None
    walk: "_Walk"
    factor: float = 1.0
    masks: tuple[Mask, ...] = ()


def _sums(given: _Sum) -> Iterator[_Sum]:
    """How scores may be a scaled product plus masks, either way round."""
    walk = given.walk.copy()
    node, factor = walk.through_scale(given.first)
    total = given.factor * factor
    here = replace(given, first=node, walk=walk, factor=total)
    if packet_name(node) != "add" or node is None:
        yield here
        return
    for first, mask in _summands(node):
        inside = walk.copy()
        inside.inner.add(node)
        yield from _sums(_Sum(first, inside, total, (*here.masks, Mask(mask, total))))


def _match_scores(product: Node, scores: Node | None, sum_: _Sum) -> Attention | None:
    """The match in which the first summand is the matmul of queries and keys."""
    walk = sum_.walk
    node = walk.through_reshapes(sum_.first)
    node, inside = walk.through_scale(node)
    value = _input(product, 1)
    if packet_name(node) != "bmm" or node is None or scores is None or value is None:
        return None
    walk.inner.add(node)
    query, by_query = walk.through_own_scale(_input(node, 0))
    key, by_key = walk.through_own_scale(_input(node, 1))
    if query is None or key is None:
        return None
    return Attention(
        query=query,
        key=key,
        value=value,
        scale=sum_.factor * inside * by_query * by_key,
        masks=sum_.masks,
        scores=scores,
        product=product,
        inner=frozenset(walk.inner),
    )


@dataclass(slots=True)
class _Walk:
    """Steps back through the graph, and what was passed on the way. None is a dead end."""

    inner: set[Node] = field(default_factory=set)

    def copy(self) -> "_Walk":
        return _Walk(set(self.inner))

    def _back(self, node: Node) -> Node | None:
        self.inner.add(node)
        return _input(node, 0)

    def through_reshapes(self, node: Node | None) -> Node | None:
        """Views that only split or join batches, and copies."""
        while node is not None and packet_name(node) in (*RESHAPES, "clone") and _keeps_rows(node):
            node = self._back(node)
        return node

    def through_casts(self, node: Node | None) -> Node | None:
        """Casts between float types, as they stand around a softmax in float32."""
        while node is not None and packet_name(node) == "_to_copy":
            if not {dtype_of(node), dtype_of(_input(node, 0))} <= _FLOATS:
                break
            node = self._back(node)
        return node

    def through_scale(self, node: Node | None) -> tuple[Node | None, float]:
        """The operand of a multiplication or division by a number, and the factor; else 1."""
        name = packet_name(node)
        if node is None or name not in ("mul", "div") or len(node.args) != 2 or node.kwargs:
            return node, 1.0
        for i in (0, 1) if name == "mul" else (0,):
            other, factor = _input(node, i), _factor(name, node.args[1 - i])
            if factor is not None and _is_alike(other, node):
                self.inner.add(node)
                return other, factor
        return node, 1.0

    def through_own_scale(self, operand: Node | None) -> tuple[Node | None, float]:
        """Likewise, for what may stay scaled as it is where others use it too."""
        is_own = operand is not None and len(operand.users) == 1
        return self.through_scale(operand) if is_own else (operand, 1.0)

    def through_softmax(self, node: Node | None) -> Node | None:
        """The operand of a softmax over the last axis: one op, or its decomposition."""
        if node is None:
            return None
        if packet_name(node) == "_softmax":
            return self._back(node) if node.args[1] in (-1, _rank(node) - 1) else None
        exp, inverse = _input(node, 0), _input(node, 1)
        total, shifted = _input(inverse, 0), _input(exp, 0)
        logits, largest = _input(shifted, 0), _input(shifted, 1)
        chain = (node, exp, inverse, total, shifted, largest)
        if tuple(map(packet_name, chain)) != _SOFTMAX:
            return None
        is_row = _is_over_last_axis(total) and _is_over_last_axis(largest)
        if not is_row or _input(total, 0) is not exp or _input(largest, 0) is not logits:
            return None
        self.inner.update(n for n in chain if n is not None)
        return logits


def _summands(scores: Node) -> list[tuple[Node, Node]]:
    """The operands of a sum, either way round, where the first has the sum's shape."""
    if len(scores.args) != 2 or scores.kwargs:
        return []
    a, b = _input(scores, 0), _input(scores, 1)
    if a is None or b is None:
        return []
    return [(x, y) for x, y in ((a, b), (b, a)) if _is_alike(x, scores)]


def _is_supported(match: Attention, has_fast_halves: bool) -> bool:
    """The kernel accepts these operands, is faster, and nothing inside is used elsewhere."""
    if not _has_fit_types(match, has_fast_halves) or not _has_fit_sizes(match):
        return False
    if not all(_is_worth_storing(mask.node, match.scores) for mask in match.masks):
        return False
    inside = match.inner | {match.product}
    return all(user in inside for node in match.inner for user in node.users)


def _has_fit_types(match: Attention, has_fast_halves: bool) -> bool:
    """All of one float type, on the CPU, for which the library has no faster matmuls."""
    tensors = [tensor_of(node) for node in (*match.leaves, match.product)]
    types = {None if t is None else (t.dtype, t.device.type) for t in tensors}
    dtype = dtype_of(match.query)
    if dtype is None or types != {(dtype, "cpu")} or dtype not in _FLOATS:
        return False
    if dtype == torch.float32 or not has_fast_matmuls(dtype):
        return True
    num_keys = tensors[1].shape[-1] if tensors[1] is not None else None
    return has_fast_halves and isinstance(num_keys, int) and num_keys <= _MOST_HALF_KEYS


def _has_fit_sizes(match: Attention) -> bool:
    """Heads of one size, and rows that are rows all the way."""
    query, value = tensor_of(match.query), tensor_of(match.value)
    scores = tensor_of(match.scores)
    if query is None or value is None or scores is None or scores.dim() not in (3, 4):
        return False
    if any(not 1 <= _rank(mask.node) <= scores.dim() for mask in match.masks):
        return False
    has_rows = is_same_size(scores.shape[-2], query.shape[-2])
    return has_rows and is_same_size(query.shape[-1], value.shape[-1])


def _is_worth_storing(mask: Node, scores: Node) -> bool:
    """A mask as large as the scores, made for them alone, is better made where it is added."""
    return len(mask.users) > 1 or mask.op != "call_function" or not _is_alike(mask, scores)


def _input(node: Node | None, i: int) -> Node | None:
    """The i-th argument, where it is a node."""
    found = node.args[i] if node is not None and len(node.args) > i else None
    return found if isinstance(found, Node) else None


def _rank(node: Node) -> int:
    tensor = tensor_of(node)
    return 0 if tensor is None else tensor.dim()


def _is_alike(a: Node | None, b: Node) -> bool:
    """One type and one shape."""
    x, y = tensor_of(a), tensor_of(b)
    return x is not None and y is not None and x.dtype == y.dtype and is_same_shape(x, y)


def _factor(name: str, number: Any) -> float | None:
    """The factor of a multiplication or division by a number; positive and finite."""
    scalar = scalar_of(number)
    if not isinstance(scalar, int | float) or not math.isfinite(scalar) or scalar <= 0:
        return None
    return float(scalar) if name == "mul" else 1.0 / scalar


def _keeps_rows(node: Node) -> bool:
    """The last two axes are those of the source."""
    new, old = tensor_of(node), tensor_of(_input(node, 0))
    if new is None or old is None or new.dim() < 3 or old.dim() < 3:
        return False
    return all(map(is_same_size, new.shape[-2:], old.shape[-2:]))


def _is_over_last_axis(reduction: Node | None) -> bool:
    """`op(x, [-1], keepdim=True)`, and nothing more."""
    if reduction is None or len(reduction.args) != 3 or reduction.kwargs:
        return False
    _, axes, is_kept = reduction.args
    last = (-1, _rank(reduction) - 1)
    is_last = isinstance(axes, list | tuple) and len(axes) == 1 and axes[0] in last
    return is_last and is_kept is True
