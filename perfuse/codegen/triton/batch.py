"""A batch as one launch over all of its parts, which it finds in a table in memory.

The table is filled by launches that get addresses as arguments and store them: the driver copies
arguments when it launches, so the table is right for each call and in a recorded CUDA graph, and
nothing on the host has to outlive the call. Rows of the table: the size of a part, then its
pointers. Before them come the numbers of each part's first block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from perfuse.codegen.triton import reduce
from perfuse.codegen.triton.blocks import flat_members
from perfuse.codegen.triton.carry import Carry
from perfuse.codegen.triton.emit import ROWS, Block, Dialect, Scope
from perfuse.codegen.triton.frame import KernelText, TritonFrame
from perfuse.codegen.triton.spelling import COMPUTE_TYPE, NARROW_TYPE
from perfuse.codegen.triton.tiling import GpuLimits, power_of_two
from perfuse.codegen.writer import Writer
from perfuse.ir.dtype import DType
from perfuse.schedule.plan import PART_SIZE, Batch, Kernel, Part, Role
from perfuse.schedule.tile import Tile, TileKind
from perfuse.schedule.turns import Scratch

# Arguments of one launch: every driver accepts 4 KiB.
_MOST_ARGUMENTS = 480
# Words of the table that one block stores.
_STORES = 48
# Elements that a block handles at a time, and the most that it takes in all.
_STEP, _MOST_ELEMENTS = 1024, 8192
_BLOCKS_PER_PROCESSOR = 16
_MOST_NARROW = 2**31 - 1
_ZEROS = "tl.zeros([C], tl.int32)"


def batch_tile(batch: Batch, limits: GpuLimits) -> Tile:
    """Elements of a block (rows times columns), for enough blocks to fill the GPU."""
    if not batch.template.axes:
        return Tile(TileKind.BATCH, 1, 1, 1)
    if _reduces(batch):
        return Tile(TileKind.BATCH, 1, 2 * _STEP, 8)
    total = sum(part.count for part in batch.parts)
    wanted = power_of_two(total // (limits.num_processors * _BLOCKS_PER_PROCESSOR) + 1)
    elements = max(_STEP, min(_MOST_ELEMENTS, wanted))
    return Tile(TileKind.BATCH, elements // _STEP, _STEP, 4)


def batch_texts(
    kernel: Kernel, tile: Tile, dialect: Dialect, places: Mapping[str, int]
) -> list[KernelText]:
    """The launches of a batch: those that fill its table, then the one over its parts.

    `places` are the buffers in one arena, with their offsets: one address gives all of them.
    """
    assert kernel.batch is not None
    batch = _with_sums_of_everything(kernel.batch)
    frame = TritonFrame(batch.template, batch.buffers, tile, dialect)
    frame.is_wide = any(part.count > _MOST_NARROW for part in batch.parts)
    body = _Body(frame, batch)
    bodies = body.text()
    table = _Table(batch, tuple(frame.names.arguments), body.first_blocks(), places)
    aligned = frozenset(body.varying())
    fills = [table.text(chunk, aligned) for chunk in table.chunks()]
    scratch = table.scratch()
    text = KernelText(
        parameters=(("w0", "*i64"),), body=bodies, buffers=(scratch.name,),
        grid=(body.num_blocks(), 1, 1), tile=tile, scratch=(scratch,),
    )  # fmt: skip
    return [*fills, text]


def _reduces(batch: Batch) -> bool:
    return any(m.role in (Role.INNER, Role.ALL) for m in batch.template.members)


def _with_sums_of_everything(batch: Batch) -> Batch:
    """Reductions of a part as whole-tensor ones, which they are for its block."""
    if not _reduces(batch):
        return batch
    members = tuple(
        replace(m, role=Role.ALL) if m.role == Role.INNER else m for m in batch.template.members
    )
    axes = tuple(replace(a, reduced=False) for a in batch.template.axes)
    return replace(batch, template=replace(batch.template, axes=axes, members=members))


class _Body:
    """The text of the launch over all parts."""

    def __init__(self, frame: TritonFrame, batch: Batch) -> None:
        self.frame = frame
        self.batch = batch
        self.is_single = not batch.template.axes
        self.reduces = _reduces(batch)
        self.elements = frame.tile.rows * frame.tile.columns

    def blocks_of(self, part: Part) -> int:
        return 1 if self.is_single or self.reduces else -(-part.count // self.elements)

    def first_blocks(self) -> list[int]:
        """The number of each part's first block; none where a part is a block."""
        if self.is_single or self.reduces:
            return []
        return [0, *accumulate(self.blocks_of(part) for part in self.batch.parts)][:-1]

    def num_blocks(self) -> int:
        return sum(self.blocks_of(part) for part in self.batch.parts)

    def varying(self) -> list[str]:
        """Buffers that are traversed: they are read in vectors."""
        found = []
        for m in self.batch.template.members:
            places = [(m.loop.out, m.loop.index), *(r.attr for r in m.loop.reads())]
            found += [name for name, index in places if not isinstance(index, int)]
        return found

    def text(self) -> str:
        frame, w = self.frame, self.frame.w
        around, loops = Writer(1), Writer(1)
        carry = Carry(frame, "[C]", 1)
        carry.declare(around)
        scope = Scope(around, frozenset(), None)
        if self.is_single:
            flat_members(frame, Scope(loops, frozenset(), None), Block({}, {}, {ROWS: _ZEROS}))
        else:
            self._loops(loops, scope)
        for m in carry.all:
            emitter = frame.emitter(Scope(loops, frozenset(), None), Block({}, {}, {}), m, {})
            total = reduce.joined(m, [frame.parts(m)[0]], 0, keep=False)
            emitter.store(m.loop.out, m.loop.index, frame.finished(emitter, m, total, 0))
        self._prologue(w)
        w.take(around)
        w.take(loops)
        return w.text()

    def _prologue(self, w: Writer) -> None:
        """Which part the block is of, and the part's size and pointers."""
        num_parts, arguments = len(self.batch.parts), self.frame.names.arguments
        narrow = "" if self.frame.is_wide else ".to(tl.int32)"
        w.line("program = tl.program_id(0)")
        if self.first_blocks():
            w.line(f"parts = tl.arange(0, {power_of_two(num_parts)})")
            w.line(f"firsts = tl.load(w0 + parts, parts < {num_parts}, other={_MOST_NARROW})")
            w.line("is_before = firsts <= program")
            w.line("part = tl.sum(is_before.to(tl.int32)) - 1")
            w.line("first = tl.max(tl.where(is_before, firsts, 0))")
            w.line(f"row = w0 + {num_parts} + part * {1 + len(arguments)}")
        else:
            w.line(f"row = w0 + program * {1 + len(arguments)}")
        for symbol, name in self.frame.names.symbols.items():
            assert symbol == PART_SIZE, f"a batch has no size {symbol}"
            w.line(f"{name} = tl.load(row){narrow}")
        aligned = set(self.varying())
        for number, (buffer, name) in enumerate(arguments.items()):
            kind = _pointed_to(self.frame, buffer)
            text = f"tl.load(row + {1 + number}).to(tl.pointer_type({kind}))"
            w.line(f"{name} = {f'tl.multiple_of({text}, 16)' if buffer in aligned else text}")
        if self.first_blocks():
            w.line(f"begin = (program - first){narrow} * {self.elements}")
            w.line(f"end = tl.minimum(begin + {self.elements}, n0)")

    def _loops(self, w: Writer, around: Scope) -> None:
        """Whole steps without a mask, which would keep loads from being vectors; then the rest."""
        begin, end = ("begin", "end") if self.first_blocks() else ("0", "n0")
        self.frame.names.symbol(PART_SIZE)
        w.line(f"whole = {begin} + ({end} - {begin}) // C * C")
        with w.indented(f"for start in tl.range({begin}, whole, C):"):
            self._step(w, around, is_whole=True)
        with w.indented(f"if whole < {end}:"):
            w.line("start = whole")
            self._step(w, around, is_whole=False)

    def _step(self, w: Writer, around: Scope, *, is_whole: bool) -> None:
        frame = self.frame
        axes = frame.kernel.axes
        w.line("at = start + tl.arange(0, C)")
        masks: dict[int, str] = {}
        if not is_whole:
            w.line("inside = at < n0")
            masks[ROWS] = "inside"
        frame.place_axes(w, axes, "at")
        lanes_of = dict.fromkeys(frame.atoms(axes), ROWS)
        block = Block(lanes_of, masks, {ROWS: _ZEROS})
        flat_members(frame, Scope(w, frame.atoms(axes), around), block)


def _pointed_to(frame: TritonFrame, buffer: str) -> str:
    dtype = frame.buffers[buffer].dtype
    if frame.names.is_bits(dtype):
        return "tl.uint8"
    return NARROW_TYPE[dtype] if dtype.is_narrow_float else COMPUTE_TYPE[dtype]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One word of the table: a number, or the address of a buffer and what is added to it."""

    number: int
    buffer: str | None = None


class _Table:
    """The table of a batch: the buffers and sizes of its parts."""

    def __init__(
        self,
        batch: Batch,
        arguments: tuple[str, ...],
        first_blocks: list[int],
        places: Mapping[str, int],
    ) -> None:
        self.entries = [_Entry(first) for first in first_blocks]
        self.named: dict[str, str] = {}  # buffer -> the template's name for it
        based = next((b for p in batch.parts for b in p.buffers if b in places), None)
        for part in batch.parts:
            self.entries.append(_Entry(part.count))
            for name, buffer in zip(arguments, batch.in_part(part, arguments), strict=True):
                self.named.setdefault(buffer, name)
                if based is not None and buffer in places:
                    self.entries.append(_Entry(places[buffer] - places[based], based))
                else:
                    self.entries.append(_Entry(0, buffer))

    def scratch(self) -> Scratch:
        return Scratch("table", DType.I64, len(self.entries))

    def chunks(self) -> list[range]:
        """Runs of entries that need no more arguments than a launch takes."""
        found, start, seen = [], 0, set[str]()
        for number, entry in enumerate(self.entries):
            if entry.buffer is not None and entry.buffer not in seen:
                if len(seen) == _MOST_ARGUMENTS:
                    found.append(range(start, number))
                    start, seen = number, set()
                seen.add(entry.buffer)
        return [*found, range(start, len(self.entries))]

    def text(self, chunk: range, aligned: frozenset[str]) -> KernelText:
        """A launch that stores a run of entries, each block some of them."""
        names: dict[str, str] = {}
        w = Writer(1)
        w.line("program = tl.program_id(0)")
        for start in range(chunk.start, chunk.stop, _STORES):
            with w.indented(f"if program == {(start - chunk.start) // _STORES}:"):
                for number in range(start, min(start + _STORES, chunk.stop)):
                    w.line(f"tl.store(w0 + {number}, {self._word(number, names)})")
        num_blocks = -(-len(chunk) // _STORES)
        parameters = (*((name, "i64") for name in names.values()), ("w0", "*i64"))
        promised = frozenset(n for b, n in names.items() if self.named[b] in aligned)
        scratch = self.scratch()
        return KernelText(
            parameters=parameters, body=w.text(), buffers=(*names, scratch.name),
            grid=(num_blocks, 1, 1), tile=Tile(TileKind.FLAT, 1, 1, 1), scratch=(scratch,),
            promised=promised,
        )  # fmt: skip

    def _word(self, number: int, names: dict[str, str]) -> str:
        entry = self.entries[number]
        if entry.buffer is None:
            return str(entry.number)
        name = names.setdefault(entry.buffer, f"a{len(names)}")
        return f"{name} + {entry.number}" if entry.number else name
