"""Algebra on single nodes: each rule is exact, bit for bit, NaN, infinities and -0.0 included.

What is not here, and why: x + 0 for floats (-0.0 + 0 is 0.0), x * 0 (a NaN or an infinity stays),
x - x, x / x, and a sum over an axis of one float (eager's sum starts at +0.0, so it too turns
-0.0 into 0.0).
"""

import math
from typing import Any

import torch
from torch.fx import GraphModule, Node

from perfuse.graph.facts import is_same_shape, is_same_size, packet_name, tensor_of
from perfuse.graph.rewrite import NodeBuilder, Rule, dtype_of, index_rules, rewrite, scalar_of

aten = torch.ops.aten

_INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_WIDE_FLOATS = (torch.float32, torch.float64)
_HALVES = (torch.float16, torch.bfloat16)

_RESHAPES = (aten.view.default, aten._unsafe_view.default)  # not view.dtype: it changes bits

# From a type to those that hold all of its values: a cast through them changes nothing.
EXACT_CASTS: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.bool: (*_INTS, *_HALVES, *_WIDE_FLOATS),
    torch.uint8: (torch.int16, torch.int32, torch.int64, *_HALVES, *_WIDE_FLOATS),
    torch.int8: (torch.int16, torch.int32, torch.int64, *_HALVES, *_WIDE_FLOATS),
    torch.int16: (torch.int32, torch.int64, *_WIDE_FLOATS),
    torch.int32: (torch.int64, torch.float64),
    torch.float8_e4m3fn: (*_HALVES, *_WIDE_FLOATS),
    torch.float8_e5m2: (*_HALVES, *_WIDE_FLOATS),
    torch.float16: _WIDE_FLOATS,
    torch.bfloat16: _WIDE_FLOATS,
    torch.float32: (torch.float64,),
}


def _is_number(value: Any, number: int) -> bool:
    scalar = scalar_of(value)
    return scalar is not None and not isinstance(scalar, complex) and scalar == number


def _first(node: Node) -> Node | None:
    return node.args[0] if node.args and isinstance(node.args[0], Node) else None


def _other(node: Node, number: int) -> Node | None:
    """Of two factors, the one that is left when the other is `number`."""
    if len(node.args) != 2 or node.kwargs:
        return None
    a, b = node.args
    if isinstance(a, Node) and _is_number(b, number):
        return a
    return b if isinstance(b, Node) and _is_number(a, number) else None


def add_zero(node: Node, build: NodeBuilder) -> Node | None:
    return _other(node, 0) if dtype_of(node) in _INTS else None


def subtract_zero(node: Node, build: NodeBuilder) -> Node | None:
    if len(node.args) != 2 or node.kwargs or not _is_number(node.args[1], 0):
        return None
    zero = scalar_of(node.args[1])
    # x - (-0.0) is x + 0.0, which loses the sign of -0.0.
    is_negative = isinstance(zero, float) and math.copysign(1.0, zero) < 0
    return None if is_negative else _first(node)


def divide_one(node: Node, build: NodeBuilder) -> Node | None:
    is_plain = len(node.args) == 2 and not node.kwargs
    return _first(node) if is_plain and _is_number(node.args[1], 1) else None


def small_power(node: Node, build: NodeBuilder) -> Node | None:
    x = _first(node)
    exponent = node.args[1] if len(node.args) > 1 else None
    if x is None or not isinstance(exponent, (int, float)) or isinstance(exponent, bool):
        return None
    if exponent == 1:
        return x
    # Eager's pow computes x*x too. A cube in half precision would round twice: not the same.
    if exponent == 2:
        return build.call(node, aten.mul.Tensor, x, x)
    if exponent == 3 and dtype_of(x) in _WIDE_FLOATS:
        return build.call(node, aten.mul.Tensor, build.call(node, aten.mul.Tensor, x, x), x)
    if exponent == 0.5 and dtype_of(x) in _WIDE_FLOATS:
        return build.call(node, aten.sqrt.default, x)
    return None


def twice_the_same(node: Node, build: NodeBuilder) -> Node | None:
    """For an op that undoes itself: f(f(x)) -> x."""
    inner = idempotent(node, build)
    return None if inner is None else _first(inner)


def idempotent(node: Node, build: NodeBuilder) -> Node | None:
    """f(f(x)) -> f(x)."""
    inner = _first(node)
    return inner if inner is not None and inner.target == node.target else None


def _permutation(node: Node) -> list[int] | None:
    """The axes of the source in the order of the result, for any spelling of a permutation."""
    tensor, name = tensor_of(node), packet_name(node)
    if tensor is None:
        return None
    axes = list(range(tensor.dim()))
    if name == "permute" and isinstance(node.args[1], (list, tuple)):
        return [int(axis) % max(len(axes), 1) for axis in node.args[1]]  # type: ignore[arg-type]
    if name == "t":
        return axes[::-1]
    if name == "transpose" and isinstance(node.args[1], int) and isinstance(node.args[2], int):
        a, b = node.args[1], node.args[2]
        if axes:
            axes[a], axes[b] = axes[b], axes[a]
        return axes
    return None


def joined_permutations(node: Node, build: NodeBuilder) -> Node | None:
    inner, outer_axes = _first(node), _permutation(node)
    if inner is None or outer_axes is None:
        return None
    if outer_axes == sorted(outer_axes):
        return inner
    inner_axes, source = _permutation(inner), _first(inner)
    if inner_axes is None or source is None:
        return None
    axes = [inner_axes[axis] for axis in outer_axes]
    if axes == sorted(axes):
        return source
    return build.call(node, aten.permute.default, source, axes)


def view_of_view(node: Node, build: NodeBuilder) -> Node | None:
    inner = _first(node)
    if inner is None or node.target not in _RESHAPES or inner.target not in _RESHAPES:
        return None
    source, tensor = _first(inner), tensor_of(_first(inner))
    if tensor is None or any(not isinstance(size, int) for size in tensor.shape):
        return None
    if not tensor.is_contiguous():
        return None  # strides decide whether one view suffices; contiguous ones always do
    return build.call(node, aten.view.default, source, node.args[1])


def same_view(node: Node, build: NodeBuilder) -> Node | None:
    """A view that shows all of its source, in place: what is offered is checked to be so."""
    source = _first(node)
    a, b = tensor_of(node), tensor_of(source)
    return source if a is not None and b is not None and is_same_shape(a, b) else None


def expand_of_expand(node: Node, build: NodeBuilder) -> Node | None:
    inner = _first(node)
    if inner is None or packet_name(inner) != "expand":
        return None
    source = _first(inner)
    sizes = node.args[1]
    if source is None or not isinstance(sizes, (list, tuple)) or any(s == -1 for s in sizes):
        return None  # -1 keeps the inner expansion's size
    return build.call(node, aten.expand.default, source, list(sizes))


def whole_slice(node: Node, build: NodeBuilder) -> Node | None:
    step = node.args[4] if len(node.args) > 4 else 1
    return same_view(node, build) if step == 1 else None


def _is_float8(dtype: Any) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize == 1


def cast_of_cast(node: Node, build: NodeBuilder) -> Node | None:
    inner = _first(node)
    if inner is None or packet_name(inner) != "_to_copy":
        return None
    source = _first(inner)
    if source is None or set(node.kwargs) != {"dtype"} or set(inner.kwargs) != {"dtype"}:
        return None
    start, middle = dtype_of(source), dtype_of(inner)
    if start is None or middle not in EXACT_CASTS.get(start, ()):
        return None
    end = node.kwargs["dtype"]
    if start == end:
        return source
    if _is_float8(start) and _is_float8(end):
        return None  # written out, it is allowed; as one cast it may be refused
    return build.call(node, aten._to_copy.default, source, dtype=end)


def known_condition(node: Node, build: NodeBuilder) -> Node | None:
    if len(node.args) != 3:
        return None
    truth = scalar_of(node.args[0])
    if not isinstance(truth, bool):
        return None
    chosen = node.args[1] if truth else node.args[2]
    return chosen if isinstance(chosen, Node) else None


def same_choice(node: Node, build: NodeBuilder) -> Node | None:
    is_same = len(node.args) == 3 and node.args[1] is node.args[2]
    return node.args[1] if is_same and isinstance(node.args[1], Node) else None


def cat_of_one(node: Node, build: NodeBuilder) -> Node | None:
    parts = node.args[0]
    if not isinstance(parts, (list, tuple)) or len(parts) != 1:
        return None
    return parts[0] if isinstance(parts[0], Node) else None


def reduction_of_ones(node: Node, build: NodeBuilder) -> Node | None:
    """A sum, maximum or minimum over axes of size 1 is its only element."""
    source, x = _first(node), tensor_of(_first(node))
    given = node.args[1] if len(node.args) > 1 else None
    if not isinstance(given, (list, tuple)) or not given or x is None or x.dim() == 0:
        return None
    if packet_name(node) == "sum" and dtype_of(node) not in _INTS:
        return None
    axes = [int(axis) % x.dim() for axis in given]
    if not all(is_same_size(x.shape[axis], 1) for axis in axes):
        return None
    is_kept = len(node.args) > 2 and node.args[2]
    return source if is_kept else build.call(node, aten.squeeze.dims, source, axes)


VIEWS = ("view", "_unsafe_view", "expand", "squeeze", "unsqueeze", "alias")
COPIES = ("clone", "_to_copy", "contiguous", "_unsafe_view")
SELF_INVERSE = ("neg", "bitwise_not", "logical_not")
IDEMPOTENT = ("relu", "abs", "floor", "ceil", "trunc", "sign")

RULES = (
    Rule("x + 0 -> x, for integers", ("add",), add_zero),
    Rule("x - 0 -> x", ("sub",), subtract_zero),
    Rule("x * 1 -> x", ("mul",), lambda node, _: _other(node, 1)),
    Rule("x / 1 -> x", ("div",), divide_one),
    Rule("x**1 -> x, x**2 -> x*x, x**3, x**0.5 -> sqrt(x)", ("pow",), small_power),
    Rule("-(-x) -> x", SELF_INVERSE, twice_the_same),
    Rule("relu(relu(x)) -> relu(x)", IDEMPOTENT, idempotent),
    Rule("permutations in a row are one", ("permute", "transpose", "t"), joined_permutations),
    Rule("views in a row are one", ("view", "_unsafe_view"), view_of_view),
    Rule("expand of expand is one", ("expand",), expand_of_expand),
    Rule("a view in place -> x", VIEWS, same_view),
    Rule("a slice of everything -> x", ("slice",), whole_slice),
    # Only the memory is new, which the loop looks after.
    Rule("a copy that changes nothing -> x", COPIES, lambda node, _: _first(node)),
    Rule("exact cast, then cast -> one cast", ("_to_copy",), cast_of_cast),
    Rule("where(true, a, b) -> a", ("where",), known_condition),
    Rule("where(c, a, a) -> a", ("where",), same_choice),
    Rule("cat([x]) -> x", ("cat",), cat_of_one),
    Rule("a reduction over axes of one -> x", ("sum", "amax", "amin"), reduction_of_ones),
)

_INDEXED = index_rules(RULES)


def simplify(gm: GraphModule) -> GraphModule:
    """The pass: every rule applied until none fits."""
    return rewrite(gm, _INDEXED)
