"""The Plan: kernels and calls in order, what each buffer needs, and why fusions were refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from perfuse.config import ThresholdSettings
from perfuse.decision import Choice, Decision
from perfuse.ir.attention import Attention
from perfuse.ir.index import Dim
from perfuse.ir.program import KEPT, Axis, Buffer, Extern, LibraryCall, Loop, Matmul, Program
from perfuse.schedule.tile import Tile
from perfuse.schedule.turns import MemoryPlan


class Role(StrEnum):
    """The axes that a loop runs over in its kernel: outer ones are rows, inner ones columns."""

    FULL = "full"  # one value for each row and column
    ROW = "row"  # one value for each row
    INNER = "inner"  # reduces the columns of each row
    OUTER = "outer"  # reduces the rows of each column
    ALL = "all"  # reduces everything to one value
    SCAN = "scan"  # runs along the columns of each row
    SCATTER = "scatter"  # stores at data-dependent positions


@dataclass(frozen=True, slots=True)
class Member:
    """A loop rewritten over its kernel's axes: its role, and the stage of the row it runs in."""

    loop: Loop
    role: Role
    number: int  # place of the node in its program
    stage: int = 0

    @property
    def is_map(self) -> bool:
        """Whether it computes one element at every row and column."""
        return self.role is Role.FULL and self.loop.is_map


@dataclass(frozen=True, slots=True)
class Contraction:
    """Matmuls that a kernel computes itself, over the rows and columns of their results.

    Rows are those of all matrices of a batch. Members of the kernel, its epilogue, take the results
    from accumulators; what is in the kernel's `stored` reaches memory too. The prologue computes
    the right operand of the one matmul, a few columns at a time: a buffer that is not in memory.
    """

    matmuls: tuple[Matmul, ...]
    prologue: Loop | None = None

    @property
    def outs(self) -> tuple[str, ...]:
        return tuple(matmul.out for matmul in self.matmuls)

    def reads(self) -> tuple[str, ...]:
        """The buffers of the operands, in order of first use."""
        names = dict.fromkeys(name for matmul in self.matmuls for name in matmul.reads())
        if self.prologue is not None:
            del names[self.prologue.out]
            names |= dict.fromkeys(read.buffer for read in self.prologue.reads())
        return tuple(names)


@dataclass(frozen=True, slots=True)
class Kernel:
    """Loops over one set of axes. Axes marked reduced are the columns, the others the rows.

    `stored` are the buffers that leave the kernel; others live in registers or scratch rows.
    """

    name: str
    axes: tuple[Axis, ...]
    members: tuple[Member, ...]
    stored: frozenset[str]
    num_bytes: int = 0
    num_flops: int = 0
    batch: Batch | None = None  # independent kernels with one body, run as one
    contraction: Contraction | None = None  # matmuls whose results the members read
    attention: Attention | None = None  # what a kernel without members computes
    grouped: Extern | None = None  # or matmuls of groups of rows, which a kernel computes
    _reads: tuple[str, ...] | None = KEPT

    def makes(self) -> set[str]:
        """Buffers that it computes, whether they reach memory or not."""
        own = () if self.contraction is None else self.contraction.outs
        made = () if self.attention is None else self.attention.results
        return {m.loop.out for m in self.members} | {*own, *made, *self._of_groups()}

    def _of_groups(self) -> tuple[str, ...]:
        return () if self.grouped is None else tuple(out for out in self.grouped.outs if out)

    def reads(self) -> tuple[str, ...]:
        """Buffers read from memory, in order of first use."""
        if self._reads is None:
            made = self.makes() - self.stored
            names = [] if self.contraction is None else [*self.contraction.reads()]
            names += () if self.attention is None else self.attention.reads()
            names += () if self.grouped is None else self.grouped.reads()
            names += [r.buffer for m in self.members for r in m.loop.reads()]
            found = tuple(dict.fromkeys(n for n in names if n not in made))
            object.__setattr__(self, "_reads", found)
        assert self._reads is not None
        return self._reads

    def __str__(self) -> str:
        if self.batch is not None:
            return f"{self.name}: {self.batch}  # {self.num_bytes} bytes, {self.num_flops} flops"
        axes = ", ".join(f"{a.name}<{a.size!r}{'*' if a.reduced else ''}" for a in self.axes)
        lines = [f"{self.name}({axes}):  # {self.num_bytes} bytes, {self.num_flops} flops"]
        if self.contraction is not None and self.contraction.prologue is not None:
            lines.append(f"    prologue: {self.contraction.prologue}")
        for matmul in self.contraction.matmuls if self.contraction is not None else ():
            kept = "" if matmul.out in self.stored else "  (kept in the kernel)"
            inner = ", ".join([*map(str, matmul.args), *(f"{k}={v}" for k, v in matmul.kwargs)])
            lines.append(f"    matmul: {matmul.out} = {matmul.op}({inner}){kept}")
        if self.attention is not None:
            lines.append(f"    {self.attention}")
        if self.grouped is not None:
            lines.append(f"    {self.grouped}")
        for m in self.members:
            kept = "" if m.loop.out in self.stored else "  (kept in the kernel)"
            lines.append(
                f"    [{m.stage}] {m.role}: {m.loop.out}[{m.loop.index!r}] = "
                f"{m.loop.kind}({m.loop.value.text()}){kept}"
            )
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Part:
    """The buffers and the `count` of the template in one kernel of a batch."""

    buffers: tuple[str, ...]  # those that t0, t1, ... stand for
    count: int


# The one size that the template of a batch knows: how many elements a part has.
PART_SIZE = "count"


@dataclass(frozen=True, slots=True)
class Batch:
    """Independent kernels with one body: the template, run once for each part.

    The template's buffers are t0, t1, ...; it has one axis of `count` steps, or none. A reduction
    over everything has the role Role.INNER there: each part is one row.
    """

    template: Kernel
    buffers: Mapping[str, Buffer] = field(compare=False)
    parts: tuple[Part, ...]
    kernels: tuple[Kernel, ...]  # what the parts were

    def in_part(self, part: Part, names: Iterable[str]) -> list[str]:
        """The buffers that these names of the template stand for in a part."""
        known = dict(zip(self.buffers, part.buffers, strict=True))
        return [known[name] for name in names]

    def __str__(self) -> str:
        sizes = sorted(part.count for part in self.parts)
        lines = [f"batch of {len(self.parts)} kernels, {sizes[0]} to {sizes[-1]} elements"]
        lines += [f"    {line}" for line in str(self.template).splitlines()[1:]]
        return "\n".join([*lines, f"    for {', '.join(k.name for k in self.kernels)}"])


Step = Kernel | LibraryCall


def written_by(step: Step) -> set[str]:
    """The buffers that a step writes to memory."""
    return set(step.stored) if isinstance(step, Kernel) else {*step.makes(), *step.mutates}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Two loops that were not fused, and why."""

    first: str
    second: str
    reason: str

    def __str__(self) -> str:
        return f"{self.first} and {self.second} are not fused: {self.reason}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in order. `places` puts temporaries into one arena: name -> byte offset."""

    program: Program
    steps: tuple[Step, ...]
    refusals: tuple[Refusal, ...]
    places: Mapping[str, int]
    arena_bytes: int
    arena_limit: int | None = None  # temporaries of at least this size are allocated one by one
    over: Mapping[str, str] = field(default_factory=dict)  # see schedule/in_place.py
    is_guarded: bool = False  # buffers have guard bands around them, which the host program checks
    thresholds: ThresholdSettings = field(default_factory=ThresholdSettings)
    memory: MemoryPlan = field(default_factory=MemoryPlan)  # see schedule/allocate.py
    tiles: Mapping[str, Tile] = field(default_factory=dict)  # by kernel, where measured or refitted
    templates: Mapping[str, Choice] = field(default_factory=dict)  # of kernels with contractions
    decisions: tuple[Decision, ...] = ()  # what was measured to choose among implementations

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(s for s in self.steps if isinstance(s, Kernel))

    def __str__(self) -> str:
        lines = [str(step) for step in self.steps]
        lines += [f"# {refusal}" for refusal in self.refusals]
        return "\n".join(lines)


def with_tile(alone: Plan, tile: Tile) -> Plan:
    """A plan of one kernel, cut by this tile."""
    return replace(alone, tiles={alone.kernels[0].name: tile})


def with_template(plan: Plan, kernel: str, choice: Choice) -> Plan:
    """The plan with a contraction computed by this template."""
    return replace(plan, templates={**plan.templates, kernel: choice})


def static_product(dims: list[Dim] | tuple[Dim, ...]) -> int | None:
    """The product of sizes when all are known now."""
    total = 1
    for d in dims:
        if not isinstance(d, int):
            return None
        total *= d
    return total
