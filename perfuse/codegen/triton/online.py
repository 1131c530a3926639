"""A maximum and the sum of exponentials below it in one sweep over a long row.

Each lane keeps the largest value it has seen and the sum of exp(value - largest); when a larger
one comes, the sum is scaled down. At the end the lanes are joined in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfuse.codegen.triton.emit import COLUMNS, Block, Emitter
from perfuse.codegen.triton.frame import Frame
from perfuse.codegen.writer import Writer
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.schedule.plan import Kernel, Member


@dataclass(frozen=True, slots=True)
class Pair:
    """A maximum, and the sum of exponentials that a later stage takes relative to it."""

    largest: Member
    total: Member


def find_pair(kernel: Kernel, number: int) -> Pair | None:
    """The pair that makes up the sweeps of two stages, if they consist of just that."""
    first = [m for m in kernel.members if m.stage == number and _sweeps(kernel, m)]
    second = [m for m in kernel.members if m.stage == number + 1 and _sweeps(kernel, m)]
    if len(first) != 1 or len(second) != 1:
        return None
    largest, total = first[0], second[0]
    if (largest.role, largest.loop.kind) != ("inner", "max") or total.role != "inner":
        return None
    is_sum = total.loop.kind == "sum" and total.loop.value.dtype is DType.F32
    if not is_sum or not _is_relative(_unfolded(kernel, total.loop.value), largest):
        return None
    return Pair(largest, total)


def _sweeps(kernel: Kernel, m: Member) -> bool:
    return m.role not in ("row", "full") or (m.role == "full" and m.loop.out in kernel.stored)


def _unfolded(kernel: Kernel, value: Expr) -> Expr:
    """The formula behind a load of what the kernel makes for itself."""
    if value.op != "load" or value.args:
        return value
    makers = [m for m in kernel.members if m.loop.out == value.attr[0] and m.role == "full"]
    return makers[0].loop.value if len(makers) == 1 else value


def _is_relative(value: Expr, largest: Member) -> bool:
    """exp(x - max(x)) for the x of that maximum."""
    if value.op not in ("exp", "exp_mid") or value.args[0].op != "sub":
        return False
    x, top = value.args[0].args
    is_top = top.op == "load" and not top.args
    return is_top and top.attr == (largest.loop.out, largest.loop.index) and x is largest.loop.value


def declare(frame: Frame, w: Writer, pair: Pair) -> None:
    frame.declare(w, pair.largest, "[R, C]")
    frame.declare(w, pair.total, "[R, C]")


def step(frame: Frame, emitter: Emitter, block: Block, pair: Pair) -> None:
    """One block of columns."""
    (top,), (total,) = frame.parts(pair.largest), frame.parts(pair.total)
    (x,) = frame.lanes_text(emitter, pair.largest, block.mask(COLUMNS), "[R, C]", "")
    seen = frame.names.local()
    emitter.line(f"{seen} = pf_max({top}, {x})")
    emitter.line(f"{total} = {total} * pf_exp_below({top}, {seen}) + pf_exp_below({x}, {seen})")
    emitter.line(f"{top} = {seen}")


def joined(frame: Frame, pair: Pair, largest: str) -> str:
    """The row's sum, given the variable of its maximum, from those of the lanes."""
    (top,), (total,) = frame.parts(pair.largest), frame.parts(pair.total)
    return f"tl.sum({total} * pf_exp_below({top}, {largest}), 1, keep_dims=True)"
