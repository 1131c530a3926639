"""Element types: how a value is stored, and in which type it is computed."""

from __future__ import annotations

import enum

import torch


class DType(enum.Enum):
    """One element type; the value is its short name as printed in artefacts."""

    BOOL = "bool"
    U8 = "u8"
    I8 = "i8"
    U16 = "u16"
    I16 = "i16"
    U32 = "u32"
    I32 = "i32"
    U64 = "u64"
    I64 = "i64"
    F8E4M3FN = "f8e4m3fn"
    F8E5M2 = "f8e5m2"
    F8E4M3FNUZ = "f8e4m3fnuz"
    F8E5M2FNUZ = "f8e5m2fnuz"
    F8E8M0FNU = "f8e8m0fnu"  # powers of two: the scales of microscaling formats
    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"
    F64 = "f64"

    def __repr__(self) -> str:
        return self.value

    __str__ = __repr__

    # Members are singletons: identity hashing keeps expression interning cheap.
    __hash__ = object.__hash__

    @property
    def num_bytes(self) -> int:
        return _NUM_BYTES[self]

    @property
    def is_float(self) -> bool:
        return self in _FLOATS

    @property
    def is_int(self) -> bool:
        return self not in _FLOATS and self is not DType.BOOL

    @property
    def is_signed(self) -> bool:
        return self in _FLOATS or self in _SIGNED

    @property
    def compute(self) -> DType:
        """The type arithmetic happens in: small floats are widened to float32."""
        return DType.F32 if self in _SMALL_FLOATS else self

    @property
    def is_narrow_float(self) -> bool:
        return self in _SMALL_FLOATS

    @property
    def is_float8(self) -> bool:
        return self in _FLOAT8


_FLOAT8 = frozenset(
    {DType.F8E4M3FN, DType.F8E5M2, DType.F8E4M3FNUZ, DType.F8E5M2FNUZ, DType.F8E8M0FNU}
)
_SMALL_FLOATS = _FLOAT8 | {DType.F16, DType.BF16}
_FLOATS = _SMALL_FLOATS | {DType.F32, DType.F64}
_SIGNED = frozenset({DType.I8, DType.I16, DType.I32, DType.I64})
# In the order of `DType`.
_TORCH_NAMES = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu "
    "float16 bfloat16 float32 float64"
)
_TO_TORCH: dict[DType, torch.dtype] = {
    ours: getattr(torch, name) for ours, name in zip(DType, _TORCH_NAMES.split(), strict=True)
}
_FROM_TORCH = {theirs: ours for ours, theirs in _TO_TORCH.items()}
_NUM_BYTES = {ours: theirs.itemsize for ours, theirs in _TO_TORCH.items()}


def from_torch(dtype: torch.dtype) -> DType | None:
    """Our name for a torch dtype, or None if we never compute on it (complex, quantised)."""
    return _FROM_TORCH.get(dtype)


def to_torch(dtype: DType) -> torch.dtype:
    return _TO_TORCH[dtype]
