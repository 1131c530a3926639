"""The rows: one operator of PyTorch's database, one dtype, forward or backward."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.harness.compare import DEFAULT_TOLERANCES, Tolerance
from tests.harness.devices import use_carried_packages
from tests.opdb.operands import on_made_operands

use_carried_packages()

from torch.testing._internal.common_device_type import toleranceOverride  # noqa: E402
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

DTYPES = {
    name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int64", "bool")
}
GPU_DTYPES = ("float32", "bfloat16", "int64", "bool")
MODES = ("forward", "backward")


@dataclass(frozen=True, slots=True, order=True)
class Row:
    op: str
    dtype: str
    mode: str
    operands: str = "dense"  # see operands.py

    def __str__(self) -> str:
        where = "" if self.operands == "dense" else f":{self.operands}"
        return f"{self.op}-{self.dtype}-{self.mode}{where}"


@functools.cache
def operators() -> dict[str, Any]:
    """Operators by `name` or `name.variant`."""
    return {
        f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db
    }


def operator_of(row: Row) -> Any:
    """The database's entry, with a function that makes its operands where the row says so."""
    op = operators()[row.op]
    if row.operands != "made":
        return op
    made = copy.copy(op)
    made.op = on_made_operands(op.op)
    return made


def rows(dtypes: Sequence[str], modes: Sequence[str] = MODES, device: str = "cpu") -> Iterator[Row]:
    """Rows that eager supports; backward in float32 only."""
    for name, op in operators().items():
        supported = op.supported_dtypes(device)
        for dtype in dtypes:
            if DTYPES[dtype] not in supported:
                continue
            if "forward" in modes:
                yield Row(name, dtype, "forward")
            differentiable = op.supports_autograd and dtype == "float32"
            if "backward" in modes and differentiable:
                yield Row(name, dtype, "backward")


def tolerance_of(op: Any, dtype: torch.dtype) -> Tolerance | None:
    """The widest tolerance that the operator's own entry states for PyTorch's eager tests."""
    base = DEFAULT_TOLERANCES.get(dtype)
    if base is None:
        return None
    rtol, atol = base.rtol, base.atol
    for info in op.decorators:
        if "Inductor" in (getattr(info, "cls_name", None) or ""):
            continue
        for decorator in getattr(info, "decorators", ()):
            if isinstance(decorator, toleranceOverride) and dtype in decorator.d:
                stated = decorator.d[dtype]
                rtol, atol = max(rtol, stated.rtol), max(atol, stated.atol)
    return Tolerance(rtol, atol)
