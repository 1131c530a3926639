"""The meaning of every scalar op of the IR, as a torch function over whole tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from perfuse.ir.dtype import DType, to_torch

TorchFn = Callable[..., Tensor]


def _floordiv(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="floor")


def _truncdiv(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="trunc")


def _div(a: Tensor, b: Tensor) -> Tensor:
    return torch.true_divide(a, b).to(a.dtype)


def _mixed(seed: Tensor, index: Tensor) -> Tensor:
    """A hash of (seed, index): the exact bits are the code generator's own business."""
    x = seed * 0x2545F4914F6CDD1D + index * 0x9E3779B97F4A7C1 + 0x123456789ABCDEF
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x


def _uniform(seed: Tensor, index: Tensor) -> Tensor:
    return ((_mixed(seed, index) >> 20) & 0xFFFFFF).to(torch.float32) / float(1 << 24)


def _normal(seed: Tensor, index: Tensor) -> Tensor:
    u = _uniform(seed, index).double().clamp_min(2.0**-24)
    v = _uniform(seed + 1, index).double()
    return ((-2 * u.log()).sqrt() * (2 * torch.pi * v).cos()).float()


def _integer(seed: Tensor, index: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return low + (_mixed(seed, index) & 0x7FFFFFFFFFFFFFFF) % (high - low)


SCALAR_FUNCTIONS: dict[str, TorchFn] = {
    name: getattr(torch, name)
    for name in """
    neg abs sign floor ceil trunc round sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p
    sigmoid tanh sin cos tan sinh cosh asin acos atan asinh acosh atanh erf erfc erfinv lgamma
    digamma add sub mul fmin fmax copysign fmod pow atan2 hypot nextafter eq ne lt le gt ge
    isnan isinf isfinite signbit where
    """.split()
} | {
    "to_bits": lambda a: a.view(torch.int32),
    "from_bits": lambda a: a.view(torch.float32),
    "exp_mid": torch.exp,
    "exp2_mid": torch.exp2,
    "bit_not": torch.bitwise_not,
    "bit_and": torch.bitwise_and,
    "bit_or": torch.bitwise_or,
    "bit_xor": torch.bitwise_xor,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "min": torch.minimum,
    "max": torch.maximum,
    "div": _div,
    "floordiv": _floordiv,
    "truncdiv": _truncdiv,
    "mod": torch.remainder,
    "divisor": torch.clone,
    "fma": lambda a, b, c: a * b + c,
    "land": torch.logical_and,
    "lor": torch.logical_or,
    "lxor": torch.logical_xor,
    "lnot": torch.logical_not,
    "rand_f32": _uniform,
    "randn_f32": _normal,
    "randint64": _integer,
}


def apply(op: str, args: list[Tensor], dtype: DType, attr: object) -> Tensor:
    """One scalar op; `cast` and `round_to` take their target from the expression."""
    if op == "cast":
        return args[0].to(to_torch(dtype))
    if op == "round_to":
        assert isinstance(attr, DType)
        return args[0].to(to_torch(attr)).to(torch.float32)
    return SCALAR_FUNCTIONS[op](*args)
