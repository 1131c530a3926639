"""Translation units: every distinct kernel once, and segments that launch kernels in a row.

The host calls a segment with two tables: `p`, the address of every buffer, and `s`, the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfuse.codegen.cpp.batch import batch_tables, generate_batch
from perfuse.codegen.cpp.kernel import KernelText, generate
from perfuse.codegen.cpp.rebase import rebased
from perfuse.codegen.cpp.spelling import STORAGE_TYPE
from perfuse.codegen.cpp.sweep import is_long
from perfuse.context import Context
from perfuse.ir.program import LibraryCall
from perfuse.schedule.memory import leading_inputs
from perfuse.schedule.plan import Kernel, Plan
from perfuse.torch_compat import fp8_cast_saturates

HEADER = """#define PF_LANES {lanes}
#define PF_FP8_SATURATE {saturate}
#include "perfuse_simd.h"
#include "simd_reduce.h"
"""

# Long kernels go into units of their own, which are compiled at -O1: at -O3 they run no faster (200
# multiplications and additions: 0.81 ms either way), but 5,000 take g++ 12 12.0 s instead of 3.3 s.
# They call functions such as sin: 1,000 of them compile in 0.5 s instead of 7, and run as fast.
LONG_UNIT, WIDE_UNIT = "long_kernels", "wide_kernels"
CALLS_MATH = "#define PF_CALLS_MATH 1\n"
HIDDEN = '\n__attribute__((visibility("hidden"))) void '
# Wide kernels, maps of this many lines that load and store, are compiled at -O1 too. From the
# backward of a recurrence of 256 steps (g++ 12, one core): 26 strided loads and 28 stores take
# 0.53 ms at -O1, 0.65 at -O3; stores alone 0.101 and 0.100. Long arithmetic loses 7 %.
_WIDE_LINES = 128
# Several compilers share the work on many kernels: a unit is full with this many lines.
_LINES_PER_UNIT = 800

Function = tuple[str, str]  # the name of a kernel, and its text from the parameters on


@dataclass(frozen=True, slots=True)
class Segment:
    """Kernels between two calls: the name of its entry, and whether indices are checked in it."""

    name: str
    kernels: tuple[str, ...]
    checks_indices: bool


@dataclass(frozen=True, slots=True)
class CppSources:
    """Sources of one program's kernels, and the tables the host fills."""

    units: tuple[tuple[str, str], ...]
    steps: tuple[Segment | LibraryCall, ...]
    pointers: tuple[str, ...]  # buffer at each place of the pointer table, after the status word
    sizes: tuple[str, ...]  # symbol at each place of the size table, after the thread count
    num_distinct: int

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(text for _, text in self.units)


def generate_sources(plan: Plan, context: Context) -> CppSources:
    """Spell the plan; equal kernels share one function."""
    functions: dict[str, str] = {}  # text after the name -> name
    long: set[str] = set()  # names of the functions that are long: much arithmetic
    wide: set[str] = set()  # and of long maps that may be little else than loads and stores
    leading = leading_inputs(plan)
    pointers = {name: place for place, name in enumerate(leading)}
    sizes: dict[str, int] = {}
    steps: list[Segment | LibraryCall] = []
    segments: list[str] = []
    tables: list[str] = []
    pending: list[tuple[str, str, bool]] = []
    read_again = frozenset(name for step in plan.steps for name in step.reads())

    def flush() -> None:
        if pending:
            name = f"segment{len(segments)}"
            calls = "".join(f"  {call}\n" for _, call, _ in pending)
            segments.append(f'extern "C" void {name}(void** p, const int64_t* s) {{\n{calls}}}\n')
            steps.append(
                Segment(name, tuple(k for k, _, _ in pending), any(c for _, _, c in pending))
            )
            pending.clear()

    for step in plan.steps:
        if isinstance(step, LibraryCall):
            flush()
            steps.append(step)
            continue
        if step.batch is not None:
            call = _batch_call(step, plan, context, functions, pointers, tables)
            pending.append((step.name, call, False))
            continue
        kernel, starts = rebased(step, plan.over)
        text = generate(kernel, plan.program.buffers, context, read_again, plan.over)
        key = f"({text.parameters}) {{\n{text.body}}}\n"
        name = functions.setdefault(key, f"kernel{len(functions)}")
        if is_long(kernel.members):
            long.add(name)
        elif _is_wide(kernel, text):
            wide.add(name)
        call = _call(name, text, plan, starts, pointers, sizes)
        pending.append((step.name, call, text.needs_status))
        if plan.is_guarded:
            flush()  # so that each kernel is checked by itself
    flush()
    units = _units(functions, (long, wide), [*tables, *segments], context)
    return CppSources(units, tuple(steps), tuple(pointers), tuple(sizes), len(functions))


def _call(
    name: str,
    text: KernelText,
    plan: Plan,
    starts: dict[str, int],
    pointers: dict[str, int],
    sizes: dict[str, int],
) -> str:
    arguments = []
    for buffer in text.arguments:
        place = pointers.setdefault(buffer, len(pointers)) + 1
        start = f" + {starts[buffer]}" if buffer in starts else ""
        arguments.append(f"({STORAGE_TYPE[plan.program.buffers[buffer].dtype]}*)p[{place}]{start}")
    for symbol in text.symbols:
        arguments.append(f"s[{sizes.setdefault(symbol, len(sizes)) + 1}]")
    if text.needs_status:
        arguments.append("(int64_t*)p[0]")
    return f"{name}({', '.join(arguments)}, (int)s[0]);"


def _batch_call(
    step: Kernel,
    plan: Plan,
    context: Context,
    functions: dict[str, str],
    pointers: dict[str, int],
    tables: list[str],
) -> str:
    """The call of a batch, whose table of pointers is built into the library."""
    assert step.batch is not None
    text = generate_batch(step.batch, context)
    key = f"({text.parameters}) {{\n{text.body}}}\n"
    name = functions.setdefault(key, f"kernel{len(functions)}")
    order = [int(buffer[1:]) for buffer in text.arguments]  # t3 is the fourth of a part's buffers
    places = []
    for part in step.batch.parts:
        for number in order:
            buffer = plan.over.get(part.buffers[number], part.buffers[number])
            places.append(pointers.setdefault(buffer, len(pointers)) + 1)
    tables.append(batch_tables(step.name, step.batch, places))
    own = ", ".join(f"{what}_{step.name}" for what in ("places", "starts", "counts"))
    return f"{name}(p, {own}, {len(step.batch.parts)}, (int)s[0]);"


def _is_wide(kernel: Kernel, text: KernelText) -> bool:
    """Whether a kernel is a long map of little else than loads and stores."""
    is_map = all(m.role == "full" and m.loop.kind == "map" for m in kernel.members)
    num_lines = text.body.count("\n")
    num_accesses = text.body.count("pf::load") + text.body.count("pf::store")
    return is_map and num_lines > _WIDE_LINES and 4 * num_accesses > num_lines


def _units(
    functions: dict[str, str],
    lowered: tuple[set[str], set[str]],
    segments: list[str],
    context: Context,
) -> tuple[tuple[str, str], ...]:
    """The first unit calls the kernels of the others by name."""
    if not segments:
        return ()
    header = HEADER.format(lanes=context.target.lanes, saturate=int(fp8_cast_saturates()))
    long, wide = ([(n, key) for key, n in functions.items() if n in names] for names in lowered)
    plain = [(n, key) for key, n in functions.items() if n not in lowered[0] | lowered[1]]
    first, more = _parted(plain)
    others = [
        *((f"more_kernels{i}", header, group) for i, group in enumerate(more)),
        *((f"{LONG_UNIT}{i}", CALLS_MATH + header, g) for i, g in enumerate(_shared_out(long))),
        *((f"{WIDE_UNIT}{i}", header, group) for i, group in enumerate(_shared_out(wide))),
    ]
    declared = [
        f"{HIDDEN}{name}{key[: key.index(') {') + 1]};"
        for *_, group in others
        for name, key in group
    ]
    own = [f"\nstatic void {name}{key}" for name, key in first]
    kernels = header + "".join((*declared, *own)) + "\n" + "\n".join(segments)
    units = [
        (unit, head + "".join(f"{HIDDEN}{name}{key}" for name, key in group))
        for unit, head, group in others
    ]
    return (("kernels", kernels), *units)


def _parted(functions: list[Function]) -> tuple[list[Function], list[list[Function]]]:
    """The functions of the first unit, and of others where they are too many for one."""
    if sum(key.count("\n") for _, key in functions) <= _LINES_PER_UNIT:
        return functions, []
    # Each unit has scratch memory of its own, for every thread: those that use it stay together.
    first = [each for each in functions if "pf::scratch(" in each[1]]
    return first, _shared_out([each for each in functions if "pf::scratch(" not in each[1]])


def _shared_out(functions: list[Function]) -> list[list[Function]]:
    """The functions in groups of about one unit's lines, in order."""
    groups: list[list[Function]] = []
    room = 0
    for name, key in functions:
        if room <= 0:
            groups.append([])
            room = _LINES_PER_UNIT
        groups[-1].append((name, key))
        room -= key.count("\n")
    return groups
