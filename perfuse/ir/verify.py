"""The spec of a Program: values are computed before use, loops use only their own axes."""

from __future__ import annotations

from perfuse.errors import SpecError
from perfuse.ir import index as ix
from perfuse.ir.atoms import Variable
from perfuse.ir.expr import index_variables
from perfuse.ir.index import Dim
from perfuse.ir.program import (
    ARGUMENTS,
    Buffer,
    BufferKind,
    LibraryCall,
    Loop,
    Node,
    Program,
    View,
    sizes_from_data,
)

# Buffers of these kinds hold something before the first node runs.
GIVEN = (*ARGUMENTS, BufferKind.SEEDS)


def verify_program(program: Program, stage: str) -> None:
    """Raise SpecError at the first node that breaks the rules; `stage` produced the program."""
    made = given_names(program)
    for node in program.nodes:
        _check_reads(node, made, program, stage)
        if isinstance(node, Loop):
            _check_loop(node, program, stage)
        made.update(names_written(node))
    for output in program.outputs:
        name = output.buffer if isinstance(output, View) else None
        if name is not None and name not in made and not is_empty(program.buffers.get(name)):
            raise SpecError(f"after {stage}: the result {output} is never made")


def given_names(program: Program) -> set[str]:
    """The names defined at the start: arguments, constants, sizes and seeds."""
    given = {*program.inputs, *program.constants, *(name for name, _ in program.symbols)}
    arguments = [program.buffers[name] for name in program.inputs if name in program.buffers]
    given.update(sizes_from_data(d for b in arguments for d in (*b.shape, *b.strides)))
    return given | {n for n, b in program.buffers.items() if b.kind in GIVEN}


def names_read(node: Node) -> list[str]:
    if isinstance(node, LibraryCall):
        return list(node.reads())
    return [read.buffer for read in node.reads()]


def names_written(node: Node) -> list[str]:
    if isinstance(node, LibraryCall):
        return node.makes() + list(node.mutates)
    return [node.out]


def is_empty(buffer: Buffer | None) -> bool:
    """No loop writes a tensor without elements."""
    return buffer is not None and any(size == 0 for size in buffer.shape)


def _check_reads(node: Node, made: set[str], program: Program, stage: str) -> None:
    for name in names_read(node):
        if name not in made and not is_empty(program.buffers.get(name)):
            raise SpecError(f"after {stage}: {name} is read before it is made, by {node}")


def _check_loop(loop: Loop, program: Program, stage: str) -> None:
    for problem in _problems(loop, program):
        raise SpecError(f"after {stage}: {problem}, in {loop}", at=str(loop.origin) or None)


def _problems(loop: Loop, program: Program) -> list[str]:
    names = [axis.name for axis in loop.axes]
    found = []
    if len(set(names)) < len(names):
        found.append(f"two axes of one name among {names}")
    if loop.out not in program.buffers:
        found.append(f"{loop.out} is no buffer")
    own = frozenset(axis.atom for axis in loop.axes if axis.atom is not None)
    strange = (loop.value.variables() | index_variables(loop.index)) - own
    if strange:
        found.append(f"variables {_texts(strange)} belong to no axis")
    reduced = {axis.atom for axis in loop.axes if axis.reduced and axis.atom is not None}
    if not loop.kind.is_scan and reduced & index_variables(loop.index):
        found.append("it stores along an axis that it reduces")
    runs = not any(axis.size == 0 for axis in loop.axes)
    for read in loop.reads():
        if read.buffer not in program.buffers:
            found.append(f"{read.buffer} is no buffer")
        elif runs and _is_outside(read.index, program.buffers[read.buffer]) and not read.args:
            found.append(f"{read} is outside of {program.buffers[read.buffer]}")
    return found


def _texts(atoms: frozenset[Variable]) -> list[str]:
    return sorted(f"{a} < {a.size!r}" for a in atoms)


def _is_outside(index: Dim, buffer: Buffer) -> bool:
    """Whether it is provably out of bounds."""
    low, high = ix.bounds(index)
    span = buffer.num_elements
    if not isinstance(low, int) or not isinstance(high, int) or not isinstance(span, int):
        return False
    # Only a plain sum of variables reaches its bounds; quotients are bounded loosely.
    plain = isinstance(index, int) or all(
        isinstance(a, Variable) for m, _ in index.terms for a in m
    )
    linear = isinstance(index, int) or all(len(m) == 1 for m, _ in index.terms)
    return plain and linear and (low < 0 or high >= span)
