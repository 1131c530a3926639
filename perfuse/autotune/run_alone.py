"""Steps of a plan as plans of their own, which tuners identify, compile and run alone."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

from perfuse.backends import backend_of
from perfuse.context import Context
from perfuse.ir import index as ix
from perfuse.ir.atoms import Symbol
from perfuse.ir.program import Buffer, BufferKind, Matmul, Node, Program, View
from perfuse.runtime.host_names import Call
from perfuse.schedule.plan import Kernel, Plan, Step
from perfuse.schedule.size_hints import value_of


def plan_of_steps(steps: Sequence[Step], plan: Plan, returned: Set[str]) -> Plan:
    """A plan of some steps: their inputs are arguments, their results in `returned` its results.

    A given buffer that they overwrite stays given.
    """
    known = plan.program.buffers
    written = [name for step in steps for name in made_by(step)]
    made = {name for name in written if known[name].kind is not BufferKind.INPUT}
    read = [name for step in steps for name in step.reads()]
    names = dict.fromkeys([*read, *written, *(name for step in steps for name in _inside(step))])
    ours = {name for step in steps if isinstance(step, Kernel) for name in step.makes()}
    buffers = {name: _own(known[name], name in made, name in ours) for name in names}
    outputs = tuple(
        View(name, buffers[name].shape, buffers[name].strides, 0)
        for name in sorted(returned & made)
    )
    given = tuple(name for name in names if name not in made and name in {*read, *written})
    nodes = tuple(node for step in steps for node in _nodes(step))
    program = Program(given, buffers, nodes, outputs, hints=plan.program.hints)
    return Plan(program, tuple(steps), (), {}, 0, thresholds=plan.thresholds)


def plan_of_one(kernel: Kernel, plan: Plan) -> Plan:
    """A plan of a kernel alone: the buffers it reads are arguments, those it stores results."""
    return plan_of_steps((kernel,), plan, kernel.stored)


def are_sizes_shown(alone: Plan) -> bool:
    """Whether the host can read every dynamic size from the shapes of a plan's arguments."""
    program = alone.program
    dims = [d for b in program.buffers.values() for d in (*b.shape, *b.strides)]
    dims += [axis.size for kernel in alone.kernels for axis in kernel.axes]
    matmuls = [step for step in alone.steps if isinstance(step, Matmul)]
    dims += [d for m in matmuls for v in m.views() for d in (*v.shape, *v.strides, v.offset)]
    used = {atom for dim in dims for atom in ix.atoms_of(dim) if isinstance(atom, Symbol)}
    shown = {ix.as_atom(size) for name in program.inputs for size in program.buffers[name].shape}
    return used <= shown


def made_by(step: Step) -> Sequence[str]:
    """The buffers that a step makes, in a fixed order."""
    return sorted(step.makes()) if isinstance(step, Kernel) else step.makes()


def _inside(step: Step) -> Sequence[str]:
    """The operand that a contraction computes: no memory, but a type and strides."""
    contraction = step.contraction if isinstance(step, Kernel) else None
    prologue = contraction.prologue if contraction is not None else None
    return () if prologue is None else (prologue.out,)


def _own(buffer: Buffer, is_made: bool, is_ours: bool) -> Buffer:
    """A library may return memory that it allocated; a generated kernel fills the program's."""
    if not is_made:
        return replace(buffer, kind=BufferKind.INPUT)
    return replace(buffer, kind=BufferKind.TEMP) if is_ours else buffer


def _nodes(step: Step) -> Sequence[Node]:
    if not isinstance(step, Kernel):
        return (step,)
    matmuls = () if step.contraction is None else step.contraction.matmuls
    own: tuple[Node, ...] = () if step.attention is None else (step.attention,)
    own += () if step.grouped is None else (step.grouped,)
    return (*matmuls, *own, *(member.loop for member in step.members))


def identity_of(alone: Plan) -> str:
    """The text of a plan with names numbered in order of use: equal problems are equal."""
    buffers = alone.program.buffers.values()
    text = "\n".join([str(alone), *map(str, buffers)])
    text += "".join(repr(buffer.strides) for buffer in buffers)
    text += repr([[value_of(d, alone.program.hints) for d in b.shape] for b in buffers])
    numbers: dict[str, str] = {}
    known = {*alone.program.buffers, *(kernel.name for kernel in alone.kernels)}

    def numbered(found: re.Match[str]) -> str:
        name = found.group()
        return numbers.setdefault(name, f"v{len(numbers)}") if name in known else name

    return re.sub(r"\b[A-Za-z_]\w*\b", numbered, text)


def built(plan: Plan, context: Context) -> tuple[Any, Any]:
    """The sources of a placed plan and what was built of them, from the store if it is there."""
    backend = backend_of(context.target)
    sources = backend.generate(plan, context)
    return sources, backend.build(sources, context)


def loaded(plan: Plan, context: Context) -> Call:
    """A callable that runs a placed plan."""
    backend, (sources, entries) = backend_of(context.target), built(plan, context)
    return backend.load(backend.host(plan, sources, context), entries, {}, context)
