"""State shared by all parts of a kernel: its names, its block, and the values so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perfuse.codegen.emitter import Formula, KernelFrame, Resolver, Value
from perfuse.codegen.triton import reduce
from perfuse.codegen.triton.emit import COLUMNS, ROWS, Block, Dialect, Emitter, Names, Scope
from perfuse.codegen.triton.sources import TensorMap
from perfuse.codegen.triton.spelling import POINTER_TYPE, start
from perfuse.codegen.triton.streaming import streamed_places
from perfuse.codegen.triton.tiling import columns_of, moves_float32, rows_of
from perfuse.codegen.writer import Writer
from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.program import Axis, Buffer
from perfuse.schedule.plan import Kernel, Member, static_product
from perfuse.schedule.tile import Tile
from perfuse.schedule.turns import Scratch

_MOST_NARROW = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelText:
    """A function without its name, and how it is launched."""

    parameters: tuple[tuple[str, str], ...]  # name -> Triton type
    body: str
    buffers: tuple[str, ...]
    symbols: tuple[str, ...] = ()
    grid: tuple[Dim, Dim, Dim]
    tile: Tile
    scratch: tuple[Scratch, ...]
    checks_indices: bool = False
    promised: frozenset[str] = frozenset()  # addresses passed as numbers, multiples of 16
    is_gluon: bool = False  # written in Gluon, Triton's language of explicit layouts
    maps: tuple[TensorMap, ...] = ()  # those of the last parameters
    called: str = ""  # functions that the body calls; their names start with KERNEL


class TritonFrame(KernelFrame[Names, Value]):
    """One Triton function being written."""

    def __init__(
        self, kernel: Kernel, buffers: Mapping[str, Buffer], tile: Tile, dialect: Dialect
    ) -> None:
        streamed = streamed_places(kernel, buffers, tile)
        is_wide = dialect.is_exact or moves_float32(kernel, buffers)
        is_rounded = is_wide and not dialect.approximates
        names = Names(buffers, kernel.stored, dialect, streamed, is_rounded=is_rounded)
        super().__init__(kernel, buffers, names)
        self.tile = tile
        self.rows, self.columns = rows_of(kernel), columns_of(kernel)
        self.makers: dict[str, list[Member]] = {}
        for m in kernel.members:
            self.makers.setdefault(m.loop.out, []).append(m)
        self.is_wide = self._is_wide()
        self.scratch: dict[str, tuple[Scratch, str]] = {}  # name -> what it is, its parameter
        self.w = Writer(1)

    def _is_wide(self) -> bool:
        """Whether positions need 64 bits."""
        sizes = [static_product([a.size for a in self.kernel.axes])]
        names = {*self.kernel.reads(), *self.kernel.stored}
        sizes += [static_product((self.buffers[n].num_elements,)) for n in names]
        return any(size is None or size > _MOST_NARROW for size in sizes)

    # -- members ---------------------------------------------------------------------------

    def parts(self, member: Member, prefix: str = "acc") -> tuple[str, ...]:
        """The variables of a member's accumulator."""
        own = f"{prefix}_{self.short(member)}"
        return (own, f"{own}_at") if member.loop.kind.is_position else (own,)

    def formula_of(self, member: Member, *, is_for_store: bool = False) -> Expr:
        """A member's formula; of a copy, that of the original, which is not rounded twice."""
        return super().formula_of(self._original(member) or member, is_for_store=is_for_store)

    def is_read_inside(self, name: str) -> bool:
        readers = (m for m in self.kernel.members if any(r.buffer == name for r in m.loop.reads()))
        return any(self._original(reader) is None for reader in readers)

    def _original(self, member: Member) -> Member | None:
        """The member whose eight-bit floats this one copies to another place."""
        load, out = member.loop.value, self.buffers[member.loop.out]
        if not member.is_map or load.op != "load" or load.args or not out.dtype.is_float8:
            return None
        makers = self.makers.get(load.buffer, [])
        if len(makers) != 1 or self.buffers[load.buffer].dtype is not out.dtype:
            return None
        (maker,) = makers
        is_same = maker.loop.index is load.index and maker.number < member.number
        return maker if is_same and maker.is_map else None

    def stored(self, emitter: Emitter, member: Member, lanes: int) -> Value:
        """Store a member's value for every lane, though it may not vary along them."""
        self._read_first(emitter, member)
        value = self.value_of(emitter, member)
        self.store(emitter, member, value, lanes)
        return value

    def store(self, emitter: Emitter, member: Member, value: Value, lanes: int) -> None:
        wide = Value(value.text, value.dtype, value.lanes | lanes)
        emitter.store(member.loop.out, member.loop.index, wide, self.formula_of(member))

    def find(
        self, load: Expr, reader: Member, results: dict[str, Value]
    ) -> Value | Formula[Value] | None:
        """Where a load finds what this kernel makes; None: in memory."""
        name, index = load.attr
        for maker in self.makers.get(name, ()):
            if maker.loop.index is not index or maker.number >= reader.number:
                continue
            if load.args:  # computed everywhere, so it may be read and then masked
                whole = ex.load(name, index, self.buffers[name].dtype)
                chosen = ex.apply("where", load.args[0], whole, load.args[1])
                return Formula(chosen, lambda e: self.find(e, reader, results))
            if name in results:
                return results[name]
            if any(r.buffer == name for r in maker.loop.reads()):
                return None  # changed in place in an earlier sweep: what is there is the new value
            if maker.is_map:
                rounded = ex.round_to(maker.loop.value, self.buffers[name].dtype)
                # As the maker sees it: what is overwritten after it still has its old value.
                return Formula(rounded, self._reading(maker, results))
        return None

    def _reading(self, reader: Member, results: dict[str, Value]) -> Resolver[Value]:
        return lambda e: self.find(e, reader, results)

    def _read_first(self, emitter: Emitter, member: Member) -> None:
        """Read what earlier members need of a buffer before this one overwrites it."""
        for other in self.kernel.members:
            if other.number < member.number:
                for read in other.loop.reads():
                    if read.buffer == member.loop.out and other.role == member.role:
                        emitter.value(read)

    # -- sizes and places ------------------------------------------------------------------

    def size(self, axes: Sequence[Axis]) -> Dim:
        return ix.product([a.size for a in axes])

    def program(self, axis: int) -> str:
        text = f"tl.program_id({axis})"
        return f"{text}.to(tl.int64)" if self.is_wide else text

    def mask_end(
        self, w: Writer, masks: dict[int, str], name: str, at: str, size: Dim, step: int
    ) -> None:
        """The mask of lanes past the end of a size; none where blocks of `step` divide it.

        A block over no elements has lanes: their sum is written for each row.
        """
        if not (isinstance(size, int) and size > 0 and size % step == 0):
            w.line(f"{name} = {at} < {self.dim(size)}")
            masks[COLUMNS if name == "in_columns" else ROWS] = name

    def place_axes(self, w: Writer, axes: Sequence[Axis], flat: str) -> None:
        """The variables of axes from a position in their product, the last running fastest."""
        looping = [a for a in axes if a.atom is not None]
        rest = flat
        for i in reversed(range(1, len(looping))):
            size = self.dim(looping[i].size)
            w.line(f"{looping[i].name} = ({rest}) % ({size})")
            rest = f"({rest}) // ({size})"
        if looping:
            w.line(f"{looping[0].name} = {rest}")

    def atoms(self, axes: Sequence[Axis]) -> frozenset[Atom]:
        return frozenset(a.atom for a in axes if a.atom is not None)

    def block(self, masks: dict[int, str]) -> Block:
        lanes_of = dict.fromkeys(self.atoms(self.rows), ROWS)
        lanes_of |= dict.fromkeys(self.atoms(self.columns), COLUMNS)
        zeros = {
            ROWS: "tl.zeros([R, 1], tl.int32)",
            COLUMNS: "tl.zeros([1, C], tl.int32)",
            ROWS | COLUMNS: "tl.zeros([R, C], tl.int32)",
        }
        return Block(lanes_of, masks, zeros)

    def emitter(
        self, scope: Scope, block: Block, reader: Member, results: dict[str, Value]
    ) -> Emitter:
        return Emitter(self.names, scope, block, self._reading(reader, results))

    # -- accumulators ----------------------------------------------------------------------

    def declare(self, w: Writer, member: Member, shape: str) -> None:
        for line in reduce.declarations(member, self.parts(member), shape):
            w.line(line)

    def lanes_text(
        self, emitter: Emitter, member: Member, mask: str | None, shape: str, position: str
    ) -> tuple[str, ...]:
        """A member's value by lane, with lanes out of bounds set to a neutral value."""
        value = emitter.value(member.loop.value)
        if reduce.kind_dtype(member) is DType.BOOL:
            value = emitter.converted(value, DType.BOOL)
        texts = [value.text]
        if member.loop.kind.is_position:
            texts.append(position)
        if mask is not None:
            starts = reduce.starts(member)
            texts = [f"tl.where({mask}, {t}, {s})" for t, s in zip(texts, starts, strict=True)]
        made = []
        for text, kind in zip(texts, reduce.part_types(member), strict=True):
            name = self.names.local()
            emitter.line(f"{name} = tl.broadcast_to(tl.cast({text}, {kind}), {shape})")
            made.append(name)
        return tuple(made)

    def step(self, emitter: Emitter, member: Member, lanes: tuple[str, ...]) -> None:
        """Combine lanes into a member's accumulator."""
        parts = self.parts(member)
        emitter.line(f"{', '.join(parts)} = {reduce.combined(member, parts, lanes)}")

    def finished(self, emitter: Emitter, member: Member, text: str, lanes: int) -> Value:
        """The result of a reduction in its buffer's compute type."""
        name = self.names.local()
        names = (name, f"{name}_at") if member.loop.kind.is_position else (name,)
        emitter.line(f"{', '.join(names)} = {text}")
        value = Value(names[-1], reduce.result_dtype(member), lanes)
        return emitter.converted(value, self.buffers[member.loop.out].dtype.compute)

    # -- scratch ---------------------------------------------------------------------------

    def need(self, made: Scratch) -> str:
        """The parameter of a piece of scratch memory."""
        if made.name not in self.scratch:
            self.scratch[made.name] = (made, f"w{len(self.scratch)}")
        return self.scratch[made.name][1]

    def scratch_of(self, member: Member, size: Dim, *, is_filled: bool = False) -> tuple[str, ...]:
        """Where blocks leave partial results of a member: one parameter for each part."""
        names = []
        for i, dtype in enumerate(reduce.storage_dtypes(member)):
            name = f"{self.kernel.name}_{self.short(member)}_{i}"
            fill = start(member.loop.kind, reduce.kind_dtype(member)) if is_filled else None
            names.append(self.need(Scratch(name, dtype, size, fill)))
        return tuple(names)

    # -- the end ---------------------------------------------------------------------------

    def text(self, grid: tuple[Dim, Dim, Dim]) -> KernelText:
        names = self.names
        parameters = [(p, names.pointer_type(b)) for b, p in names.arguments.items()]
        parameters += [(p, POINTER_TYPE[s.dtype]) for s, p in self.scratch.values()]
        parameters += [(n, "i64") for n in names.symbols.values()]
        return KernelText(
            parameters=tuple(parameters),
            body=self.w.text(),
            buffers=(*names.arguments, *self.scratch),
            symbols=tuple(names.symbols),
            grid=grid,
            tile=self.tile,
            scratch=tuple(s for s, _ in self.scratch.values()),
            checks_indices=names.checks_indices,
        )
