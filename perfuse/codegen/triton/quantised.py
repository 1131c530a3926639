"""Kernels whose results are rounded to eight bits, at once or in a later kernel.

Errors of approximate quotients and exponentials are invisible in half precision, but not here: the
last bit of a float moves values near a tie to another code. Up to the nearest library calls, these
kernels compute as eager does.
"""

from __future__ import annotations

from collections.abc import Mapping

from perfuse.ir import expr as ex
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.program import Buffer
from perfuse.schedule.plan import Kernel, Plan

_EIGHT_BIT_INTEGERS = (DType.I8, DType.U8)


def quantising_kernels(plan: Plan) -> frozenset[str]:
    """The names of the kernels of a plan that an eight-bit result depends on."""
    needed: set[str] = set()  # buffers
    found: set[str] = set()
    for kernel in reversed(plan.kernels):
        buffers = plan.program.buffers
        if not needed.isdisjoint(kernel.stored) or _rounds(kernel, buffers):
            found.add(kernel.name)
            needed.update(kernel.reads())
    return frozenset(found)


def _rounds(kernel: Kernel, buffers: Mapping[str, Buffer]) -> bool:
    """Whether a kernel rounds floats to eight bits, in memory or on the way."""
    if any(buffers[name].dtype.is_float8 for name in kernel.stored):
        return True
    inner = kernel if kernel.batch is None else kernel.batch.template
    seen: set[Expr] = set()
    parts = [part for member in inner.members for part in ex.walk(member.loop.value, seen)]
    return any(map(_is_rounding, parts))


def _is_rounding(e: Expr) -> bool:
    if e.op == "round_to" and e.attr.is_float8:
        return True
    return e.op == "cast" and e.dtype in _EIGHT_BIT_INTEGERS and e.args[0].dtype.is_float
