"""A batch as one C++ function: the template's items, for each part of a table.

The elements of all parts are divided among the threads; a part's items are blocks of its elements,
each taken by the thread in whose share it begins.
"""

from __future__ import annotations

from perfuse.codegen.cpp.frame import CppFrame
from perfuse.codegen.cpp.kernel import KernelText, element_weight, place_item
from perfuse.codegen.cpp.partials import Partials
from perfuse.codegen.cpp.shape import BLOCK
from perfuse.codegen.cpp.sweep import Sweeps
from perfuse.codegen.writer import Writer
from perfuse.context import Context
from perfuse.schedule.plan import PART_SIZE, Batch

# The least that a part costs, in elements: reading its pointers, starting and ending its loops.
_LEAST_COST = 64
_PER_LINE = 16


def generate_batch(batch: Batch, context: Context) -> KernelText:
    """Write the function of a batch, with the template's buffers in the order of its table.

    The items come first: what they use decides the pointers.
    """
    frame = CppFrame(batch.template, batch.buffers, context, frozenset(), {})
    sweeps = Sweeps(frame, Partials(frame))
    inner = Writer(4)
    place_item(frame, inner)
    sweeps.item(inner)
    assert not frame.names.needs_status and not sweeps.kept, "batches are maps and plain sums"
    w = Writer(1)
    grain = max(frame.settings.cpu.grain_elements // element_weight(batch.template), 1)
    w.line("const int64_t total = starts[parts];")
    w.line(f"if (total < {grain}) threads = 1;")
    with w.block("const auto body = [=](int thread, int threads) PF_INLINED {", "};"):
        w.line("const int64_t begin = total * thread / threads;")
        w.line("const int64_t end = total * (thread + 1) / threads;")
        w.line("int64_t part = pf::part_at(starts, parts, begin);")
        with w.block("for (; part < parts && starts[part] < end; ++part) {"):
            _part(frame, w)
            with w.block("for (; item < last_item; ++item) {"):
                w.take(inner)
    w.line("pf::parallel(threads, body);")
    parameters = (
        "void** p, const int32_t* places, const int64_t* starts, const int64_t* counts, "
        "int64_t parts, int threads"
    )
    return KernelText(parameters, w.text(), tuple(frame.names.arguments))


def _part(frame: CppFrame, w: Writer) -> None:
    """The pointers and the size of a part, and which of its items belong to this thread."""
    names = frame.names
    w.line(f"const int32_t* const at = places + part * {len(names.arguments)};")
    for place, (buffer, name) in enumerate(names.arguments.items()):
        const = "" if names.is_written(buffer) else "const "
        kind = names.storage(buffer)
        w.line(f"{const}{kind}* __restrict const {name} = ({const}{kind}*)p[at[{place}]];")
    for symbol, name in names.symbols.items():
        assert symbol == PART_SIZE, f"a batch has no size {symbol}"
        w.line(f"const int64_t {name} = counts[part];")
    is_blocked = frame.shape.block is not None
    w.line("const int64_t low = starts[part];")
    w.line(f"int64_t item = begin > low ? (begin - low + {BLOCK - 1}) / {BLOCK} : 0;")
    items = f"(counts[part] + {BLOCK - 1}) / {BLOCK}" if is_blocked else "1"
    w.line(f"int64_t last_item = (end - low + {BLOCK - 1}) / {BLOCK};")
    w.line(f"if (last_item > {items}) last_item = {items};")


def batch_tables(name: str, batch: Batch, places: list[int]) -> str:
    """The tables of one batch: places of its pointers in P, where its parts start, their sizes."""
    starts = [0]
    for part in batch.parts:
        starts.append(starts[-1] + max(part.count, _LEAST_COST))
    return (
        _table("int32_t", f"places_{name}", places)
        + _table("int64_t", f"starts_{name}", starts)
        + _table("int64_t", f"counts_{name}", [part.count for part in batch.parts])
    )


def _table(kind: str, name: str, numbers: list[int]) -> str:
    lines = [
        "  " + ", ".join(map(str, numbers[at : at + _PER_LINE])) + ",\n"
        for at in range(0, len(numbers), _PER_LINE)
    ]
    return f"static const {kind} {name}[] = {{\n{''.join(lines)}}};\n"
