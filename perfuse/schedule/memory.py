"""Buffer lifetimes: temporaries share one arena, placed first-fit over the steps they live."""

from __future__ import annotations

from perfuse.ir.program import Buffer, Extern, Program, View
from perfuse.schedule.plan import Kernel, Step, static_product

ALIGNMENT = 64


def touched(step: Step) -> set[str]:
    """Buffers in memory that a step reads or writes."""
    if isinstance(step, Extern):
        return set(step.reads()) | {o for o in step.outs if o} | set(step.mutates)
    return set(step.reads()) | set(step.stored)


def output_buffers(program: Program) -> set[str]:
    return {o.buffer for o in program.outputs if isinstance(o, View)}


def num_bytes(buffer: Buffer) -> int | None:
    """Bytes of storage, when known before the program runs."""
    count = static_product((buffer.num_elements,))
    return None if count is None else count * buffer.dtype.num_bytes


def place(program: Program, steps: tuple[Step, ...]) -> tuple[dict[str, int], int]:
    """Arena offsets for temporaries of known size that do not leave the program."""
    leaving = output_buffers(program)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, step in enumerate(steps):
        for name in touched(step):
            first.setdefault(name, number)
            last[name] = number
    places: dict[str, int] = {}
    live: list[tuple[int, int, int]] = []  # offset, end, last step
    total = 0
    for name in sorted(first, key=lambda n: (first[n], n)):
        buffer = program.buffers.get(name)
        if buffer is None or buffer.role != "temp" or name in leaving:
            continue
        size = num_bytes(buffer)
        if size is None or static_product(buffer.shape) is None:
            continue
        live = [piece for piece in live if piece[2] >= first[name]]
        offset = _first_fit(live, size)
        places[name] = offset
        live.append((offset, offset + size, last[name]))
        total = max(total, offset + size)
    return places, -(-total // ALIGNMENT) * ALIGNMENT


def _first_fit(live: list[tuple[int, int, int]], size: int) -> int:
    offset = 0
    for start, end, _ in sorted(live):
        if start - offset >= size:
            break
        offset = max(offset, -(-end // ALIGNMENT) * ALIGNMENT)
    return offset


def kernel_bytes(kernel: Kernel, buffers: dict[str, Buffer]) -> int:
    """Bytes a kernel moves through memory at least: each buffer once in and once out."""
    names = [*kernel.reads(), *sorted(kernel.stored)]
    return sum(num_bytes(buffers[n]) or 0 for n in names if n in buffers)
