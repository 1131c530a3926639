"""Pointwise ops, views, reductions and creation: lowered formulas against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.unit.lower.rows import Row
from tests.unit.lower.samples import bf16, f16, f32, f64, i32, i64, mask, special, u8

UNARY = """
sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh asin acos atan asinh
acosh atanh erf erfc erfinv sigmoid reciprocal lgamma digamma neg abs sign sgn floor ceil trunc
round isnan isinf isfinite signbit logical_not square frac isposinf isneginf nan_to_num positive
deg2rad rad2deg sinc logit
""".split()
INT_UNARY = "sqrt exp abs neg sign floor isnan signbit logical_not bitwise_not square".split()
BINARY = """
add sub mul div atan2 copysign fmod remainder minimum maximum fmin fmax hypot nextafter eq ne lt
le gt ge logical_and logical_or logical_xor floor_divide true_divide pow logaddexp logaddexp2 xlogy
heaviside
""".split()
INT_BINARY = (
    "add sub mul div bitwise_and bitwise_or bitwise_xor minimum maximum eq lt copysign".split()
)
MIXED = [(f32(4, 3), i64(3)), (bf16(4, 3), f32(3)), (f32(4, 3), f64()), (i32(4), i64()),
         (u8(5), i32(5)), (mask(5), i64(5)), (f16(4, 1), bf16(1, 4)), (i64(3), f32()),
         (f32(2, 1, 3), f32(4, 1))]  # fmt: skip


def _pointwise() -> list[Row]:
    rows = [Row(name, getattr(torch, name), (special(5, 7),)) for name in UNARY]
    rows += [Row(f"{n}_i64", getattr(torch, n), (i64(9),)) for n in INT_UNARY]
    rows += [Row(f"{n}_bf16", getattr(torch, n), (bf16(9),)) for n in UNARY[:8]]
    rows += [Row(n, getattr(torch, n), (special(5, 7), f32(7))) for n in BINARY]
    rows += [Row(f"{n}_ints", getattr(torch, n), (i64(5), i32(5))) for n in INT_BINARY]
    rows += [Row(f"{n}_bools", getattr(torch, n), (mask(9), mask(3, 9)))
             for n in ("add", "mul", "eq", "logical_xor", "bitwise_or", "maximum")]  # fmt: skip
    for i, (a, b) in enumerate(MIXED):
        rows += [Row(f"{n}_mixed{i}", getattr(torch, n), (a, b)) for n in ("add", "div", "gt")]
    return rows


POINTWISE = [
    *_pointwise(),
    Row("add_alpha", lambda x, y: torch.add(x, y, alpha=2.5), (f32(3, 4), f32(4))),
    Row("sub_alpha_int", lambda x, y: torch.sub(x, y, alpha=3), (i64(3, 4), i64(4))),
    Row("rsub", lambda x: 3 - x, (i32(4),)),
    Row("scalars", lambda x: (x + 1, x * 2.5, x / 2, 1 / x.abs().add(1), 2**x), (f32(3),)),
    Row("int_scalars", lambda x: (x + 1, x * 2.5, x / 2, x // 2, x % 3, x + True), (i64(9),)),
    Row("bool_scalars", lambda x: (x + 1, x * 2.5, x & True, x == 1, x * True), (mask(9),)),
    Row("powers", lambda x: [x**p for p in (0, 0.5, 1, 2, 3, 4, -1, -0.5, -2, 2.5)], (f32(9),)),
    Row("int_powers", lambda x: (x**2, x**3, x**0), (i64(9),)),
    Row("div_modes", lambda x, y: [torch.div(x, y, rounding_mode=m) for m in ("floor", "trunc")],
        (special(9), f32(9))),
    Row("div_modes_int",
        lambda x, y: [torch.div(x, y, rounding_mode=m) for m in ("floor", "trunc")],
        (i64(9), i64(9).abs() + 1)),
    Row("where", lambda c, x, y: (torch.where(c, x, y), torch.where(c, x, 2)), (
        mask(4, 1), f32(3), i64(4, 3))),
    Row("clamp", lambda x, y: (x.clamp(0), x.clamp(-1, 1), x.clamp(max=y), x.clamp_min(0.5)),
        (special(9), f32(9))),
    Row("clamp_int", lambda x: (x.clamp(0, 3), x.clamp(0.5)), (i64(9),)),
    Row("casts", lambda x: [x.to(d) for d in (torch.int32, torch.bool, torch.bfloat16,
                                               torch.float64, torch.int8)], (f32(9) * 5,)),
    Row("bf16_chain", lambda x, y: (x * y + x, (x * y).float()), (bf16(9), bf16(9))),
    Row("masked_fill", lambda x, m: x.masked_fill(m, -1e9), (f32(3, 4), mask(4))),
    Row("masked_fill_tensor", lambda x, m, v: x.masked_fill(m, v), (f32(3, 4), mask(4), f32())),
    Row("shifts", lambda x: (x << 2, x >> 1), (i64(9),)),
    Row("tril_triu", lambda x: (x.tril(), x.triu(1), x.tril(-1)), (f32(2, 4, 5),)),
    Row("addcmul", lambda x, y, z: (torch.addcmul(x, y, z, value=2), torch.addcdiv(x, y, z)),
        (f32(3), f32(3), f32(3).abs() + 1)),
    Row("lerp", lambda x, y, w: [torch.lerp(x, y, n) for n in (0.3, 0.9, 1.5, w)],
        (f32(3), f32(4, 3), f32(3))),
    Row("round_decimals", lambda x: torch.round(x * 3, decimals=2), (f32(9),)),
    Row("ldexp", torch.ldexp, (f32(9), i32(9))),
    Row("angle", torch.angle, (special(9),)),
    Row("addmm", lambda b, x, y: (torch.addmm(b, x, y), torch.addmm(b, x, y, beta=0.5, alpha=2),
                                  torch.addmm(b / 0, x, y, beta=0)), (f32(5), f32(4, 3), f32(3, 5)),
        ("aten.mm.out", "aten.addmm.out")),
    Row("dynamic", lambda x, y: (x + y).exp() * x.shape[0], (f32(5, 3), f32(3)), dynamic=True),
]  # fmt: skip

VIEWS: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("reshape_merge", lambda x: x.reshape(6, 4) + 1, (f32(2, 3, 4),)),
    ("reshape_split", lambda x: x.reshape(2, 2, 3, 2, 2) + 1, (f32(4, 3, 4),)),
    ("reshape_odd", lambda x: x.reshape(4, 3, 5) + 1, (f32(6, 10),)),
    ("reshape_odder", lambda x: (x.exp().reshape(9, 4).t() + 1).reshape(6, 6), (f32(2, 3, 6),)),
    ("reshape_ones", lambda x: x.reshape(1, 6, 1, 2, 1) * 2, (f32(3, 1, 4),)),
    ("reshape_infer", lambda x: x.reshape(-1, 4).reshape(2, -1) * 2, (f32(2, 3, 4),)),
    ("reshape_empty", lambda x: x.reshape(0, 5) * 2, (f32(2, 0, 3),)),
    ("reshape_scalar", lambda x: x.reshape(()) * 2, (f32(1, 1),)),
    ("permute_reshape", lambda x: x.permute(2, 0, 1).reshape(4, 6) * 2, (f32(2, 3, 4),)),
    ("transposed_input", lambda x: x.reshape(-1) * 2, (f32(3, 4).t(),)),
    ("strided_input", lambda x: x * 2, (f32(8, 9)[1::2, ::3],)),
    ("expanded_input", lambda x: x * 2, (f32(1, 4).expand(3, 4),)),
    ("slices", lambda x: (x[1:3] + 1, x[:, ::2] * 2, x[-2:], x[5:2], x[..., 1:-1:2]),
     (f32(5, 7),)),
    ("select", lambda x: (x[1] + 1, x[:, -1] + 1, x[2, 3] + 1), (f32(5, 7),)),
    ("flip", lambda x: (x.flip(0), x.flip(0, 1) + 1), (f32(5, 7),)),
    ("roll", lambda x: (x.roll(2, 0), x.roll((1, -2), (0, 1)), x.roll(3)), (f32(5, 7),)),
    ("rot90", lambda x: (torch.rot90(x), torch.rot90(x, 2), torch.rot90(x, 3)), (f32(5, 7),)),
    ("split", lambda x: (x.split(2, 1), x.chunk(3, 0), x.split([1, 4], 0), x.unbind(1)),
     (f32(5, 7),)),
    ("diagonal", lambda x: (x.diagonal() + 1, x.diagonal(1), x.diagonal(-2), x.diag(1)),
     (f32(5, 7),)),
    ("diag_embed", lambda x: (torch.diag_embed(x), torch.diag_embed(x, 1)), (f32(3, 4),)),
    ("repeat", lambda x: (x.repeat(2, 3), x.exp().repeat(2, 1, 2), x.repeat(0, 2)), (f32(3, 4),)),
    ("tile", lambda x: torch.tile(x, (2, 2)), (f32(3, 4),)),
    ("repeat_interleave", lambda x: x.repeat_interleave(3, 1), (f32(3, 4),)),
    ("pad", lambda x: (torch.nn.functional.pad(x, (1, 2)),
                       torch.nn.functional.pad(x.exp(), (0, 1, 2, 0), value=3.0),
                       torch.nn.functional.pad(x, (-1, 2))), (f32(3, 4),)),
    ("pad_int", lambda x: torch.nn.functional.pad(x, (1, 2), value=-5), (i64(3, 4),)),
    ("pad_reflect", lambda x: torch.nn.functional.pad(x, (1, 2, 2, 1), mode="reflect"),
     (f32(1, 2, 5, 6),)),
    ("pad_replicate", lambda x: torch.nn.functional.pad(x, (1, 2, 2, 1), mode="replicate"),
     (f32(1, 2, 5, 6),)),
    ("pad_circular", lambda x: torch.nn.functional.pad(x, (1, 2), mode="circular"),
     (f32(1, 2, 5),)),
    ("cat", lambda x, y: (torch.cat([x, y], 1), torch.cat([x, x.exp(), x.long()], 0)),
     (f32(3, 4), f32(3, 2))),
    ("cat_empty", lambda x: torch.cat([x, x[:0], x.new_zeros(0)]), (f32(3),)),
    ("stack", lambda x, y: (torch.stack([x, y], 1), torch.stack([x, y], -1)), (f32(3), f32(3))),
    ("squeeze", lambda x: (x.squeeze() + 1, x.squeeze(1), x.unsqueeze(-1) * 2), (f32(3, 1, 4),)),
    ("expand", lambda x: x.expand(2, 3, 4) + 1, (f32(3, 1),)),
    ("movedim", lambda x: x.movedim(0, -1).contiguous() + 1, (f32(2, 3, 4),)),
    ("kron", lambda x, y: torch.kron(x, y), (f32(2, 3), f32(3, 2))),
    ("unfold", lambda x: (x.unfold(1, 3, 2) + 1, x.unfold(0, 2, 1)), (f32(5, 7),)),
    ("pixel_shuffle", lambda x: torch.pixel_shuffle(x, 2) + 1, (f32(1, 8, 3, 4),)),
    ("pixel_unshuffle", lambda x: torch.pixel_unshuffle(x, 2) + 1, (f32(1, 2, 4, 6),)),
    ("channel_shuffle", lambda x: torch.channel_shuffle(x, 2) + 1, (f32(1, 8, 3, 4),)),
    ("im2col", lambda x: torch.nn.functional.unfold(x, 2, stride=2) + 1, (f32(1, 2, 4, 6),)),
    ("as_strided_view", lambda x: (x * 2).as_strided((3, 2), (2, 1), 1) + 1, (f32(4, 4),)),
    ("as_strided_scatter_all", lambda x, y: torch.as_strided_scatter(x * 2, y, (3, 4), (1, 3)),
     (f32(4, 3), f32(3, 4))),
    ("as_strided_scatter_some", lambda x, y: torch.as_strided_scatter(x * 2, y, (3, 2), (5, 2), 1),
     (f32(4, 4), f32(3, 2))),
    ("as_strided_scatter_mixed", lambda x, y: torch.as_strided_scatter(x * 2, y, (2, 2), (3, 2), 1),
     (f32(4, 4), f32(2, 2))),
    ("select_scatter", lambda x, y: (torch.select_scatter(x, y, 0, -1) + 1), (f32(3, 4), f32(4))),
    ("slice_scatter", lambda x, y: (torch.slice_scatter(x, y, 1, 1, 6, 2),
                                    torch.slice_scatter(x, y, 1, -3)), (f32(3, 7), f32(3, 3))),
    ("diagonal_scatter", lambda x, y: (torch.diagonal_scatter(x, y),
                                       torch.diagonal_scatter(x, y, -1)), (f32(4, 3), f32(3))),
    ("assign_slices", lambda x, y: _assigned(x, y), (f32(3, 7), f32(3, 3))),
]  # fmt: skip


def _assigned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    made[:, 1:4] = y
    made[0] += 1
    made[:, ::2] *= 2
    made.diagonal().fill_(0)
    return made


REDUCTIONS: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("sum", lambda x: (x.sum(), x.sum(0), x.sum((0, 2)), x.sum(-1, keepdim=True)), (f32(3, 4, 5),)),
    ("sum_int", lambda x: (x.sum(), x.sum(0), x.sum(0, dtype=torch.float32)), (i32(3, 4),)),
    ("sum_bool", lambda x: (x.sum(), x.sum(1), x.float().mean()), (mask(3, 4),)),
    ("sum_bf16", lambda x: (x.sum(), x.mean(1)), (bf16(3, 40),)),
    ("sum_empty", lambda x: (x.sum(1), x.prod(1), x.sum()), (f32(3, 0),)),
    ("sum_ones", lambda x: (x.sum(1), x.amax(1), x.argmax(1), x.sum()), (f32(3, 1),)),
    ("sum_scalar", lambda x: (x.sum(), x.max(), x.argmax(), x.mean(), x.any()), (f32(),)),
    ("prod", lambda x: (x.prod(), x.prod(1), x.long().prod(0)), (f32(3, 4),)),
    ("mean", lambda x: (x.mean(), x.mean((0, 1)), x.mean(-1, keepdim=True)), (f32(3, 4, 5),)),
    ("var", lambda x: (x.var(), x.var(1), x.var(0, correction=0), x.std(-1, keepdim=True)),
     (f32(3, 4, 5),)),
    ("var_mean", lambda x: (torch.var_mean(x, 1), torch.std_mean(x, (0, 2))), (f32(3, 4, 5),)),
    ("extrema", lambda x: (x.amax(1), x.amin((0, 1)), x.max(), x.min()), (special(5, 7),)),
    ("extrema_int", lambda x: (x.amax(1), x.min(), x.max(0), x.min(1)), (i64(5, 7),)),
    ("extrema_bool", lambda x: (x.amax(1), x.amin(), x.max(), x.min(0)), (mask(5, 7),)),
    ("positions", lambda x: (x.argmax(), x.argmin(), x.argmax(1), x.argmin(0, keepdim=True)),
     (special(5, 7),)),
    ("with_position", lambda x: (x.max(1), x.min(0, keepdim=True)), (special(5, 7),)),
    ("aminmax", lambda x: (torch.aminmax(x), torch.aminmax(x, dim=1)), (f32(5, 7),)),
    ("truth", lambda x: (x.any(), x.all(1), x.any(0, keepdim=True), x.all()), (i64(5, 7),)),
    ("truth_u8", lambda x: (x.any(), x.all(1)), (u8(5, 7),)),
    ("count_nonzero", lambda x: (torch.count_nonzero(x), torch.count_nonzero(x, 1)), (i64(5, 7),)),
    ("logsumexp", lambda x: (torch.logsumexp(x, 1), x.softmax(-1), x.log_softmax(0)), (f32(5, 7),)),
    ("norms", lambda x: (x.norm(), x.norm(1, 0), torch.linalg.vector_norm(x, 3, 1),
                         torch.linalg.vector_norm(x, float("inf"))), (f32(5, 7),)),
    ("nansum", lambda x: (torch.nansum(x.clamp(-5, 5)), torch.nanmean(x.clamp(-5, 5))),
     (special(5, 7),)),
    ("trace", lambda x: torch.trace(x), (f32(5, 7),)),
    ("dot", lambda x, y: (torch.dot(x, y), torch.vdot(x, y), torch.inner(x, y)), (f32(7), f32(7))),
    ("mv", lambda x, y: (torch.mv(x, y), x @ y), (f32(5, 7), f32(7))),
    ("cross", lambda x, y: torch.linalg.cross(x, y), (f32(5, 3), f32(5, 3))),
    ("dist", lambda x, y: (torch.dist(x, y), torch.nn.functional.mse_loss(x, y)),
     (f32(5, 3), f32(5, 3))),
    ("isclose", lambda x, y: (torch.isclose(x, y)), (f32(5, 3), f32(5, 3))),
    ("layer_norm", lambda x, w: torch.nn.functional.layer_norm(x, (7,), w), (f32(5, 7), f32(7))),
]  # fmt: skip

CREATION: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("full", lambda x: (torch.full((2, 3), 7) + x, torch.full((2, 3), 0.1, dtype=torch.bfloat16)),
     (f32(3),)),
    ("zeros_ones", lambda x: (torch.zeros(3) + x, torch.ones(3, dtype=torch.int32),
                              torch.zeros_like(x), torch.ones_like(x), x.new_full((2,), 3)),
     (f32(3),)),
    ("arange", lambda x: (torch.arange(5) + x[0], torch.arange(2, 9, 2), torch.arange(0, 1, 0.1),
                          torch.arange(5, 0, -2), torch.arange(3, dtype=torch.float64)),
     (f32(3),)),
    ("linspace", lambda x: (torch.linspace(0, 1, 7) + x[0], torch.linspace(3, -2, 4),
                            torch.logspace(0, 2, 5)), (f32(3),)),
    ("eye", lambda x: (torch.eye(3) + x, torch.eye(2, 3)), (f32(3),)),
    ("tri_indices", lambda x: (torch.tril_indices(3, 4), torch.triu_indices(3, 4, 1)), (f32(3),)),
]  # fmt: skip


def _rows(table: list[tuple[str, Callable[..., Any], tuple[Any, ...]]]) -> list[Row]:
    return [Row(name, fn, inputs) for name, fn, inputs in table]


GRADIENTS = [
    Row("saved_expand", lambda x: torch.nn.functional.normalize(x), (f32(3, 4, 6),), grad=True),
    Row("saved_slice", lambda x: x.exp()[:, 1:3].tanh() * x.sin()[:, ::3], (f32(5, 4),), grad=True),
    Row("batch_norm_eval", lambda x: _batch_norm(x), (f32(3, 4, 6),)),
    Row("batch_norm_train", lambda x: _batch_norm(x, True), (f32(3, 4, 6),), grad=True),
    Row("group_norm", lambda x, w: torch.nn.functional.group_norm(x, 2, w), (f32(3, 4, 6), f32(4)),
        grad=True),
]  # fmt: skip


def _batch_norm(x: torch.Tensor, training: bool = False) -> torch.Tensor:
    mean, var = torch.zeros(4), torch.ones(4)
    return torch.nn.functional.batch_norm(x, mean, var, training=training)


ROWS = [*POINTWISE, *_rows(VIEWS), *_rows(REDUCTIONS), *_rows(CREATION), *GRADIENTS]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_matches_eager(row: Row) -> None:
    row.check()
