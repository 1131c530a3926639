"""Results that overwrite an operand of their kernel: memory that is already in the caches.

For example a library result, or a temporary in the arena, of which only its relu is ever read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from perfuse.ir.matmul import rival_call
from perfuse.ir.program import BufferKind, LibraryCall, Program
from perfuse.schedule.arena import first_and_last, held_by_results, output_buffers, touched
from perfuse.schedule.plan import Kernel, Step

# Makes new memory of its own, as matmuls that compete with ATen's do: what other calls return may
# be an argument of theirs.
_CONVOLUTION = "aten.convolution.default"


def written_over(
    program: Program, steps: tuple[Step, ...], arena: Collection[str] = ()
) -> dict[str, str]:
    """Buffers that take the memory of another, which no later step reads: new -> the first there.

    The old one is the result of a library call, or both are in the arena.
    """
    first, last = first_and_last(map(touched, steps))
    fresh = set(_fresh(steps)) - output_buffers(program) - held_by_results(steps)
    found: dict[str, str] = {}
    for number, step in enumerate(steps):
        new = _only_result(step)
        if not isinstance(step, Kernel) or new is None or first[new] != number:
            continue
        for old in step.reads():
            place = found.get(old, old)
            is_free = old in fresh or (new in arena and old in arena and place in arena)
            if is_free and last[old] == number and _fits(step, new, old, program):
                found[new] = place
                break
    return found


def _fresh(steps: tuple[Step, ...]) -> Iterator[str]:
    for step in steps:
        if isinstance(step, LibraryCall) and (step.op == _CONVOLUTION or rival_call(step.op)):
            yield from step.makes()


def _only_result(step: Step) -> str | None:
    """The one result that a kernel stores, as the last step for an element."""
    if not isinstance(step, Kernel) or len(step.stored) != 1:
        return None
    if step.contraction is not None:
        return None  # other blocks still read the operands
    (name,) = step.stored
    writers = [m for m in step.members if m.loop.out == name]
    if len(writers) != 1 or not writers[0].is_map:
        return None
    return name if writers[0].stage == max(m.stage for m in step.members) else None


def _fits(kernel: Kernel, new: str, old: str, program: Program) -> bool:
    """Equal layout, and each element of `old` is read only where that of `new` is written."""
    a, b = program.buffers[old], program.buffers[new]
    if b.kind != BufferKind.TEMP or (a.dtype, a.shape, a.strides) != (b.dtype, b.shape, b.strides):
        return False
    (place,) = {m.loop.index for m in kernel.members if m.loop.out == new}
    reads = {r for m in kernel.members for r in m.loop.reads() if r.buffer == old}
    return all(read.index is place and not read.args for read in reads)
