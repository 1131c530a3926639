"""The specs of Program and Plan refuse what a broken stage would make."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfuse.context import Context
from perfuse.errors import SpecError
from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.program import Axis, Buffer, Loop, LoopKind, Program, View
from perfuse.ir.verify import verify_program
from perfuse.schedule.plan import Plan
from perfuse.schedule.schedule import fuse, place
from perfuse.schedule.verify import verify_plan

AXIS = Axis("d0", 8)
AT = ix.var("d0", 8)


def buffer(name: str, role: str = "temp") -> Buffer:
    return Buffer(name, DType.F32, (8,), (1,), role)


def doubled(out: str, source: str, at: ix.Dim = AT) -> Loop:
    value = ex.load(source, at, DType.F32)
    return Loop(out, (AXIS,), LoopKind.MAP, ex.apply("add", value, value), AT)


def chain() -> Program:
    """b1 = 2 * i0, b2 = 2 * b1, b3 = 2 * the reverse of b2."""
    buffers = {b.name: b for b in (buffer("i0", "input"), *map(buffer, ("b1", "b2", "b3")))}
    reverse = ix.add(7, ix.mul(AT, -1))
    loops = (doubled("b1", "i0"), doubled("b2", "b1"), doubled("b3", "b2", reverse))
    return Program(("i0",), buffers, loops, (View("b3", (8,), (1,)),))


def plan_of(program: Program) -> Plan:
    context = Context.default()
    return place(fuse(program, context), context)


def test_a_good_program_passes() -> None:
    verify_program(chain(), "lower")
    verify_plan(plan_of(chain()))


FIRST, OTHERS = doubled("b1", "i0"), chain().nodes[1:]
BROKEN_PROGRAMS = {
    "read before it is made": replace(chain(), nodes=chain().nodes[::-1]),
    "never made": replace(chain(), nodes=chain().nodes[:2]),
    "belong to no axis": replace(chain(), nodes=(replace(FIRST, axes=()), *OTHERS)),
    "two axes of one name": replace(chain(), nodes=(replace(FIRST, axes=(AXIS, AXIS)), *OTHERS)),
    "is outside of": replace(chain(), nodes=(doubled("b1", "i0", ix.add(AT, 1)), *OTHERS)),
}


@pytest.mark.parametrize("reason", BROKEN_PROGRAMS)
def test_a_broken_program_is_named(reason: str) -> None:
    with pytest.raises(SpecError, match=f"after lower: .*{reason}"):
        verify_program(BROKEN_PROGRAMS[reason], "lower")


def test_a_plan_out_of_order() -> None:
    plan = plan_of(chain())
    with pytest.raises(SpecError, match="b2 is read before it is made"):
        verify_plan(replace(plan, steps=plan.steps[::-1]))


def test_a_value_that_never_leaves_its_kernel() -> None:
    plan = plan_of(chain())
    first, *rest = plan.kernels
    with pytest.raises(SpecError, match="b2 is needed outside"):
        verify_plan(replace(plan, steps=(replace(first, stored=frozenset()), *rest)))


def test_a_member_before_what_it_reads() -> None:
    plan = plan_of(chain())
    first, *rest = plan.kernels
    turned = replace(first, members=first.members[::-1])
    with pytest.raises(SpecError, match="before it is made"):
        verify_plan(replace(plan, steps=(turned, *rest)))


def test_a_buffer_without_a_place() -> None:
    plan = plan_of(chain())
    with pytest.raises(SpecError, match="b2 has no place"):
        verify_plan(replace(plan, places={}))


def test_a_buffer_written_over_before_it_was_read() -> None:
    names = ("b1", "b2", "b3", "b4")
    buffers = {b.name: b for b in (buffer("i0", "input"), *map(buffer, names))}
    back = ix.add(7, ix.mul(AT, -1))
    sources = (("b1", "i0"), ("b2", "b1"), ("b3", "b2"))
    both = ex.apply("add", ex.load("b1", back, DType.F32), ex.load("b3", back, DType.F32))
    loops = (
        *(doubled(out, name, back) for out, name in sources),
        Loop("b4", (AXIS,), LoopKind.MAP, both, AT),
    )
    program = Program(("i0",), buffers, loops, (View("b4", (8,), (1,)),))
    plan = replace(plan_of(program), over={"b2": "b1"})
    places = {**plan.places, "b2": plan.places["b1"]}
    with pytest.raises(SpecError, match="b2 is written over b1, which is read later"):
        verify_plan(replace(plan, places=places))
