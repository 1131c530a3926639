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
from perfuse.codegen.triton.frame import TritonFrame
from perfuse.codegen.triton.pairing import dependent_pair
from perfuse.codegen.triton.spelling import spelling
from perfuse.codegen.writer import Writer
from perfuse.ir.dtype import DType
from perfuse.schedule.plan import Kernel, Member

_GROUP = 8  # neighbours in one thread: sixteen bytes of halves


@dataclass(frozen=True, slots=True)
class Pair(ABC):
    """Two reductions that make up the sweeps of two stages."""

    first: Member
    second: Member

    def declare(self, frame: TritonFrame, w: Writer) -> None:
        frame.declare(w, self.first, "[R, C]")
        frame.declare(w, self.second, "[R, C]")

    def names(self, frame: TritonFrame) -> tuple[str, str]:
        return frame.parts(self.first)[0], frame.parts(self.second)[0]

    @abstractmethod
    def step(self, frame: TritonFrame, emitter: Emitter, block: Block) -> None:
        """Accumulate one block of columns."""

    @abstractmethod
    def first_text(self, frame: TritonFrame) -> str:
        """The first result, from all lanes."""

    @abstractmethod
    def second_text(self, frame: TritonFrame, first: str) -> str:
        """The second result, given the variable of the first."""


class Exponentials(Pair):
    """A maximum, and the sum of exponentials relative to it.

    Each group of neighbours, which one thread holds, has a maximum and a sum of its own: the sum is
    scaled down once per group and step, not once per element.
    """

    def _group(self, frame: TritonFrame) -> int:
        return min(_GROUP, frame.tile.columns)

    def declare(self, frame: TritonFrame, w: Writer) -> None:
        groups = f"[R, {frame.tile.columns // self._group(frame)}]"
        frame.declare(w, self.first, groups)
        frame.declare(w, self.second, groups)

    def step(self, frame: TritonFrame, emitter: Emitter, block: Block) -> None:
        top, total = self.names(frame)
        (x,) = frame.lanes_text(emitter, self.first, block.mask(COLUMNS), "[R, C]", "")
        size = self._group(frame)
        seen, base, parts = (frame.names.local() for _ in range(3))
        emitter.line(f"{parts} = tl.reshape({x}, [R, C // {size}, {size}])")
        emitter.line(f"{seen} = pf_max({top}, tl.reduce({parts}, 2, pf_max))")
        # Any number will do below which there is nothing yet.
        emitter.line(f"{base} = tl.where({seen} == float('-inf'), 0.0, {seen})")
        exp = spelling("exp_mid", DType.F32, is_rounded=frame.names.is_rounded).format
        added = f"tl.sum({exp(f'{parts} - {base}[:, :, None]')}, 2)"
        emitter.line(f"{total} = tl.fma({total}, {exp(f'{top} - {base}')}, {added})")
        emitter.line(f"{top} = {seen}")

    def first_text(self, frame: TritonFrame) -> str:
        return reduce.joined(self.first, [self.names(frame)[0]], 1)

    def second_text(self, frame: TritonFrame, first: str) -> str:
        top, total = self.names(frame)
        return f"tl.sum({total} * pf_exp_below({top}, {first}), 1, keep_dims=True)"


class Moments(Pair):
    """A sum, and the squares of deviations from its mean: a lane holds its mean and squares."""

    def declare(self, frame: TritonFrame, w: Writer) -> None:
        super().declare(frame, w)
        width = frame.size(frame.columns)
        # Steps over whole blocks count for all lanes alike.
        is_whole = isinstance(width, int) and width >= frame.tile.columns
        w.line(f"{self._count(frame)} = {'0.0' if is_whole else 'tl.zeros([R, C], tl.float32)'}")

    def _count(self, frame: TritonFrame) -> str:
        return f"count_{frame.short(self.first)}"

    def step(self, frame: TritonFrame, emitter: Emitter, block: Block) -> None:
        (mean, squares), count = self.names(frame), self._count(frame)
        (x,) = frame.lanes_text(emitter, self.first, None, "[R, C]", "")
        mask = block.mask(COLUMNS)
        off, share = frame.names.local(), frame.names.local()
        if mask is None:
            emitter.line(f"{count} += 1.0")
            emitter.line(f"{off} = {x} - {mean}")
            emitter.line(f"{share} = 1.0 / {count}")
        else:
            emitter.line(f"{count} = {count} + ({mask}).to(tl.float32)")
            emitter.line(f"{off} = tl.where({mask}, {x} - {mean}, 0.0)")
            emitter.line(f"{share} = 1.0 / tl.maximum({count}, 1.0)")
        moved = frame.names.local()
        emitter.line(f"{moved} = tl.fma({off}, {share}, {mean})")
        rest = f"({x} - {moved})"
        rest = rest if mask is None else f"tl.where({mask}, {rest}, 0.0)"
        emitter.line(f"{squares} = tl.fma({off}, {rest}, {squares})")
        emitter.line(f"{mean} = {moved}")

    def first_text(self, frame: TritonFrame) -> str:
        return f"tl.sum({self.names(frame)[0]} * {self._count(frame)}, 1, keep_dims=True)"

    def second_text(self, frame: TritonFrame, first: str) -> str:
        (mean, squares), count = self.names(frame), self._count(frame)
        lanes = f"tl.broadcast_to({count}, [R, C])"
        whole = f"({first} / tl.sum({lanes}, 1, keep_dims=True))"
        between = f"({mean} - {whole}) * ({mean} - {whole}) * {count}"
        return f"tl.sum({squares} + {between}, 1, keep_dims=True)"


def find_pair(kernel: Kernel, number: int) -> Pair | None:
    """The pair that makes up the sweeps of two stages, if they consist of just that."""
    found = dependent_pair(kernel, number)
    return None if found is None else _PAIRS[found[0]](*found[1:])


_PAIRS: dict[str, type[Pair]] = {"exponentials": Exponentials, "moments": Moments}
