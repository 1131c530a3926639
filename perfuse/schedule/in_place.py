"""Results that overwrite an operand of their kernel: memory that is already in the caches.

For example a library result, or a temporary in the arena, of which only its relu is ever read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import product

from perfuse.ir.matmul import rival_call
from perfuse.ir.program import ARGUMENTS, BufferKind, LibraryCall, Program
from perfuse.schedule.arena import first_and_last, held_by_results, output_buffers, touched
from perfuse.schedule.plan import Kernel, Member, Role, Step

# Makes new memory of its own, as matmuls that compete with ATen's do: what other calls return may
# be an argument of theirs.
_CONVOLUTION = "aten.convolution.default"


def written_over(
    program: Program, steps: tuple[Step, ...], arena: Collection[str] = ()
) -> dict[str, str]:
    """Buffers that take the memory of another, which no later step reads: new -> the first there.

    Both are in the arena, or the old one is a temporary with memory of its own.
    """
    first, last = first_and_last(map(touched, steps))
    needed = output_buffers(program) | _seen_elsewhere(steps)
    own = {name for name in _made(steps) if program.buffers[name].kind not in ARGUMENTS}
    own -= needed | set(arena)
    found: dict[str, str] = {}
    for number, step in enumerate(steps):
        if not isinstance(step, Kernel) or step.contraction is not None:
            continue  # other blocks of a contraction still read the operands
        dying = {n for n in step.reads() if last[n] == number and n not in needed}
        dying -= _shared_by_parts(step)
        for kernel in (step,) if step.batch is None else step.batch.kernels:
            new_names = sorted(name for name in kernel.stored if first[name] == number)
            old_names = [name for name in kernel.reads() if name in dying]
            taken: set[str] = set()
            for new, old in product(new_names, old_names):
                place = found.get(old, old)
                is_free = place in own or (new in arena and old in arena and place in arena)
                if not is_free or new in found or place in taken:
                    continue
                if _fits(kernel, new, old, program):
                    found[new] = place
                    taken.add(place)
    return found


def _shared_by_parts(kernel: Kernel) -> set[str]:
    """Buffers that several parts of a batch read, in any order."""
    parts = () if kernel.batch is None else kernel.batch.kernels
    readers = Counter(name for part in parts for name in part.reads())
    return {name for name, count in readers.items() if count > 1}


def _made(steps: tuple[Step, ...]) -> Iterator[str]:
    """Buffers that a kernel writes, or a call that is known to return new memory."""
    for step in steps:
        if isinstance(step, Kernel):
            yield from step.stored
        elif step.op == _CONVOLUTION or step.into_out or rival_call(step.op):
            yield from step.makes()


def _seen_elsewhere(steps: tuple[Step, ...]) -> set[str]:
    """Buffers that others may still read: what a result holds, and what a collective is given."""
    calls = [step for step in steps if isinstance(step, LibraryCall)]
    foreign = [c for c in calls if not c.op.startswith("aten.") and not rival_call(c.op)]
    return held_by_results(steps).union(*map(touched, foreign))


def _fits(kernel: Kernel, new: str, old: str, program: Program) -> bool:
    """Equal size, and each element of `old` is read only where that of `new` is written."""
    a, b = program.buffers[old], program.buffers[new]
    if b.kind != BufferKind.TEMP or (a.dtype, a.num_elements) != (b.dtype, b.num_elements):
        return False
    writers = [m for m in kernel.members if m.loop.out == new]
    if len(writers) != 1 or not writers[0].is_map:
        return False
    (writer,) = writers
    reads = {r for m in kernel.members for r in m.loop.reads() if r.buffer == old}
    if not all(read.index is writer.loop.index and not read.args for read in reads):
        return False
    return _is_last(kernel, writer) or _is_read_before(kernel, writer, old)


def _is_last(kernel: Kernel, writer: Member) -> bool:
    """Whether a kernel stores nothing else, and this as the last step for an element."""
    return len(kernel.stored) == 1 and writer.stage == max(m.stage for m in kernel.members)


def _is_read_before(kernel: Kernel, writer: Member, old: str) -> bool:
    """Whether no sweep reads `old` after the one that writes over it.

    A sweep loads an element once, for all its members. Here the writer does, before it stores.
    Formulas of earlier sweeps that are not stored are kept, or recomputed by each sweep that needs
    them: so the others may depend on those alone that the writer needs, too.
    """
    if any(m.role in (Role.SCAN, Role.SCATTER) for m in kernel.members):
        return False
    stages: dict[str, int] = {}
    loaded: dict[str, set[str]] = {}  # by formula: `old`, or what may load it when recomputed
    beside: list[set[str]] = []  # the same of each member of the writer's sweep
    for m in kernel.members:
        read = {load.buffer for load in m.loop.reads()}
        ways = read & {old}
        for name in read & loaded.keys():
            if stages[name] == m.stage:
                ways |= loaded[name]
            elif name not in kernel.stored:
                ways.add(name)
        if ways and m.stage > writer.stage:
            return False
        if m.stage == writer.stage:
            beside.append(ways)
        if ways and m.is_map:
            loaded[m.loop.out], stages[m.loop.out] = ways, m.stage
    own = loaded.get(writer.loop.out, set())
    return old in own or (bool(own) and all(ways <= own for ways in beside))
