"""Horizontal fusion: independent kernels with one body and different sizes become one kernel.

An optimiser step is hundreds of equal loops, one for each parameter. Each kernel is rewritten over
canonical names (buffers t0, t1, ..., one axis of `count` steps); kernels whose rewritten forms are
equal and that do not depend on each other run as one, over a table of buffers and sizes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from perfuse.context import Context
from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom, Indirect, Symbol
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.program import ARGUMENTS, Axis, Buffer, BufferKind, LibraryCall, Program
from perfuse.schedule import arena
from perfuse.schedule.arena import output_buffers, touched
from perfuse.schedule.domain import rewrite
from perfuse.schedule.plan import PART_SIZE, Batch, Kernel, Member, Part, Refusal, Role, Step

# Fewer kernels than this are not worth the table.
LEAST_PARTS = 4
# With fewer parts than this, kernels that move much on average stay apart: the body of a batch
# knows less of its sizes, and a launch is little beside what they move.
MANY_PARTS = 16
_MUCH_BYTES = 16 << 20
# A temporary lives longer where its kernel waits for others; larger ones do not wait.
_LARGEST_TEMPORARY = 1 << 16
# A reduction of a batch is one item, which one thread or block takes through: not for longer ones.
LONGEST_REDUCTION = 1 << 16

COUNT = ix.symbol(PART_SIZE)
_AXIS = Axis("x0", COUNT)
_LAST = 1 << 60


def batched(
    program: Program, steps: tuple[Step, ...], context: Context
) -> tuple[tuple[Step, ...], list[Refusal]]:
    """The steps with equal independent kernels joined, and why others were not."""
    if sum(isinstance(step, Kernel) for step in steps) < LEAST_PARTS:
        return steps, []
    has_budget = context.settings.memory_budget is not None
    limit = 0 if has_budget else _LARGEST_TEMPORARY
    # A result stays to the end of the call, whenever it is made.
    stays = set() if has_budget else output_buffers(program)
    needs = _needs(steps)
    levels = _levels(needs)
    classes: dict[tuple[object, ...], list[int]] = {}
    forms: dict[int, Form] = {}
    for number, step in enumerate(steps):
        if not isinstance(step, Kernel) or not _may_wait(step, program, stays, limit):
            continue
        form = form_of(step, program.buffers)
        if form is not None:
            forms[number] = form
            classes.setdefault((levels[number], form.key), []).append(number)
    _join_single_elements(classes, forms)
    chosen, refusals = _chosen(list(classes.values()), steps)
    if not chosen:
        return steps, refusals
    # Where weights are quantised, what waits for a batch of scales comes before large operands.
    is_early = any(buffer.dtype.is_float8 for buffer in program.buffers.values())
    return _joined(steps, needs, chosen, forms, is_early=is_early), refusals


class Form:
    """A kernel over canonical names, and what these stand for."""

    def __init__(self, template: Kernel, buffers: tuple[Buffer, ...], part: Part) -> None:
        self.template = template
        self.buffers = buffers
        self.part = part
        kinds = tuple((b.dtype, b.kind) for b in buffers)
        loops = tuple((m.loop, m.role, m.stage) for m in template.members)
        self.key = (template.axes, loops, template.stored, kinds)


def form_of(kernel: Kernel, buffers: Mapping[str, Buffer]) -> Form | None:
    """The canonical form of a kernel that may be part of a batch."""
    axes = [a for a in kernel.axes if a.atom is not None]
    if kernel.attention is not None or kernel.grouped is not None:
        return None
    if len(axes) > 1 or any(m.role not in (Role.FULL, Role.ALL) for m in kernel.members):
        return None
    size = axes[0].size if axes else 1
    is_reduction = any(m.role == Role.ALL for m in kernel.members)
    if not isinstance(size, int) or (is_reduction and (not axes or size > LONGEST_REDUCTION)):
        return None
    if size == 0 or any(_depends_on_call(m) for m in kernel.members):
        return None
    names = _Renaming({axes[0].atom: ix.var("x0", COUNT)} if axes and axes[0].atom else {})
    axis = replace(_AXIS, reduced=is_reduction)
    members = tuple(
        names.member(m, i, axis if axes else None) for i, m in enumerate(kernel.members)
    )
    known = tuple(names.known)
    made = tuple(_canonical_buffer(names.known[n], buffers[n], bool(axes)) for n in known)
    stored = frozenset(names.known[n] for n in kernel.stored)
    template = Kernel("batch", (axis,) if axes else (), members, stored)
    return Form(template, made, Part(known, size))


def _canonical_buffer(name: str, buffer: Buffer, is_sized: bool) -> Buffer:
    """A buffer of which only the dtype is known, and whether the program owns it."""
    shape: tuple[Dim, ...] = (COUNT,) if is_sized else (1,)
    kind = BufferKind.TEMP if buffer.kind == BufferKind.TEMP else BufferKind.INPUT
    return Buffer(name, buffer.dtype, shape, (1,), kind)


def _depends_on_call(member: Member) -> bool:
    """Whether data or a size of the call decides where it reads or what it computes.

    A batch knows of its parts what is in its table: buffers, and how many elements each has.
    """
    values = [e for e in ex.walk(member.loop.value, set()) if e.op in ("load", "index")]
    indices = (member.loop.index, *(e.index for e in values))
    atoms = (a for index in indices for a in ix.atoms_of(index))
    return any(e.args for e in values) or any(isinstance(a, Indirect | Symbol) for a in atoms)


class _Renaming:
    """Buffers numbered by first use, and the axis brought to its canonical name and size."""

    def __init__(self, mapping: dict[Atom, Dim]) -> None:
        self.known: dict[str, str] = {}  # buffer -> t0, t1, ...
        self._change = ex.Substitution(mapping, self._load)

    def _name(self, buffer: str) -> str:
        return self.known.setdefault(buffer, f"t{len(self.known)}")

    def _load(self, made: Expr) -> Expr:
        buffer, index = made.attr
        return ex.renamed_load(made, self._name(buffer), index)

    def member(self, member: Member, number: int, axis: Axis | None) -> Member:
        loop, change = member.loop, self._change
        value, out = change(loop.value), self._name(loop.out)
        is_reduced = member.role == Role.ALL
        axes = () if axis is None else (replace(axis, reduced=is_reduced),)
        made = replace(loop, out=out, axes=axes, value=value, index=change.index(loop.index))
        return Member(made, Role.INNER if is_reduced else member.role, number, member.stage)


# -- which may run together ----------------------------------------------------------------


def _needs(steps: Sequence[Step]) -> list[set[int]]:
    """By step, the earlier ones it waits for. Calls stay in their order: they may have effects."""
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    needs: list[set[int]] = []
    call: int | None = None
    for number, step in enumerate(steps):
        is_call = isinstance(step, LibraryCall)
        writes = {*step.makes(), *step.mutates} if isinstance(step, LibraryCall) else step.stored
        found = {writer[n] for n in step.reads() if n in writer}
        for name in writes:
            found.update(readers.pop(name, ()))
            if name in writer:
                found.add(writer[name])
            writer[name] = number
        for name in step.reads():
            readers.setdefault(name, []).append(number)
        if is_call and call is not None:
            found.add(call)
        call = number if is_call else call
        found.discard(number)
        needs.append(found)
    return needs


def _levels(needs: Sequence[set[int]]) -> list[int]:
    """Levels of steps: those of one level are independent; steps without users are in the last."""
    levels: list[int] = []
    for found in needs:
        levels.append(1 + max((levels[n] for n in found), default=-1))
    awaited = set().union(*needs)
    return [level if n in awaited else _LAST for n, level in enumerate(levels)]


def _may_wait(kernel: Kernel, program: Program, stays: set[str], limit: int) -> bool:
    """Check that nothing larger than the limit is held while a kernel waits for its batch."""
    given = set(program.donated)
    for name in touched(kernel):
        buffer = program.buffers[name]
        is_argument = buffer.kind in ARGUMENTS and name not in given
        if is_argument or name in stays:
            continue
        size = arena.num_bytes(buffer)
        if size is None or size > limit:
            return False
    return True


def _join_single_elements(
    classes: dict[tuple[object, ...], list[int]], forms: dict[int, Form]
) -> None:
    """Kernels of a single element join a class whose body with one step is theirs."""
    for key, numbers in list(classes.items()):
        form = forms[numbers[0]]
        if not form.template.axes or any(m.role != Role.FULL for m in form.template.members):
            continue
        single = _single(form)
        for number in classes.pop((key[0], single.key), []):
            forms[number] = Form(form.template, form.buffers, forms[number].part)
            numbers.append(number)
        numbers.sort()


def _single(form: Form) -> Form:
    """The form of the same loops with one step."""
    atom = form.template.axes[0].atom
    assert atom is not None
    members = [replace(m, loop=rewrite(m.loop, {atom: 0}, axes=())) for m in form.template.members]
    template = replace(form.template, axes=(), members=tuple(members))
    return Form(template, form.buffers, form.part)


def _chosen(
    classes: Iterable[list[int]], steps: Sequence[Step]
) -> tuple[list[list[int]], list[Refusal]]:
    chosen: list[list[int]] = []
    refusals: list[Refusal] = []
    for numbers in classes:
        kernels = [k for n in numbers if isinstance(k := steps[n], Kernel)]
        is_large = sum(k.num_bytes for k in kernels) > len(kernels) * _MUCH_BYTES
        reason = "each is large enough by itself"
        if len(kernels) < LEAST_PARTS:
            reason = f"{len(kernels)} equal kernels are too few for a batch"
        elif len(kernels) >= MANY_PARTS or not is_large:
            chosen.append(numbers)
            continue
        if len(kernels) > 1:
            refusals.append(Refusal(kernels[0].name, kernels[-1].name, reason))
    return chosen, refusals


# -- the new order -------------------------------------------------------------------------


def _joined(
    steps: Sequence[Step],
    needs: Sequence[set[int]],
    chosen: Sequence[list[int]],
    forms: dict[int, Form],
    *,
    is_early: bool,
) -> tuple[Step, ...]:
    """Steps in their order, each batch where the last of its kernels was, or early the first."""
    home = list(range(len(steps)))
    rank = {n: numbers[0] if is_early else n for numbers in chosen for n in numbers[-1:]}
    for numbers in chosen:
        for number in numbers:
            home[number] = numbers[-1]
    waiting: dict[int, set[int]] = {h: set() for h in home}
    users: dict[int, set[int]] = {h: set() for h in home}
    for number, found in enumerate(needs):
        for need in {home[n] for n in found} - {home[number]}:
            waiting[home[number]].add(need)
            users[need].add(home[number])
    batches = {numbers[-1]: numbers for numbers in chosen}
    ready = [(rank.get(h, h), h) for h, waits in waiting.items() if not waits]
    heapq.heapify(ready)
    made: list[Step] = []
    while ready:
        _, number = heapq.heappop(ready)
        parts = batches.get(number)
        made.append(steps[number] if parts is None else _batch(steps, parts, forms))
        for user in users[number]:
            waiting[user].discard(number)
            if not waiting[user]:
                heapq.heappush(ready, (rank.get(user, user), user))
    assert len(made) == len(waiting), "batches depend on each other"
    return tuple(made)


def _batch(steps: Sequence[Step], numbers: list[int], forms: dict[int, Form]) -> Kernel:
    kernels = tuple(k for n in numbers if isinstance(k := steps[n], Kernel))
    first, parts = forms[numbers[0]], tuple(forms[n].part for n in numbers)
    batch = Batch(first.template, {b.name: b for b in first.buffers}, parts, kernels)
    members = tuple(m for k in kernels for m in k.members)
    stored = frozenset[str]().union(*(k.stored for k in kernels))
    num_bytes, num_flops = sum(k.num_bytes for k in kernels), sum(k.num_flops for k in kernels)
    return Kernel(kernels[0].name, (), members, stored, num_bytes, num_flops, batch)
