"""The parts of a random program: rows of (weight, kind, text).

In a text, `{x}`, `{y}` and `{z}` are operands, `{d}` a dimension of x, `{k}` keepdim, `{n}` a small
number, `{i}` an integer operand used as index, `{m}` a bool operand, `{to}` a dtype.

A kind says what the row does to exactness. Rounding may differ between eager and a compiler, so a
step (floor, a comparison, a cast to an integer) may only follow values that were never rounded:

- `round`: a continuous function; the result is rounded
- `keep`: moves or selects values, or computes in integers; the result is as exact as the operands
- `step`: a discontinuous function; asks for exact operands and gives an exact result
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpRow:
    weight: int
    kind: str
    text: str
    is_float: bool = False  # wants a floating operand


def _rows(weight: int, kind: str, *texts: str, is_float: bool = False) -> tuple[OpRow, ...]:
    return tuple(OpRow(weight, kind, t, is_float) for t in texts)


UNARY = _rows(
    2,
    "round",
    "torch.exp(-{x}.abs())",
    "torch.tanh({x})",
    "torch.sigmoid({x})",
    "torch.sin({x})",
    "torch.cos({x})",
    "torch.log1p({x}.abs())",
    "torch.log({x}.abs() + 0.5)",
    "torch.sqrt({x}.abs() + 1)",
    "torch.rsqrt({x} * {x} + 1)",
    "torch.erf({x})",
    "torch.expm1({x}.clamp(-3, 3))",
    "torch.atan({x})",
    "torch.reciprocal({x}.abs() + 1)",
    "F.gelu({x})",
    "F.gelu({x}, approximate='tanh')",
    "F.silu({x})",
    "F.softplus({x})",
    "F.mish({x})",
    "F.elu({x})",
    "F.hardswish({x})",
    "F.leaky_relu({x}, 0.1)",
    "F.logsigmoid({x})",
    "torch.square({x})",
    "({x} * 0.7 + 0.1)",
    is_float=True,
) + _rows(2, "keep", "-{x}", "{x}.abs()", "F.relu({x})", "{x}.clamp(-1, 2)", "{x}.clone()")

BINARY = _rows(
    4,
    "round",
    "{x} + {y}",
    "{x} - {y}",
    "{x} * {y}",
    "{x} / ({y}.abs() + 1)",
    "{x} + {y} * 0.5",
    "torch.lerp({x}, {y}, 0.25)",
    "torch.addcmul({x}, {y}, {z}, value=0.5)",
    "torch.hypot({x} + 2, {y})",
    "torch.pow({x}.abs() + 0.5, 1.5)",
    "torch.logaddexp({x}, {y})",
    is_float=True,
) + _rows(
    3,
    "keep",
    "torch.maximum({x}, {y})",
    "torch.minimum({x}, {y})",
    "torch.where({m}, {x}, {y})",
    "{x}.masked_fill({m}, 0.5)",
    "torch.where({m}, {x}, 0)",
)

STEPS = _rows(
    2,
    "step",
    "{x} > {y}",
    "{x} <= {n}",
    "{x} == {y}",
    "{x} != {n}",
    "({x} > 0) & ({y} < 1)",
    "({x} > 0) | {m}",
    "torch.logical_not({x})",
    "torch.floor({x})",
    "torch.round({x})",
    "torch.trunc({x})",
    "torch.sign({x})",
    "torch.floor_divide({x}, 3)",
    "torch.remainder({x}, 5)",
    "torch.fmod({x}, 3)",
    "torch.argmax({x}, dim={d}, keepdim={k})",
    "torch.argmin({x}, dim={d})",
    "{x}.to({ints})",
    "torch.isnan({x})",
    "torch.count_nonzero({x}, dim={d})",
    "{x}.any(dim={d}, keepdim={k})",
    "{x}.all(dim={d})",
    "torch.sort({x}, dim={d}, stable=True)[1]",
    "torch.bitwise_and({x}.to(i64), 6)",
    "torch.bitwise_xor({x}.to(i32), 5)",
    "({x}.to(i64) >> 1)",
    "F.one_hot({x}.to(i64).abs() % 4, 4)",
)

REDUCTIONS = _rows(
    4,
    "round",
    "{x}.sum(dim={d}, keepdim={k})",
    "{x}.sum()",
    "{x}.mean(dim={d}, keepdim={k})",
    "{x}.mean(dim={dd}, keepdim={k})",
    "{x}.sum(dim={dd}, keepdim={k})",
    "{x}.var(dim={d}, correction=0, keepdim={k})",
    "({x} * 0.1 + 1).prod(dim={d}, keepdim={k})",
    "torch.logsumexp({x}, dim={d}, keepdim={k})",
    "torch.linalg.vector_norm({x} + 3, dim={d}, keepdim={k})",
    "torch.var_mean({x}, dim={d}, correction=0)[1]",
    is_float=True,
) + _rows(
    3,
    "keep",
    "{x}.amax(dim={d}, keepdim={k})",
    "{x}.amin(dim={dd}, keepdim={k})",
    "{x}.max()",
    "{x}.max(dim={d})[0]",
)

COMPOSED = _rows(
    3,
    "round",
    "torch.softmax({x}, dim={d})",
    "torch.log_softmax({x}, dim={d})",
    "F.layer_norm({x}, {x}.shape[-1:])",
    "F.layer_norm({x}, {x}.shape[-1:]) * {y} + {z}",
    "F.rms_norm({x}, {x}.shape[-1:])",
    "torch.cumsum({x}, dim={d})",
    "({x} * 0.1 + 1).cumprod(dim={d})",
    "torch.logcumsumexp({x}, dim={d})",
    "{x} @ {x}.transpose(-1, -2)",
    "F.avg_pool1d({x}, 2)",
    "F.normalize({x} + 2, dim={d})",
    "({x} - {x}.mean({d}, keepdim=True)) * 0.5",
    "F.mse_loss({x}, {y})",
    "F.smooth_l1_loss({x}, {y})",
    is_float=True,
) + _rows(1, "keep", "F.max_pool1d({x}, 2)", "torch.cummax({x}, dim={d})[0]", is_float=True)

VIEWS = _rows(
    4,
    "keep",
    "{x}.transpose({d}, {e})",
    "{x}.permute({perm})",
    "{x}.flatten()",
    "{x}.flatten({d}, -1)",
    "{x}.reshape(-1, {x}.shape[{d}])",
    "{x}.unsqueeze({d})",
    "{x}.squeeze()",
    "{x}.narrow({d}, 0, {x}.shape[{d}] // 2)",
    "{x}.select({d}, 0)",
    "{x}[..., 1:]",
    "{x}[::2]",
    "{x}[..., ::3]",
    "{x}[1:-1]",
    "{x}[None, ..., -1:]",
    "{x}.unsqueeze(0).expand(3, *{x}.shape)",
    "{x}.flip({d})",
    "{x}.roll(1, {d})",
    "{x}.repeat_interleave(2, dim={d})",
    "{x}.chunk(2, dim={d})[0]",
    "{x}.diagonal()",
    "{x}.tril()",
    "{x}.triu(1)",
    "{x}.contiguous()",
    "torch.cat([{x}, {y}], dim={d})",
    "torch.cat([{x}, {x}], dim={d})",
    "torch.cat([{x}[:1], {x}], dim=0)",
    "torch.stack([{x}, {x}], dim={d})",
    "torch.stack([{x}, {y}], dim=-1)",
    "F.pad({x}, (1, 2), value={n})",
    "F.pad({x}, (0, 1, 2, 0))",
    "F.pad({x}, (-1, 1))",
    "torch.tile({x}, (2, 1))",
    "{x}.unfold({d}, 2, 1)",
    "{x}.expand_as({y})",
    "torch.zeros_like({x})",
    "torch.full_like({x}, {n})",
    "torch.arange({x}.shape[{d}], device={x}.device)",
    "{x}.new_ones({x}.shape[{d}], 2)",
)

INDEXING = _rows(
    3,
    "keep",
    "{x}[{i}.flatten() % {x}.shape[0]]",
    "torch.index_select({x}, {d}, {i}.flatten()[:5] % {x}.shape[{d}])",
    "torch.gather({x}, {d}, ({x}.isnan().to(i64) + {i}.sum()) % {x}.shape[{d}])",
    "torch.take_along_dim({x}, torch.argsort({i}.flatten() * 0, stable=True)[:1]"
    ".reshape([1] * {x}.dim()), dim={d})",
    "F.embedding({i} % {x}.shape[0], {x})",
    "{x}[..., {i}.flatten()[:3] % {x}.shape[-1]]",
    "torch.index_put({x}, (torch.arange({x}.shape[0], device={x}.device).flip(0)[:2],), "
    "{x}.new_full((), {n}))",
    "torch.scatter({x}, {d}, torch.zeros_like({x}, dtype=i64)[:1], {n})",
    "torch.select_scatter({x}, torch.zeros_like({x}.select({d}, 0)), {d}, 0)",
    "torch.slice_scatter({x}, torch.ones_like({x}[1:]), 0, 1)",
) + _rows(
    2,
    "round",
    "torch.index_put({x}, ({i}.flatten() % {x}.shape[0],), {x}[0] * 0.5, accumulate=True)",
    "torch.scatter_add({x}, {d}, torch.zeros_like({x}, dtype=i64), {x} * 0.5)",
    "torch.index_add({x}, 0, {i}.flatten()[:2] % {x}.shape[0], {x}[:2])",
    "torch.scatter_reduce({x}, {d}, torch.zeros_like({x}, dtype=i64), {x}, 'amax')",
    is_float=True,
)

CASTS = _rows(4, "round", "{x}.to({floats})", "{x}.to({floats}) * 0.5") + _rows(
    2, "keep", "{x}.to(f64)"
)

IN_PLACE = _rows(
    1,
    "round",
    "{x}.add_(1)",
    "{x}.mul_(0.5)",
    "{x}.add_({y})",
    "{x}[..., :1].mul_(2)",
    "{x}[::2].add_(1)",
    "{x}.tanh_()",
    is_float=True,
) + _rows(
    1,
    "keep",
    "{x}.copy_({y})",
    "{x}.zero_()",
    "{x}[..., 1:].fill_({n})",
    "{x}.clamp_(0, 1)",
    "{x}.masked_fill_({m}, {n})",
    "{x}.transpose(0, -1)[0].neg_()",
    is_float=True,
)

PURE = (*UNARY, *BINARY, *STEPS, *REDUCTIONS, *COMPOSED, *VIEWS, *INDEXING, *CASTS)
