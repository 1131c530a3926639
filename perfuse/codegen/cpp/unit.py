"""Translation units: every distinct kernel once, and segments that launch kernels in a row.

The host calls a segment with two tables: `p`, the address of every buffer, and `s`, the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfuse.codegen.cpp.batch import batch_tables, generate_batch
from perfuse.codegen.cpp.frame import CppFrame
from perfuse.codegen.cpp.kernel import KernelText, generate
from perfuse.codegen.cpp.rebase import rebased
from perfuse.codegen.cpp.spelling import STORAGE_TYPE
from perfuse.codegen.cpp.sweep import is_long
from perfuse.codegen.cpp.templates.attention import generate_attention
from perfuse.codegen.cpp.templates.choices import template_of
from perfuse.codegen.cpp.templates.grouped import generate_grouped
from perfuse.codegen.cpp.templates.kernel import generate_contraction
from perfuse.context import Context
from perfuse.ir.program import LibraryCall
from perfuse.schedule.arena import leading_inputs
from perfuse.schedule.plan import Kernel, Plan
from perfuse.torch_compat.ops import fp8_cast_saturates

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
# Contractions use a header of their own. One takes g++ 12 half a second: few share a unit.
TEMPLATE_UNIT = "template_kernels"
TEMPLATE_HEADER = '#include "templates/gemm.h"\n'
# Attention uses another one, on top of it.
ATTENTION_UNIT = "attention_kernels"
_ATTENTION_HEADERS = ("attention.h", "attention_gradient.h")
ATTENTION_HEADER = TEMPLATE_HEADER + "".join(
    f'#include "templates/{name}"\n' for name in _ATTENTION_HEADERS
)
# So do matmuls of groups of rows.
GROUPED_UNIT = "grouped_kernels"
GROUPED_HEADER = TEMPLATE_HEADER + '#include "templates/grouped.h"\n'
_LINES_PER_TEMPLATE_UNIT = 100
HIDDEN = '\n__attribute__((visibility("hidden"))) void '
# Wide kernels, maps of this many lines that load and store, are compiled at -O1 too. From the
# backward of a recurrence of 256 steps (g++ 12, one core): 26 strided loads and 28 stores take
# 0.53 ms at -O1, 0.65 at -O3; stores alone 0.101 and 0.100. Long arithmetic loses 7 %.
_WIDE_LINES = 128
# Several compiler processes share the work on many kernels: a full unit has this many lines.
_LINES_PER_UNIT = 800

Function = tuple[str, str]  # the name of a kernel, and its text from the parameters on


@dataclass(frozen=True, slots=True)
class Segment:
    """The kernels of a turn: the name of their entry, and whether indices are checked in it."""

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
    """Generate the kernels of a plan; equal ones share one function."""
    return _Sources(plan, context).run()


class _Sources:
    """The functions and segments generated from the turns so far."""

    def __init__(self, plan: Plan, context: Context) -> None:
        self.plan = plan
        self.context = context
        self.functions: dict[str, str] = {}  # text after the name -> name
        self.long: set[str] = set()  # names of the functions that are long: much arithmetic
        self.wide: set[str] = set()  # and of long maps, perhaps mostly loads and stores
        self.templates: set[str] = set()  # and of contractions
        self.attention: set[str] = set()  # and of attention
        self.grouped: set[str] = set()  # and of matmuls of groups
        self.pointers = {name: place for place, name in enumerate(leading_inputs(plan))}
        self.sizes: dict[str, int] = {}
        self.steps: list[Segment | LibraryCall] = []
        self.segments: list[str] = []
        self.tables: list[str] = []
        self.read_again = frozenset(name for step in plan.steps for name in step.reads())

    def run(self) -> CppSources:
        for turn in self.plan.memory.turns:
            steps = [self.plan.steps[number] for number in turn.numbers]
            kernels = [step for step in steps if isinstance(step, Kernel)]
            if kernels:
                self._add_segment(kernels)
            self.steps += [step for step in steps if not isinstance(step, Kernel)]
        return CppSources(
            units=self._units() if self.segments else (),
            steps=tuple(self.steps),
            pointers=tuple(self.pointers),
            sizes=tuple(self.sizes),
            num_distinct=len(self.functions),
        )

    def _add_segment(self, kernels: list[Kernel]) -> None:
        rows = [self._called(k) for k in kernels]
        name, calls = f"segment{len(self.segments)}", "".join(f"  {call}\n" for call, _ in rows)
        self.segments.append(f'extern "C" void {name}(void** p, const int64_t* s) {{\n{calls}}}\n')
        checks_indices = any(needs_status for _, needs_status in rows)
        self.steps.append(Segment(name, tuple(k.name for k in kernels), checks_indices))

    def _called(self, step: Kernel) -> tuple[str, bool]:
        """The call of a kernel, and whether it reports a status."""
        if step.contraction is not None:
            return self._contraction(step)
        if step.attention is not None:
            return self._attention(step)
        if step.grouped is not None:
            return self._grouped(step)
        return self._kernel(step) if step.batch is None else self._batch(step)

    def _function(self, text: KernelText) -> str:
        """The name of a function of this text."""
        key = f"({text.parameters}) {{\n{text.body}}}\n"
        return self.functions.setdefault(key, f"kernel{len(self.functions)}")

    def _kernel(self, step: Kernel) -> tuple[str, bool]:
        """The call of a kernel of loops."""
        plan = self.plan
        kernel, starts = rebased(step, plan.over)
        buffers = plan.program.buffers
        text = generate(CppFrame(kernel, buffers, self.context, self.read_again, plan.over))
        name = self._function(text)
        if is_long(kernel.members):
            self.long.add(name)
        elif _is_wide(kernel, text):
            self.wide.add(name)
        return self._call(name, text, starts), text.needs_status

    def _call(self, name: str, text: KernelText, starts: dict[str, int]) -> str:
        arguments = []
        for buffer in text.arguments:
            start = f" + {starts[buffer]}" if buffer in starts else ""
            kind = STORAGE_TYPE[self.plan.program.buffers[buffer].dtype]
            arguments.append(f"({kind}*)p[{self._place(buffer)}]{start}")
        for symbol in text.symbols:
            arguments.append(f"s[{self.sizes.setdefault(symbol, len(self.sizes)) + 1}]")
        if text.needs_status:
            arguments.append("(int64_t*)p[0]")
        return f"{name}({', '.join(arguments)}, (int)s[0]);"

    def _place(self, buffer: str) -> int:
        """The place of a buffer in the table of pointers."""
        return self.pointers.setdefault(buffer, len(self.pointers)) + 1

    def _contraction(self, step: Kernel) -> tuple[str, bool]:
        """The call of a contraction, by the template that the plan names."""
        plan, template = self.plan, template_of(self.plan.templates[step.name])
        text = generate_contraction(step, template, plan.program.buffers, self.context, plan.over)
        return self._call_apart(text, self.templates)

    def _attention(self, step: Kernel) -> tuple[str, bool]:
        """The call of a kernel of attention."""
        plan = self.plan
        text = generate_attention(step, plan.program.buffers, self.context, plan.over)
        return self._call_apart(text, self.attention)

    def _grouped(self, step: Kernel) -> tuple[str, bool]:
        """The call of a kernel that multiplies groups of rows."""
        plan = self.plan
        text = generate_grouped(step, plan.program.buffers, self.context, plan.over)
        return self._call_apart(text, self.grouped)

    def _call_apart(self, text: KernelText, names: set[str]) -> tuple[str, bool]:
        """The call of a function that goes into the units of these names."""
        name = self._function(text)
        names.add(name)
        return self._call(name, text, {}), text.needs_status

    def _batch(self, step: Kernel) -> tuple[str, bool]:
        """The call of a batch, whose table of pointers is built into the library."""
        assert step.batch is not None
        text = generate_batch(step.batch, self.context)
        name = self._function(text)
        each = [step.batch.in_part(part, text.arguments) for part in step.batch.parts]
        buffers = [buffer for buffers in each for buffer in buffers]
        places = [self._place(self.plan.over.get(buffer, buffer)) for buffer in buffers]
        self.tables.append(batch_tables(step.name, step.batch, places))
        own = ", ".join(f"{what}_{step.name}" for what in ("places", "starts", "counts"))
        return f"{name}(p, {own}, {len(step.batch.parts)}, (int)s[0]);", False

    def _units(self) -> tuple[tuple[str, str], ...]:
        """The first unit calls the kernels of the others by name."""
        target = self.context.target
        header = HEADER.format(lanes=target.lanes, saturate=int(fp8_cast_saturates()))
        functions = [(name, key) for key, name in self.functions.items()]
        apart = (self.long, self.wide, self.templates, self.attention, self.grouped)
        long, wide, templates, attention, grouped = (
            [f for f in functions if f[0] in names] for names in apart
        )
        first, more = _parted([f for f in functions if not any(f[0] in names for names in apart)])
        others = [
            *((f"more_kernels{i}", header, group) for i, group in enumerate(more)),
            *((f"{LONG_UNIT}{i}", CALLS_MATH + header, g) for i, g in enumerate(_shared_out(long))),
            *((f"{WIDE_UNIT}{i}", header, group) for i, group in enumerate(_shared_out(wide))),
            *(
                (f"{TEMPLATE_UNIT}{i}", header + TEMPLATE_HEADER, group)
                for i, group in enumerate(_shared_out(templates, _LINES_PER_TEMPLATE_UNIT))
            ),
            *(
                (f"{ATTENTION_UNIT}{i}", header + ATTENTION_HEADER, group)
                for i, group in enumerate(_shared_out(attention, _LINES_PER_TEMPLATE_UNIT))
            ),
            *(
                (f"{GROUPED_UNIT}{i}", header + GROUPED_HEADER, group)
                for i, group in enumerate(_shared_out(grouped, _LINES_PER_TEMPLATE_UNIT))
            ),
        ]
        called = [function for *_, group in others for function in group]
        declared = [f"{HIDDEN}{name}{key[: key.index(') {') + 1]};" for name, key in called]
        own = [f"\nstatic void {name}{key}" for name, key in first]
        texts = "\n".join([*self.tables, *self.segments])
        kernels = header + "".join((*declared, *own)) + "\n" + texts
        units = [
            (unit, head + "".join(f"{HIDDEN}{name}{key}" for name, key in group))
            for unit, head, group in others
        ]
        return (("kernels", kernels), *units)


def _is_wide(kernel: Kernel, text: KernelText) -> bool:
    """Whether a kernel is a long map of mostly loads and stores."""
    is_map = all(m.is_map for m in kernel.members)
    num_lines = text.body.count("\n")
    num_accesses = text.body.count("pf::load") + text.body.count("pf::store")
    return is_map and num_lines > _WIDE_LINES and 4 * num_accesses > num_lines


def _parted(functions: list[Function]) -> tuple[list[Function], list[list[Function]]]:
    """The functions of the first unit, and of others if there are too many for one."""
    if sum(key.count("\n") for _, key in functions) <= _LINES_PER_UNIT:
        return functions, []
    # Each unit has its own scratch memory for every thread: kernels that use it stay together.
    first = [each for each in functions if "pf::scratch(" in each[1]]
    return first, _shared_out([each for each in functions if "pf::scratch(" not in each[1]])


def _shared_out(
    functions: list[Function], num_lines: int = _LINES_PER_UNIT
) -> list[list[Function]]:
    """The functions in groups of about one unit's lines, in order."""
    groups: list[list[Function]] = []
    room = 0
    for name, key in functions:
        if room <= 0:
            groups.append([])
            room = num_lines
        groups[-1].append((name, key))
        room -= key.count("\n")
    return groups
