"""Which two reductions of a row, one dependent on the other, can run in one sweep."""

from __future__ import annotations

import math

from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.program import LoopKind
from perfuse.schedule.plan import Kernel, Member, Role


def dependent_pair(kernel: Kernel, number: int) -> tuple[str, Member, Member] | None:
    """The kind and members of the pair that is all of the sweeps of two stages, if one is.

    A maximum and a sum of exponentials below it, or a sum and squares about its mean.
    """
    first = [m for m in kernel.members if m.stage == number and sweeps(kernel, m)]
    second = [m for m in kernel.members if m.stage == number + 1 and sweeps(kernel, m)]
    if len(first) != 1 or len(second) != 1:
        return None
    one, two = first[0], second[0]
    if one.role != Role.INNER or two.role != Role.INNER or two.loop.kind is not LoopKind.SUM:
        return None
    if one.loop.value.dtype is not DType.F32 or two.loop.value.dtype is not DType.F32:
        return None
    value = _unfolded(kernel, two.loop.value)
    if one.loop.kind is LoopKind.MAX and _is_relative(value, one):
        return "exponentials", one, two
    if one.loop.kind is LoopKind.SUM and _is_square_about_mean(kernel, value, one):
        return "moments", one, two
    return None


def is_one_sweep(kernel: Kernel) -> bool:
    """Whether a pair is all there is to sweep for: a row swept in steps is read just once."""
    sweeping = [m for m in kernel.members if sweeps(kernel, m)]
    return len(sweeping) == 2 and dependent_pair(kernel, sweeping[0].stage) is not None


def sweeping_stages(kernel: Kernel) -> frozenset[int]:
    """The stages that go over whole rows."""
    return frozenset(m.stage for m in kernel.members if sweeps(kernel, m))


def sweeps(kernel: Kernel, m: Member) -> bool:
    """Whether a member has something to do for every column."""
    return m.role != Role.ROW and (m.role != Role.FULL or m.loop.out in kernel.stored)


def _unfolded(kernel: Kernel, value: Expr) -> Expr:
    """The formula behind a load of a value that the kernel itself computes."""
    if value.op != "load" or value.args:
        return value
    makers = [m for m in kernel.members if m.loop.out == value.buffer and m.role == Role.FULL]
    return makers[0].loop.value if len(makers) == 1 else value


def _reads(value: Expr, member: Member) -> bool:
    """The value is the result of a member."""
    is_load = value.op == "load" and not value.args
    return is_load and value.attr == (member.loop.out, member.loop.index)


def _is_relative(value: Expr, largest: Member) -> bool:
    """exp(x - max(x)) for the x of that maximum."""
    if value.op not in ("exp", "exp_mid") or value.args[0].op != "sub":
        return False
    x, top = value.args[0].args
    return _reads(top, largest) and x is largest.loop.value


def _is_square_about_mean(kernel: Kernel, value: Expr, total: Member) -> bool:
    """(x - mean) squared, for the x of that sum and the mean made of it."""
    if value.op != "mul" or value.args[0] is not value.args[1] or value.args[0].op != "sub":
        return False
    x, mean = value.args[0].args
    if x is not total.loop.value:
        return False
    makers = [m for m in kernel.members if m.role == Role.ROW and _reads(mean, m)]
    if len(makers) != 1 or makers[0].loop.value.op != "div":
        return False
    over, count = makers[0].loop.value.args
    return _reads(over, total) and count.op == "const" and _num_columns(kernel) == count.attr


def _num_columns(kernel: Kernel) -> float:
    sizes = [axis.size for axis in kernel.axes if axis.reduced]
    return math.prod(float(n) if isinstance(n, int) else math.nan for n in sizes)
