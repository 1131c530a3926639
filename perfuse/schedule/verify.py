"""The spec of a Plan: steps in order, values available in a kernel, memory for every buffer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from perfuse.errors import SpecError
from perfuse.ir import index as ix
from perfuse.ir.expr import Expr
from perfuse.ir.program import LibraryCall, Opaque
from perfuse.ir.verify import given_names, is_empty
from perfuse.schedule.arena import arena_buffers, first_and_last, output_buffers, touched
from perfuse.schedule.contract import result_load, sizes_of
from perfuse.schedule.fuse import accesses
from perfuse.schedule.plan import Batch, Kernel, Member, Plan, Role, Step
from perfuse.schedule.verify_memory import verify_memory

_STAGE = "after schedule"


def verify_plan(plan: Plan) -> None:
    """Raise SpecError at the first step that breaks the rules."""
    _check_coverage(plan)
    made = given_names(plan.program)
    _, last_read = first_and_last(step.reads() for step in plan.steps)
    for number, step in enumerate(plan.steps):
        _check_order(step, made, plan)
        if isinstance(step, Kernel):
            needed = output_buffers(plan.program)
            needed |= {name for name in step.makes() if last_read.get(name, -1) > number}
            for kernel in (step,) if step.batch is None else step.batch.kernels:
                _check_kernel(kernel, needed)
            if step.batch is not None:
                _check_batch(step.batch)
            if step.contraction is not None:
                _check_contraction(step, plan)
            made |= step.stored
        else:
            made |= {*step.makes(), *step.mutates}
    for name in output_buffers(plan.program) - made:
        if not is_empty(plan.program.buffers[name]):
            raise SpecError(f"{_STAGE}: the result {name} never reaches memory")
    for output in plan.program.outputs:
        if isinstance(output, Opaque) and output.name not in made:
            raise SpecError(f"{_STAGE}: no step makes the result {output.name}")
    _check_versions(plan)
    _check_places(plan)
    _check_over(plan)
    verify_memory(plan)


def _check_coverage(plan: Plan) -> None:
    """Every node of the program runs once."""
    numbers = sorted(m.number for kernel in plan.kernels for m in kernel.members)
    loops = [i for i, node in enumerate(plan.program.nodes) if not isinstance(node, LibraryCall)]
    if numbers != loops:
        raise SpecError(f"{_STAGE}: kernels hold the loops {numbers}, the program has {loops}")
    computed = [m.out for k in plan.kernels if k.contraction for m in k.contraction.matmuls]
    called = {name for step in plan.steps if isinstance(step, LibraryCall) for name in step.makes()}
    if len(set(computed)) < len(computed) or called & set(computed):
        raise SpecError(f"{_STAGE}: a matmul of {computed} runs twice")


def _check_versions(plan: Plan) -> None:
    """Steps read a buffer after the writes before them in the program, and before later ones."""
    nodes, ran = plan.program.nodes, list(_order_of_nodes(plan))
    writes: dict[str, list[tuple[int, int]]] = {}
    for at, number in ran:
        for name in accesses(nodes[number])[1]:
            writes.setdefault(name, []).append((at, number))
    for at, number in ran:
        for name in accesses(nodes[number])[0]:
            for written_at, writer in writes.get(name, ()):
                if (written_at - at) * (writer - number) < 0:
                    raise SpecError(
                        f"{_STAGE}: steps {at} and {written_at} read and write {name} in another "
                        "order than the program"
                    )


def _order_of_nodes(plan: Plan) -> Iterator[tuple[int, int]]:
    """The numbers of steps, and those of the program's nodes that they run."""
    calls = {id(node): number for number, node in enumerate(plan.program.nodes)}
    for at, step in enumerate(plan.steps):
        run: list[LibraryCall | None] = [None if isinstance(step, Kernel) else step]
        if isinstance(step, Kernel):
            yield from ((at, member.number) for member in step.members)
            run = [step.attention, step.grouped]
            run += step.contraction.matmuls if step.contraction is not None else ()
        known = [calls.get(id(call)) for call in run if call is not None]
        yield from ((at, number) for number in known if number is not None)


def _check_order(step: Step, made: set[str], plan: Plan) -> None:
    own = step.makes() if isinstance(step, Kernel) else set()
    for name in step.reads():
        if name not in made | own and not is_empty(plan.program.buffers.get(name)):
            raise SpecError(f"{_STAGE}: {name} is read before it is made, by {step}")


def _check_batch(batch: Batch) -> None:
    """The parts are the template with other names, and none touches what another writes."""
    writers: dict[str, int] = {}
    for number, (part, kernel) in enumerate(zip(batch.parts, batch.kernels, strict=True)):
        stored = set(batch.in_part(part, batch.template.stored))
        if stored != kernel.stored or not touched(kernel) <= set(part.buffers):
            raise SpecError(f"{_STAGE}: a part of a batch has the buffers {part}, not of {kernel}")
        writers |= dict.fromkeys(stored, number)
    for number, kernel in enumerate(batch.kernels):
        for name in touched(kernel):
            if writers.get(name, number) != number:
                raise SpecError(
                    f"{_STAGE}: two parts of a batch touch {name}, one writes: {kernel}"
                )


def _check_contraction(kernel: Kernel, plan: Plan) -> None:
    """Members read each result where it is made, and no block overwrites what others multiply."""
    assert kernel.contraction is not None
    rows = ix.product([axis.size for axis in kernel.axes if not axis.reduced])
    columns = ix.product([axis.size for axis in kernel.axes if axis.reduced])
    for matmul in kernel.contraction.matmuls:
        *outer, last = sizes_of(matmul)
        if (rows, columns) != (ix.product(outer), last):
            raise SpecError(f"{_STAGE}: {matmul.out} is not of the size of {kernel}")
        wanted = result_load(matmul, kernel, plan.program.buffers)
        reads = [r for m in kernel.members for r in m.loop.reads() if r.buffer == matmul.out]
        if any(read is not wanted for read in reads):
            raise SpecError(f"{_STAGE}: {matmul.out} is not read where it is made, in {kernel}")
    if kernel.stored & set(kernel.contraction.reads()):
        raise SpecError(f"{_STAGE}: an operand is overwritten in {kernel}")
    if not all(member.is_map for member in kernel.members):
        raise SpecError(f"{_STAGE}: an epilogue is not pointwise in {kernel}")


def _check_kernel(kernel: Kernel, needed: set[str]) -> None:
    """Its loops run over its axes, and what is `needed` outside of it is stored."""
    names = [axis.name for axis in kernel.axes]
    if len(set(names)) < len(names):
        raise SpecError(f"{_STAGE}: two axes of one name in {kernel}")
    sizes = {axis.name: axis.size for axis in kernel.axes}
    for member in kernel.members:
        if member.role not in tuple(Role):
            raise SpecError(f"{_STAGE}: unknown role {member.role} in {kernel}")
        for axis in member.loop.axes:
            if sizes.get(axis.name) != axis.size:
                raise SpecError(
                    f"{_STAGE}: {member.loop.out} runs over {axis}, not an axis of {kernel}"
                )
        _check_member(member, kernel)
    inside = kernel.makes() - kernel.stored
    for name in inside & needed:
        raise SpecError(f"{_STAGE}: {name} is needed outside of {kernel}, which does not store it")


def _check_member(member: Member, kernel: Kernel) -> None:
    """Check that a read of the same kernel's results is of the same element, computed before."""
    place = kernel.members.index(member)
    for read in member.loop.reads():
        for at, maker in enumerate(kernel.members):
            if maker.loop.out == read.buffer and maker is not member:
                _check_read(read, member, maker, is_before=at < place)


def _check_read(read: Expr, reader: Member, maker: Member, *, is_before: bool) -> None:
    where = f"{reader.loop.out} reads {read}, made in the same kernel"
    if read.index is not maker.loop.index:
        raise SpecError(f"{_STAGE}: {where} at [{maker.loop.index!r}]")
    if maker.number > reader.number:
        if is_before or maker.stage < reader.stage:
            raise SpecError(f"{_STAGE}: {where}, after it is overwritten")
        return
    if not is_before or reader.stage < maker.stage + (maker.role == Role.INNER):
        raise SpecError(f"{_STAGE}: {where}, before it is made")
    if maker.role in (Role.OUTER, Role.ALL, Role.SCAN, Role.SCATTER):
        raise SpecError(f"{_STAGE}: {where}, before all of it is made")


def _check_over(plan: Plan) -> None:
    """Check that buffers sharing memory are dead when the next one is written."""
    first, last = first_and_last(map(touched, plan.steps))
    sharing: dict[str, list[str]] = {}
    for name, old in plan.over.items():
        if old in plan.over:
            raise SpecError(f"{_STAGE}: {name} is written over {old}, itself written over another")
        sharing.setdefault(old, [old]).append(name)
    for names in sharing.values():
        names.sort(key=lambda name: first[name])
        for before, after in pairwise(names):
            if last[before] > first[after]:
                raise SpecError(f"{_STAGE}: {after} is written over {before}, which is read later")


def _check_places(plan: Plan) -> None:
    """Check that temporaries of known size are in the arena, and live ones do not overlap."""
    first, last = first_and_last(map(touched, plan.steps))
    for name, old in plan.over.items():
        if plan.places.get(name) != plan.places.get(old):
            raise SpecError(f"{_STAGE}: {name} overwrites {old} but has other memory")
        last[old] = max(last[old], last[name])
    spans = []
    for name, size in arena_buffers(plan.program, plan.steps, plan.arena_limit, plan.over).items():
        if name not in plan.places:
            raise SpecError(f"{_STAGE}: {name} has no place")
        offset = plan.places[name]
        if offset + size > plan.arena_bytes:
            raise SpecError(f"{_STAGE}: {name} ends past the arena of {plan.arena_bytes} bytes")
        spans.append((name, first[name], last[name], offset, offset + size))
    for i, (name, begin, end, low, high) in enumerate(spans):
        for other, begin2, end2, low2, high2 in spans[:i]:
            if begin <= end2 and begin2 <= end and low < high2 and low2 < high:
                raise SpecError(f"{_STAGE}: {name} and {other} live at one place at one time")
