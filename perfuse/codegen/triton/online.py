"""Two dependent reductions of a long row in one sweep, where each lane can carry both.

A maximum and the sum of exponentials below it: when a larger value comes, the sum is scaled down.
A sum and the squares of deviations from its mean: every value moves the mean a little. At the end
the lanes are joined in the same way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from perfuse.codegen.triton import reduce
from perfuse.codegen.triton.emit import COLUMNS, Block, Emitter
from perfuse.codegen.triton.frame import Frame
from perfuse.codegen.writer import Writer
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.schedule.plan import Kernel, Member


@dataclass(frozen=True, slots=True)
class Pair(ABC):
    """Two reductions that make up the sweeps of two stages."""

    first: Member
    second: Member

    def declare(self, frame: Frame, w: Writer) -> None:
        frame.declare(w, self.first, "[R, C]")
        frame.declare(w, self.second, "[R, C]")

    def names(self, frame: Frame) -> tuple[str, str]:
        return frame.parts(self.first)[0], frame.parts(self.second)[0]

    @abstractmethod
    def step(self, frame: Frame, emitter: Emitter, block: Block) -> None:
        """Take in one block of columns."""

    @abstractmethod
    def first_text(self, frame: Frame) -> str:
        """The first result, from all lanes."""

    @abstractmethod
    def second_text(self, frame: Frame, first: str) -> str:
        """The second result, given the variable of the first."""


class Exponentials(Pair):
    """A maximum, and the sum of exponentials relative to it."""

    def step(self, frame: Frame, emitter: Emitter, block: Block) -> None:
        top, total = self.names(frame)
        (x,) = frame.lanes_text(emitter, self.first, block.mask(COLUMNS), "[R, C]", "")
        seen = frame.names.local()
        emitter.line(f"{seen} = pf_max({top}, {x})")
        emitter.line(f"{total} = {total} * pf_exp_below({top}, {seen}) + pf_exp_below({x}, {seen})")
        emitter.line(f"{top} = {seen}")

    def first_text(self, frame: Frame) -> str:
        return reduce.joined(self.first, [self.names(frame)[0]], 1)

    def second_text(self, frame: Frame, first: str) -> str:
        top, total = self.names(frame)
        return f"tl.sum({total} * pf_exp_below({top}, {first}), 1, keep_dims=True)"


class Moments(Pair):
    """A sum, and the squares of deviations from its mean: a lane holds its mean and squares."""

    def declare(self, frame: Frame, w: Writer) -> None:
        super().declare(frame, w)
        w.line(f"{self._count(frame)} = tl.zeros([R, C], tl.float32)")

    def _count(self, frame: Frame) -> str:
        return f"count_{frame.short(self.first)}"

    def step(self, frame: Frame, emitter: Emitter, block: Block) -> None:
        (mean, squares), count = self.names(frame), self._count(frame)
        (x,) = frame.lanes_text(emitter, self.first, None, "[R, C]", "")
        mask = block.mask(COLUMNS)
        off = frame.names.local()
        if mask is None:
            emitter.line(f"{count} += 1.0")
            emitter.line(f"{off} = {x} - {mean}")
        else:
            emitter.line(f"{count} += {mask}.to(tl.float32)")
            emitter.line(f"{off} = tl.where({mask}, {x} - {mean}, 0.0)")
        moved = frame.names.local()
        emitter.line(f"{moved} = {mean} + {off} / tl.maximum({count}, 1.0)")
        rest = f"({x} - {moved})"
        rest = rest if mask is None else f"tl.where({mask}, {rest}, 0.0)"
        emitter.line(f"{squares} += {off} * {rest}")
        emitter.line(f"{mean} = {moved}")

    def first_text(self, frame: Frame) -> str:
        return f"tl.sum({self.names(frame)[0]} * {self._count(frame)}, 1, keep_dims=True)"

    def second_text(self, frame: Frame, first: str) -> str:
        (mean, squares), count = self.names(frame), self._count(frame)
        whole = f"({first} / tl.sum({count}, 1, keep_dims=True))"
        between = f"({mean} - {whole}) * ({mean} - {whole}) * {count}"
        return f"tl.sum({squares} + {between}, 1, keep_dims=True)"


def find_pair(kernel: Kernel, number: int) -> Pair | None:
    """The pair that makes up the sweeps of two stages, if they consist of just that."""
    first = [m for m in kernel.members if m.stage == number and _sweeps(kernel, m)]
    second = [m for m in kernel.members if m.stage == number + 1 and _sweeps(kernel, m)]
    if len(first) != 1 or len(second) != 1:
        return None
    one, two = first[0], second[0]
    if one.role != "inner" or two.role != "inner" or two.loop.kind != "sum":
        return None
    if one.loop.value.dtype is not DType.F32 or two.loop.value.dtype is not DType.F32:
        return None
    value = _unfolded(kernel, two.loop.value)
    if one.loop.kind == "max" and _is_relative(value, one):
        return Exponentials(one, two)
    if one.loop.kind == "sum" and _is_square_about_mean(kernel, value, one):
        return Moments(one, two)
    return None


def _sweeps(kernel: Kernel, m: Member) -> bool:
    return m.role not in ("row", "full") or (m.role == "full" and m.loop.out in kernel.stored)


def _unfolded(kernel: Kernel, value: Expr) -> Expr:
    """The formula behind a load of what the kernel makes for itself."""
    if value.op != "load" or value.args:
        return value
    makers = [m for m in kernel.members if m.loop.out == value.attr[0] and m.role == "full"]
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
    makers = [m for m in kernel.members if m.role == "row" and _reads(mean, m)]
    if len(makers) != 1 or makers[0].loop.value.op != "div":
        return False
    over, count = makers[0].loop.value.args
    return _reads(over, total) and count.op == "const" and _num_columns(kernel) == count.attr


def _num_columns(kernel: Kernel) -> float:
    count = 1.0
    for axis in kernel.axes:
        if axis.reduced:
            count *= axis.size if isinstance(axis.size, int) else float("nan")
    return count
