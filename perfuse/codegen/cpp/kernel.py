"""One kernel of the Plan as one C++ function: items distributed to threads, results combined."""

from __future__ import annotations

from dataclasses import dataclass

from perfuse.codegen.cpp.frame import CppFrame
from perfuse.codegen.cpp.partials import Partials
from perfuse.codegen.cpp.scan import Scan
from perfuse.codegen.cpp.scatter import scatter_item
from perfuse.codegen.cpp.shape import TILE_ROWS
from perfuse.codegen.cpp.sweep import Sweeps
from perfuse.codegen.writer import Writer
from perfuse.schedule.plan import Kernel


@dataclass(frozen=True, slots=True)
class KernelText:
    """A function without its name, and what to pass to it."""

    parameters: str
    body: str
    arguments: tuple[str, ...]  # buffers, in order
    symbols: tuple[str, ...] = ()
    needs_status: bool = False


def generate(frame: CppFrame) -> KernelText:
    """Write a kernel. The items come first: what they use decides the parameters."""
    partials = Partials(frame)
    sweeps = Sweeps(frame, partials)
    w = Writer(1)
    _prologue(frame, partials, w)
    with w.block("const auto body = [=](int thread, int threads) PF_INLINED {", "};"):
        w.line("const int64_t begin = items * thread / threads;")
        w.line("const int64_t end = items * (thread + 1) / threads;")
        sweeps.declare(w)
        partials.start(w)
        with w.block("for (int64_t item = begin; item < end; ++item) {"):
            place_item(frame, w)
            _item(frame, sweeps, w)
            partials.after_row(w)
        partials.finish_thread(w)
        if sweeps.streamed:
            w.line("pf::stream_fence();")
    w.line("const int used = pf::parallel(threads, body);")
    w.line("(void)used;")
    partials.combine(w)
    names, kernel = frame.names, frame.kernel
    assert all(names.is_written(name) for name in kernel.stored), f"{kernel.name} lacks a store"
    passed = (tuple(names.arguments), tuple(names.symbols), names.needs_status)
    return KernelText(parameters_of(frame), w.text(), *passed)


def parameters_of(frame: CppFrame) -> str:
    """The parameters of a kernel, once its body is written."""
    names = frame.names
    parts = []
    for buffer, name in names.arguments.items():
        const = "" if names.is_written(buffer) else "const "
        parts.append(f"{const}{names.storage(buffer)}* __restrict {name}")
    parts += [f"int64_t {n}" for n in names.symbols.values()]
    if names.needs_status:
        parts.append("int64_t* status")
    return ", ".join([*parts, "int threads"])


def _prologue(frame: CppFrame, partials: Partials, w: Writer) -> None:
    """The number of items, and the number of threads they are worth."""
    w.line(f"const int64_t items = {_num_items(frame)};")
    grain = max(frame.settings.cpu.grain_elements // element_weight(frame.kernel), 1)
    w.line(f"if ({frame.count(frame.kernel.axes)} < {grain}) threads = 1;")
    w.line("if (items < threads) threads = items > 0 ? (int)items : 1;")
    partials.declare(w)


def element_weight(kernel: Kernel) -> int:
    """The cost of an element in additions: expensive elements are worth more threads."""
    return max(1, min(16, sum(m.loop.value.cost for m in kernel.members) // 4))


def _num_items(frame: CppFrame) -> str:
    shape = frame.shape
    items = frame.count(shape.rows)
    if shape.block is not None and shape.lane_axis is not None:
        items += f" * {_blocks(frame.dim(shape.lane_axis.size), shape.block)}"
    if shape.tile_axis is not None:
        items += f" * {_blocks(frame.dim(shape.tile_axis.size), TILE_ROWS)}"
    return items


def _blocks(size: str, block: int) -> str:
    return f"((int64_t({size}) + {block - 1}) / {block})"


def place_item(frame: CppFrame, w: Writer) -> None:
    """The variables of an item: its block of lanes, its band of a tile, its row."""
    shape, rest = frame.shape, "item"
    if shape.block is not None and shape.lane_axis is not None:
        w.line(f"const int64_t blocks = {_blocks(frame.dim(shape.lane_axis.size), shape.block)};")
        name = shape.lane_axis.name if shape.is_vertical else "first"
        w.line(f"const int64_t {name} = item % blocks * {shape.block};")
        w.line("const int64_t row = item / blocks;")
        rest = "row"
    if shape.tile_axis is not None:
        tall = frame.dim(shape.tile_axis.size)
        w.line(f"const int64_t bands = {_blocks(tall, TILE_ROWS)};")
        w.line(f"const int64_t top = row % bands * {TILE_ROWS};")
        w.line(f"const int64_t bottom = top + {TILE_ROWS} < {tall} ? top + {TILE_ROWS} : {tall};")
        w.line("const int64_t plane = row / bands;")
        rest = "plane"
    axes = [a for a in shape.rows if a.atom is not None]
    for i in reversed(range(1, len(axes))):
        size = frame.dim(axes[i].size)
        w.line(f"const int64_t {axes[i].name} = {rest} % ({size});")
        w.line(f"const int64_t rest_{i} = {rest} / ({size});")
        rest = f"rest_{i}"
    if axes:
        w.line(f"const int64_t {axes[0].name} = {rest};")


def _item(frame: CppFrame, sweeps: Sweeps, w: Writer) -> None:
    if frame.shape.is_scatter:
        scatter_item(frame, w)
    elif frame.shape.is_scan:
        Scan(frame).item(w)
    else:
        sweeps.item(w)
