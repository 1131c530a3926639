"""Buffer lifetimes: temporaries share one arena, placed first-fit over the steps they live."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from zlib import crc32

from perfuse.graph.storage_ops import Treatment, storage_treatment
from perfuse.ir.program import Buffer, BufferKind, LibraryCall, Program, View
from perfuse.schedule.plan import Kernel, Plan, Step, static_product

ALIGNMENT = 64
GUARD_BYTES = 256  # between buffers, where memory is guarded

_GPU_STEP = 512  # what PyTorch's allocator for GPUs rounds to


def allocated_bytes(num_bytes: int, device: str = "cpu") -> int:
    """Bytes that a tensor takes from its allocator."""
    return num_bytes if device == "cpu" else -(-num_bytes // _GPU_STEP) * _GPU_STEP


def is_forgotten_early(buffer: Buffer, smallest: int) -> bool:
    """An input of at least this size, which the host program drops after its last use."""
    size = num_bytes(buffer)
    return size is None or size >= smallest


def touched(step: Step) -> set[str]:
    """Buffers in memory that a step reads or writes."""
    if isinstance(step, LibraryCall):
        return {*step.reads(), *step.makes(), *step.mutates}
    return set(step.reads()) | set(step.stored)


def first_and_last(groups: Iterable[Iterable[str]]) -> tuple[dict[str, int], dict[str, int]]:
    """By name, the numbers of the first and of the last group that it is in."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, names in enumerate(groups):
        for name in names:
            first.setdefault(name, number)
            last[name] = number
    return first, last


def leading_inputs(plan: Plan) -> list[str]:
    """Inputs whose addresses come first in the table of pointers, if there are many.

    The host fills that part of the table at once, not line by line.
    """
    used = {name for kernel in plan.kernels for name in touched(kernel)}
    found = [name for name in dict.fromkeys(plan.program.inputs) if name in used]
    found = [name for name in found if plan.program.buffers[name].kind == BufferKind.INPUT]
    return found if len(found) >= plan.thresholds.many_inputs else []


def output_buffers(program: Program) -> set[str]:
    return {o.buffer for o in program.outputs if isinstance(o, View)}


def held_by_results(steps: Iterable[Step]) -> set[str]:
    """Buffers that the result of a call keeps: the values of a sparse tensor."""
    calls = [step for step in steps if isinstance(step, LibraryCall)]
    holding = [call for call in calls if storage_treatment(call.op) is Treatment.HELD]
    return {view.buffer for call in holding for view in call.views()}


def arena_buffers(
    program: Program,
    steps: tuple[Step, ...],
    largest: int | None = None,
    elsewhere: Collection[str] = (),
) -> dict[str, int]:
    """Temporaries that may be in an arena, with their bytes: of known size, less than `largest`,
    and dead when the step that touches them ends."""
    refused = output_buffers(program) | set(elsewhere) | held_by_results(steps)
    for step in steps:
        # PyTorch's own do; a collective may continue reading in the background.
        if isinstance(step, LibraryCall) and not step.op.startswith("aten."):
            refused |= touched(step)
    found = {}
    for name in {name for step in steps for name in touched(step)} - refused:
        buffer = program.buffers.get(name)
        size = num_bytes(buffer) if buffer is not None and buffer.kind == BufferKind.TEMP else None
        if buffer is None or size is None or static_product(buffer.shape) is None:
            continue
        if largest is None or size < largest:
            found[name] = size
    return found


def num_bytes(buffer: Buffer) -> int | None:
    """Bytes of storage, when known before the program runs."""
    count = static_product((buffer.num_elements,))
    return None if count is None else count * buffer.dtype.num_bytes


def place(
    program: Program,
    steps: tuple[Step, ...],
    largest: int | None = None,
    over: Mapping[str, str] = MappingProxyType({}),
    guard: int | None = None,
) -> tuple[dict[str, int], int]:
    """Arena offsets for the temporaries that may be there, and the total bytes.

    What is written over another there (new -> the first at its place) shares its place. With
    `guard`, bands surround every buffer, whose offset is a multiple of it and of its elements.
    """
    sizes = arena_buffers(program, steps, largest, over)
    first, last = first_and_last(map(touched, steps))
    for name, old in over.items():
        last[old] = max(last[old], last[name])
    places: dict[str, int] = {}
    live: list[tuple[int, int, int]] = []  # offset, end, last step
    total = 0
    for name in sorted(sizes, key=lambda n: (first[n], n)):
        size = sizes[name]
        live = [piece for piece in live if piece[2] >= first[name]]
        before, after = (0, 0) if guard is None else _bands(program.buffers[name], guard)
        start = _first_fit(live, before + size + after)
        places[name] = start + before
        live.append((start, start + before + size + after, last[name]))
        total = max(total, start + before + size + after)
    places |= {name: places[old] for name, old in over.items() if old in places}
    return places, -(-total // ALIGNMENT) * ALIGNMENT


def _bands(buffer: Buffer, guard: int) -> tuple[int, int]:
    """Bytes kept free before and after a buffer; those before differ from buffer to buffer."""
    # A pair of elements: ATen views real tensors as complex ones where their offset is even.
    step = max(guard, 2 * buffer.dtype.num_bytes)
    return GUARD_BYTES + step * (crc32(buffer.name.encode()) % 8), GUARD_BYTES


def _first_fit(live: list[tuple[int, int, int]], size: int) -> int:
    offset = 0
    for start, end, _ in sorted(live):
        if start - offset >= size:
            break
        offset = max(offset, -(-end // ALIGNMENT) * ALIGNMENT)
    return offset


def kernel_bytes(kernel: Kernel, buffers: Mapping[str, Buffer]) -> int:
    """Bytes a kernel moves through memory at least: each buffer once in, and once out."""
    total = sum(num_bytes(buffers[n]) or 0 for n in kernel.reads() if n in buffers)
    return total + sum(_stored_bytes(name, kernel, buffers[name]) for name in kernel.stored)


def _stored_bytes(name: str, kernel: Kernel, buffer: Buffer) -> int:
    """The bytes of a buffer that a kernel writes: all of it, or what its loops compute."""
    loops = [m.loop for m in kernel.members if m.loop.out == name]
    steps = [static_product([axis.size for axis in loop.kept]) for loop in loops]
    made = sum((count or 0) * buffer.dtype.num_bytes for count in steps)
    whole = num_bytes(buffer) or 0
    is_whole = not loops or None in steps  # a matmul fills its result
    return whole if is_whole else min(whole, made)
