"""Views and rearrangements: each says at which source position a result element is found."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.atoms import Division
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim, Index
from perfuse.ir.program import sizes_from_data
from perfuse.lower.builder import Builder, unsqueeze_dims
from perfuse.lower.families.pointwise import in_dtype
from perfuse.lower.promotion import promote
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, cast_tensor, permuted, positions, reindex
from perfuse.torch_compat.sizes import is_known_negative, is_known_place


@lowers("aten.alias.default", "aten.detach.default", "aten.lift_fresh_copy.default",
        "aten.alias_copy.default", "aten.detach_copy.default",
        "aten.positive.default")  # fmt: skip
def alias(builder: Builder, x: Tensor) -> Tensor:
    return x


@lowers("aten.expand.default", "aten.expand_copy.default")
def expand(builder: Builder, x: Tensor, size: Sequence[Dim], implicit: bool = False) -> Tensor:
    lead = len(size) - x.ndim
    shape = [x.shape[i - lead] if isinstance(s, int) and s == -1 else s for i, s in enumerate(size)]
    return builder.broadcast(x, shape)


@lowers("aten.permute.default", "aten.permute_copy.default")
def permute(builder: Builder, x: Tensor, dims: Sequence[int]) -> Tensor:
    return permuted(x, [d % x.ndim for d in dims])


@lowers("aten.transpose.int", "aten.transpose_copy.int", "aten.swapaxes.default")
def transpose(builder: Builder, x: Tensor, a: int, b: int) -> Tensor:
    if x.ndim == 0:
        return x
    order = list(range(x.ndim))
    order[a], order[b] = order[b], order[a]
    return permute(builder, x, order)


@lowers("aten.t.default", "aten.t_copy.default")
def t(builder: Builder, x: Tensor) -> Tensor:
    return x if x.ndim < 2 else transpose(builder, x, 0, 1)


@lowers("aten.unsqueeze.default", "aten.unsqueeze_copy.default")
def unsqueeze(builder: Builder, x: Tensor, dim: int) -> Tensor:
    return unsqueeze_dims(x, [dim % (x.ndim + 1)])


@lowers("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims",
        "aten.squeeze_copy.default", "aten.squeeze_copy.dim", "aten.squeeze_copy.dims")  # fmt: skip
def squeeze(builder: Builder, x: Tensor, dim: Any = None) -> Tensor:
    if x.ndim == 0:
        return x
    if dim is None:
        chosen = set(range(x.ndim))
    else:
        chosen = {d % x.ndim for d in (dim if isinstance(dim, list | tuple) else [dim])}
    gone = {d for d in chosen if x.shape[d] == 1}
    shape = [s for i, s in enumerate(x.shape) if i not in gone]
    at = iter(positions(shape))
    return reindex(x, shape, [0 if i in gone else next(at) for i in range(x.ndim)])


@lowers("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default",
        "aten.view_copy.default", "aten._reshape_copy.default")  # fmt: skip
def reshape(builder: Builder, x: Tensor, size: Sequence[Dim]) -> Tensor:
    shape = _with_inferred(x, size)
    if len(shape) == x.ndim and all(a == b for a, b in zip(shape, x.shape, strict=True)):
        return x
    source = reshaped_position(x.shape, shape)
    if _is_tangled(source) and x.value.cost:
        # Quotients of variables in every load would slow the loop: read the value back instead.
        x = builder.realize(x)
    return reindex(x, shape, source)


def _with_inferred(x: Tensor, size: Sequence[Dim]) -> list[Dim]:
    shape = list(size)
    for i, s in enumerate(shape):
        if isinstance(s, int) and s == -1:
            rest = ix.product([d for j, d in enumerate(shape) if j != i])
            shape[i] = ix.floordiv(x.numel, rest) if rest != 0 else 0
    return shape


def reshaped_position(old: Sequence[Dim], new: Sequence[Dim]) -> list[Dim]:
    """The index in the old shape of each element of the new one, dimension by dimension.

    Dimensions are matched in groups of equal products first, so that quotients and remainders
    appear only where sizes really split or merge.
    """
    at = positions(new)
    source: list[Dim] = []
    i = j = 0
    while i < len(old):
        group_old, group_new = [i], []
        have: Dim = old[i]
        want: Dim = 1
        i += 1
        while j < len(new) and want != have:
            want = ix.mul(want, new[j])
            group_new.append(j)
            j += 1
            while isinstance(want, int) and isinstance(have, int) and want > have and i < len(old):
                have = ix.mul(have, old[i])
                group_old.append(i)
                i += 1
        if want != have:
            return _flat_position(old, new)
        source += _split_flat(
            [old[g] for g in group_old],
            ix.flat([new[g] for g in group_new], [at[g] for g in group_new]),
        )
    return source


def _split_flat(sizes: Sequence[Dim], flat: Dim) -> list[Dim]:
    parts: list[Dim] = []
    step: Dim = 1
    for k, size in enumerate(reversed(sizes)):
        part = ix.floordiv(flat, step) if step != 1 else flat
        last = k == len(sizes) - 1
        parts.append(part if last else ix.mod(part, size) if size != 0 else 0)
        step = ix.mul(step, size if size != 0 else 1)
    return parts[::-1]


def _flat_position(old: Sequence[Dim], new: Sequence[Dim]) -> list[Dim]:
    if any(s == 0 for s in (*old, *new)):
        return [0] * len(old)
    return _split_flat(old, ix.flat(new, positions(new)))


def _is_tangled(source: Sequence[Dim]) -> bool:
    monomials = [m for s in source if isinstance(s, Index) for m, _ in s.terms]
    return any(isinstance(atom, Division) for monomial in monomials for atom in monomial)


def clamp_slice(start: Any, end: Any, size: Dim, length: Dim | None = None) -> tuple[Dim, Dim]:
    """Python's slice rules for one dimension.

    With bounds that only a call has, a slice whose `length` is their distance is inside.
    """
    if length is not None and isinstance(start, ix.Index) and isinstance(end, ix.Index):
        if ix.is_nonnegative(start) and ix.add(end, ix.mul(start, -1)) == length:
            return start, end

    def wrapped(given: Any, default: Dim) -> Dim:
        if given is None:
            return default
        if isinstance(given, int) and given >= 2**62:
            return size
        value: Dim = given + size if isinstance(given, int) and given < 0 else given
        if isinstance(value, int) and isinstance(size, int):
            return min(max(value, 0), size)
        if isinstance(value, int) and value <= 0:
            return 0
        if ix.is_nonnegative(size - value) and ix.is_nonnegative(value):
            return value
        raise CannotLower("slice bound that cannot be compared with the size")

    first, last = wrapped(start, 0), wrapped(end, size)
    if isinstance(first, int) and isinstance(last, int):
        last = max(first, last)
    return first, last


@lowers("aten.slice.Tensor", "aten.slice_copy.Tensor")
def slice_(
    builder: Builder, x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Tensor:
    dim %= x.ndim
    first, last = clamp_slice(start, end, x.shape[dim])
    length = ix.floordiv(last - first + step - 1, step)
    shape = [*x.shape[:dim], length, *x.shape[dim + 1 :]]
    source = list(positions(shape))
    source[dim] = ix.add(ix.mul(source[dim], step), first)
    return reindex(x, shape, source)


def place_along(builder: Builder, index: Dim, size: Dim) -> Dim:
    """Where an index, the last argument, is along an axis of the first, which is the one before.

    Below zero it counts from the end. The host checks what tracing did not compare with the size,
    and an index that depends on data.
    """
    traced, axis, number = (builder.arguments[place] for place in (0, -2, -1))
    if isinstance(index, int):
        place = ix.add(index, size) if index < 0 else index
        if not ix.is_nonnegative(place if index < 0 else size - 1 - index):
            builder.symbols.check_place(index, traced.shape[axis])
        return place
    if sizes_from_data([index]) or not is_known_place(number, traced.shape[axis]):
        return builder.symbols.place(number, traced.shape[axis])
    return ix.add(index, size) if is_known_negative(number) else index


@lowers("aten.select.int", "aten.select_copy.int")
def select(builder: Builder, x: Tensor, dim: int, index: Any) -> Tensor:
    dim %= x.ndim
    return _selected(x, dim, place_along(builder, index, x.shape[dim]))


def _selected(x: Tensor, dim: int, index: Dim) -> Tensor:
    """The elements at one place along an axis."""
    shape = [s for i, s in enumerate(x.shape) if i != dim]
    source = list(positions(shape))
    source.insert(dim, index)
    return reindex(x, shape, source)


@lowers("aten.flip.default")
def flip(builder: Builder, x: Tensor, dims: Sequence[int]) -> Tensor:
    source = list(positions(x.shape))
    for d in dims if x.ndim else ():
        d %= x.ndim
        source[d] = ix.add(ix.add(x.shape[d], -1), ix.mul(source[d], -1))
    return reindex(x, x.shape, source)


@lowers("aten.split.Tensor", "aten.split_with_sizes.default", "aten.split_with_sizes_copy.default",
        "aten.split_copy.Tensor")  # fmt: skip
def split(builder: Builder, x: Tensor, sizes: Any, dim: int = 0) -> list[Tensor]:
    if not isinstance(sizes, list | tuple):
        total = x.shape[dim]
        if not isinstance(total, int) or not isinstance(sizes, int):
            raise CannotLower("split of a dynamic size")
        count = max(-(-total // sizes), 1) if sizes else 1
        sizes = [min(sizes, total - sizes * i) for i in range(count)]
    parts, start = [], 0
    for size in sizes:
        parts.append(slice_(builder, x, dim, start, ix.add(start, size)))
        start = ix.add(start, size)  # type: ignore[assignment]
    return parts


@lowers("aten.unbind.int", "aten.unbind_copy.int")
def unbind(builder: Builder, x: Tensor, dim: int = 0) -> list[Tensor]:
    size = x.shape[dim]
    if not isinstance(size, int):
        raise CannotLower("unbind of a dynamic size")
    return [_selected(x, dim % x.ndim, i) for i in range(size)]


@lowers("aten.diagonal.default", "aten.diagonal_copy.default")
def diagonal(builder: Builder, x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    a, b = dim1 % x.ndim, dim2 % x.ndim
    rows, cols = x.shape[a], x.shape[b]
    if not isinstance(rows, int) or not isinstance(cols, int):
        raise CannotLower("diagonal of a dynamic size")
    length = max(min(rows, cols - offset) if offset >= 0 else min(rows + offset, cols), 0)
    shape = [s for i, s in enumerate(x.shape) if i not in (a, b)] + [length]
    at = list(positions(shape))
    rest = iter(at[:-1])
    source = [
        at[-1] + max(-offset, 0) if i == a else at[-1] + max(offset, 0) if i == b else next(rest)
        for i in range(x.ndim)
    ]
    return reindex(x, shape, source)


@lowers("aten.unfold.default", "aten.unfold_copy.default")
def unfold(builder: Builder, x: Tensor, dim: int, size: int, step: int) -> Tensor:
    if x.ndim == 0:
        return Tensor((size,), x.dtype, x.value)
    dim %= x.ndim
    count = ix.add(ix.floordiv(ix.add(x.shape[dim], -size), step), 1)
    shape = [*x.shape, size]
    shape[dim] = count
    at = list(positions(shape))
    at[dim] = ix.add(ix.mul(at[dim], step), at[-1])
    return reindex(x, shape, at[:-1])


@lowers("aten.repeat.default")
def repeat(builder: Builder, x: Tensor, repeats: Sequence[Dim]) -> Tensor:
    x = builder.realize(x) if x.value.cost >= 4 else x
    padded = unsqueeze_dims(x, list(range(len(repeats) - x.ndim)))
    shape = [ix.mul(s, r) for s, r in zip(padded.shape, repeats, strict=True)]
    if any(s == 0 for s in shape):
        return Tensor(tuple(shape), x.dtype, ex.const(0, x.dtype.compute))
    at = positions(shape)
    return reindex(padded, shape, [ix.mod(p, s) for p, s in zip(at, padded.shape, strict=True)])


@lowers("aten.roll.default")
def roll(builder: Builder, x: Tensor, shifts: Any, dims: Any = ()) -> Tensor:
    shifts = list(shifts) if isinstance(shifts, list | tuple) else [shifts]
    dims = list(dims) if isinstance(dims, list | tuple) else [dims]
    if not dims:
        flat = reshape(builder, x, [x.numel])
        return reshape(builder, roll(builder, flat, shifts, [0]), x.shape)
    source = list(positions(x.shape))
    for shift, d in zip(shifts, dims, strict=True):
        size = x.shape[d]
        if size == 0:
            return x
        source[d] = ix.mod(ix.add(source[d], ix.mod(ix.mul(shift, -1), size)), size)
    return reindex(x, x.shape, source)


def guarded(value: Expr, mask: Expr, fill: Expr) -> Expr:
    """The value where the mask holds, `fill` elsewhere, touching memory only where it holds."""
    return ex.apply("where", mask, ex.guard_loads(value, mask), fill)


@lowers("aten.constant_pad_nd.default")
def constant_pad(builder: Builder, x: Tensor, pad: Sequence[int], value: Any = 0) -> Tensor:
    shape = list(x.shape)
    before: list[Dim] = [0] * x.ndim
    for k in range(len(pad) // 2):
        d = x.ndim - 1 - k
        cropped = [n for n in pad[2 * k : 2 * k + 2] if isinstance(n, int) and n < 0]
        if isinstance(size := x.shape[d], int) and size + sum(cropped) < 0:
            raise CannotLower("it crops more than there is, which ATen refuses")
        shape[d] = ix.add(shape[d], ix.add(pad[2 * k], pad[2 * k + 1]))
        before[d] = pad[2 * k]
    (value,) = in_dtype(x.dtype, value)
    fill = ex.cast(ex.const(value, DType.F64 if x.dtype.is_float else DType.I64), x.dtype)
    if isinstance(value, float) and x.dtype.is_int:
        fill = ex.const(int(value), x.dtype)
    if any(s == 0 for s in x.shape):
        return Tensor(tuple(shape), x.dtype, fill)
    at = positions(shape)
    source = [ix.add(p, ix.mul(b, -1)) for p, b in zip(at, before, strict=True)]
    inner = reindex_unchecked(x, shape, source)
    return Tensor(tuple(shape), x.dtype, guarded(inner.value, all_inside(source, x.shape), fill))


def inside(position: Dim, size: Dim) -> Expr:
    """0 <= position < size, leaving out what cannot fail."""
    at, low, high = ex.index_value(position), *ix.bounds(position)
    mask = ex.const(True, DType.BOOL)
    if not ix.is_nonnegative(low):
        mask = ex.apply("land", mask, ex.apply("ge", at, ex.const(0, DType.I64)))
    if high is None or not ix.is_nonnegative(ix.add(ix.add(size, ix.mul(high, -1)), -1)):
        mask = ex.apply("land", mask, ex.apply("lt", at, ex.index_value(size)))
    return mask


def all_inside(at: Sequence[Dim], sizes: Sequence[Dim]) -> Expr:
    return reduce(partial(ex.apply, "land"), map(inside, at, sizes), ex.const(True, DType.BOOL))


def reindex_unchecked(x: Tensor, shape: Sequence[Dim], source: Sequence[Dim]) -> Tensor:
    """A view whose positions may leave the source where a mask forbids the access."""
    source = [0 if size == 1 else s for s, size in zip(source, x.shape, strict=True)]
    return reindex(x, shape, source)


@lowers("aten.cat.default", "aten.concat.default")
def cat(builder: Builder, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    parts = [t for t in tensors if not (t.ndim == 1 and t.shape[0] == 0)] or [tensors[0]]
    dtype = promote(*tensors)
    parts = [cast_tensor(p, dtype) for p in parts]
    dim %= max(parts[0].ndim, 1)
    if len(parts) == 1:
        return parts[0]
    shape = list(parts[0].shape)
    shape[dim] = sum(p.shape[dim] for p in parts)
    if builder.is_gpu and _can_choose(parts):
        return _chosen_parts(parts, shape, dim)
    buffer = builder.new_buffer(dtype, shape)
    start: Dim = 0
    for part in parts:
        at = list(positions(part.shape))
        at[dim] = ix.add(at[dim], start)
        builder.store(part, buffer, buffer.index(tuple(at)))
        start = ix.add(start, part.shape[dim])
    return builder.tensor_of(buffer)


# Each element evaluates every part: a few cheap ones cost less than going through memory.
_MOST_CHOSEN, _CHOSEN_COST = 4, 24


def _can_choose(parts: Sequence[Tensor]) -> bool:
    is_cheap = sum(p.value.cost + p.value.num_loads for p in parts) <= _CHOSEN_COST
    return len(parts) <= _MOST_CHOSEN and is_cheap and all(0 not in p.shape for p in parts)


def _chosen_parts(parts: Sequence[Tensor], shape: Sequence[Dim], dim: int) -> Tensor:
    """A cat as a formula: the part that contains an element, by its position."""
    at = list(positions(shape))
    end = shape[dim]
    value: Expr | None = None
    for part in reversed(parts):
        start = ix.add(end, ix.mul(part.shape[dim], -1))
        source = list(at)
        source[dim] = ix.add(at[dim], ix.mul(start, -1))
        own = reindex_unchecked(part, shape, source).value
        position = ex.index_value(at[dim])
        held = below = ex.apply("lt", position, ex.index_value(end))
        if start != 0:
            held = ex.apply("land", ex.apply("ge", position, ex.index_value(start)), below)
        own = ex.guard_loads(own, held)
        value = own if value is None else ex.apply("where", below, own, value)
        end = start
    assert value is not None
    return Tensor(tuple(shape), parts[0].dtype, value)


@lowers("aten.stack.default")
def stack(builder: Builder, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    at = dim % (tensors[0].ndim + 1)
    return cat(builder, [unsqueeze_dims(t, [at]) for t in tensors], at)
