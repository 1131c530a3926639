"""Strides of elementwise results: what eager's kernels choose, where a trace would differ.

PyTorch's fake tensors and decompositions give some ops other strides than eager: where operands
have different layouts, and where sizes of one make a tensor contiguous and channels-last at once.
Convolutions and views behind them depend on the difference.
"""

from collections.abc import Callable, Sequence
from functools import reduce, wraps
from typing import Any

import torch
from torch import Tensor

from perfuse.torch_compat.graphs import without_decompositions
from perfuse.torch_compat.ops import OpOverload, schema_of
from perfuse.torch_compat.sizes import has_hint, size_hint

Rule = Callable[..., Any]
_LAST = [0, 2, 3, 1]  # dimensions from the outermost in memory inwards

# Ops whose eager kernels iterate over their tensors, in the order of the arguments.
ELEMENTWISE = """
abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or
bitwise_xor ceil clamp clamp_max clamp_min copysign cos cosh digamma div elu eq erf erfc erfinv exp
exp2 expm1 floor floor_divide fmax fmin fmod frac gcd ge gelu gt hardshrink hardsigmoid hardswish
hardtanh heaviside hypot isinf isnan lcm ldexp le leaky_relu lerp lgamma log log10 log1p log2
logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt maximum minimum mish
mse_loss mul nan_to_num ne neg nextafter pow reciprocal relu remainder round rsqrt sgn sigmoid
sigmoid_backward sign signbit silu sin sinc sinh smooth_l1_loss softplus softshrink special_xlog1py
sqrt square sub tan tanh tanh_backward threshold threshold_backward trunc where xlogy
""".split()

# Ops whose eager kernels write to memory with the layout of their input, like empty_like's.
_LIKE_INPUT = (torch.ops.aten.hardtanh.default, torch.ops.aten.nan_to_num.default)

# Powers of a number, and the op that multiplies by them: the kernel's powers are contiguous.
_POWERS = (torch.ops.aten.pow.Scalar, torch.ops.aten.ldexp.Tensor)


def strided_as_eager(op: OpOverload, rule: Rule | None) -> Rule:
    """A decomposition of an elementwise op: that of `rule`, if any, with eager's strides."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        order = eager_order(operands_of(op, args))
        if order is None:
            return NotImplemented if rule is None else rule(*args, **kwargs)
        if rule is None:
            with without_decompositions():
                return in_order(op(*args, **kwargs), order)
        result = rule(*args, **kwargs)
        return in_order(result, order) if isinstance(result, Tensor) else result

    return decomposed if rule is None else wraps(rule)(decomposed)


def operands_of(op: OpOverload, args: Sequence[Any]) -> list[tuple[list[int], list[int]]] | None:
    """Shapes and strides of the tensors that eager's kernel iterates over; a number is a scalar.

    Sizes that are symbols count as in the call that is traced: they change how long strides are,
    not which is longer. None where the trace is right anyway, and for sizes that nobody knows.
    """
    tensors = [a for a in args if isinstance(a, Tensor)]
    if not all(x.layout is torch.strided and _is_known(x) for x in tensors):
        return None
    if len({tuple(_shape(x)) for x in tensors}) < 2 and all(map(_is_plain, tensors)):
        return None
    dtypes = {x.dtype for x in tensors if x.dim()}
    common = reduce(torch.promote_types, dtypes) if dtypes else None
    found = []
    for argument, value in zip(schema_of(op).arguments, args, strict=False):
        if isinstance(value, Tensor):
            is_converted = value.dim() > 1 and value.dtype != common and value.device.type == "cpu"
            found.append((_shape(value), _converted(value) if is_converted else _strides(value)))
        elif value is not None and (str(argument.type) == "Tensor" or _wraps_numbers(op)):
            found.append(([], []))
    if op in _POWERS and len(found) > 1:
        size = found[1][0]
        found[1] = (size, _strides_of(size, range(len(size))))
    if op in _LIKE_INPUT:
        found.append(([], []))  # as with a number, what is contiguous too is not preferred
    return found


def _shape(x: Tensor) -> list[int]:
    return [size_hint(n) for n in x.shape]


def _strides(x: Tensor) -> list[int]:
    return [size_hint(n) for n in x.stride()]


def _converted(x: Tensor) -> list[int]:
    """The strides of an operand that eager converts before it iterates: a copy without gaps."""
    shape, strides = _shape(x), _strides(x)
    return _strides_of(shape, _sorted_dims(shape, [strides]))


def _strides_of(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """Strides that cover memory once, with dimensions in this order."""
    step, strides = 1, [0] * len(order)
    for d in reversed(order):
        strides[d], step = step, step * shape[d]
    return strides


def _wraps_numbers(op: OpOverload) -> bool:
    """Whether eager makes a tensor of a number: `eq.Scalar` does, `lerp.Scalar` does not."""
    packet, overload = str(op).split(".")[-2:]
    named = ("Scalar", "self_scalar", "other_scalar")
    return overload.startswith(named) and packet != "lerp"


def _is_known(x: Tensor) -> bool:
    return all(has_hint(n) for n in (*x.shape, *x.stride()))


def _is_plain(x: Tensor) -> bool:
    """Contiguous and nothing else."""
    shape, strides = _shape(x), _strides(x)
    is_last = len(shape) == 4 and _is_in_order(shape, strides, _LAST)
    return _is_in_order(shape, strides, range(len(shape))) and not is_last


def eager_order(operands: list[tuple[list[int], list[int]]] | None) -> list[int] | None:
    """The dimensions of eager's result from the outermost in memory inwards; None if unknown.

    Operands of one shape and layout keep it, and contiguous comes first. Otherwise dimensions are
    sorted by the strides of the first operand that tells two of them apart.
    """
    if operands is None:
        return None
    shape = _broadcast([size for size, _ in operands])
    if 0 in shape or len(shape) < 2:
        return None
    plain = list(range(len(shape)))
    if all(size == shape for size, _ in operands):
        if all(_is_in_order(shape, strides, plain) for _, strides in operands):
            return plain
        if len(shape) == 4 and all(_is_in_order(shape, strides, _LAST) for _, strides in operands):
            return _LAST
    return _sorted_dims(shape, [_spread(shape, *operand) for operand in operands])


def _broadcast(shapes: Sequence[Sequence[int]]) -> list[int]:
    """The shape of a result whose operands have these, which are known to fit."""
    ndim = max(map(len, shapes))
    padded = [[1] * (ndim - len(shape)) + list(shape) for shape in shapes]
    return [next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True)]


def _is_in_order(shape: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> bool:
    """Whether memory is covered once, with dimensions in this order."""
    step = 1
    for d in reversed(order):
        if shape[d] != 1 and strides[d] != step:
            return False
        step *= shape[d]
    return True


def _spread(shape: Sequence[int], size: list[int], strides: list[int]) -> list[int]:
    """The strides of an operand that is broadcast: 0 where it is repeated."""
    missing = len(shape) - len(size)
    pairs = zip(size, strides, shape[missing:], strict=True)
    return [0] * missing + [0 if n == 1 and whole != 1 else st for n, st, whole in pairs]


def _sorted_dims(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[int]:
    """An insertion sort, since the comparison does not tell all dimensions apart."""
    order = list(reversed(range(len(shape))))  # the innermost first
    for i in range(1, len(shape)):
        at = i
        for before in reversed(range(i)):
            comparison = _compare(order[before], order[at], shape, strides)
            if comparison < 0:
                break
            if comparison > 0:
                order[before], order[at] = order[at], order[before]
                at = before
    return order[::-1]


def _compare(a: int, b: int, shape: Sequence[int], strides: Sequence[Sequence[int]]) -> int:
    """Whether dimension `a` is inside of `b` (-1), outside (1), or neither."""
    for operand in strides:
        if operand[a] == 0 or operand[b] == 0:
            continue
        if operand[a] != operand[b]:
            return -1 if operand[a] < operand[b] else 1
        if shape[a] > shape[b]:
            return 1
    return 0


def in_order(result: Any, order: Sequence[int]) -> Any:
    """The result with its dimensions in this order in memory."""
    if not isinstance(result, Tensor) or result.dim() != len(order) or not _is_known(result):
        return result
    if _strides(result) == _strides_of(_shape(result), order):
        return result
    laid = result.permute(list(order)).clone(memory_format=torch.contiguous_format)
    return laid.permute([list(order).index(d) for d in range(len(order))])
