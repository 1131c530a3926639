"""Matmuls as generated kernels: alone, or with the pointwise kernel that reads their result.

Functions from Plan to Plan. Nothing here chooses: a tuner chooses among the plans these return.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom, Indirect
from perfuse.ir.dtype import DType
from perfuse.ir.expr import SCALAR_OPS, Expr, walk
from perfuse.ir.index import Dim
from perfuse.ir.matmul import matmul_call
from perfuse.ir.program import (
    Axis,
    Buffer,
    BufferKind,
    Loop,
    Matmul,
    Program,
    View,
    sizes_from_data,
)
from perfuse.schedule import arena, domain
from perfuse.schedule.fuse import accesses
from perfuse.schedule.plan import (
    Contraction,
    Kernel,
    Member,
    Plan,
    Step,
    static_product,
    written_by,
)


def sizes_of(matmul: Matmul) -> tuple[Dim, ...]:
    """The sizes of a matmul's result: of a batch, rows, columns."""
    return (*matmul.operands.a.shape[:-1], matmul.operands.b.shape[-1])


def depth_of(matmul: Matmul) -> Dim:
    """The size that a matmul sums over."""
    return matmul.operands.a.shape[-1]


def matmul_flops(matmul: Matmul) -> int:
    """Multiplications and additions of a matmul; 0 where its sizes are not known."""
    return 2 * (static_product((*sizes_of(matmul), depth_of(matmul))) or 0)


# -- positions -----------------------------------------------------------------------------


def place_of(kernel: Kernel) -> tuple[Dim, ...]:
    """The position in a contraction's results, over its kernel's axes: (batch, row, column)."""
    assert kernel.contraction is not None
    axes = [axis for axis in kernel.axes if axis.size != 1]
    sizes = [axis.size for axis in axes]
    found = _refined(sizes, sizes_of(kernel.contraction.matmuls[0]))
    assert found is not None and len(found[0]) == len(sizes), f"axes cross the matrices: {kernel}"
    variables = [ix.var(axis.name, axis.size) for axis in axes]
    return tuple(domain.joined(sizes, variables, parts) for parts in found[2])


def _refined(
    first: Sequence[Dim], second: Sequence[Dim]
) -> tuple[list[Dim], list[list[int]], list[list[int]]] | None:
    """The common axes of two lists of sizes; a size of one has none."""
    found = domain.refine([d for d in first if d != 1], [d for d in second if d != 1])
    if found is None:
        return None
    common, parts_a, parts_b = found[0], iter(found[1]), iter(found[2])
    return (
        common,
        [[] if size == 1 else next(parts_a) for size in first],
        [[] if size == 1 else next(parts_b) for size in second],
    )


def index_at(view: View, place: Sequence[Dim]) -> Dim:
    """Where a view, broadcast to the sizes of a result, has its element at a position."""
    total = view.offset
    shown = zip(view.shape, view.strides, place[len(place) - len(view.shape) :], strict=True)
    for size, stride, step in shown:
        total = ix.add(total, ix.mul(0 if size == 1 else step, stride))
    return total


def result_load(matmul: Matmul, kernel: Kernel, buffers: Mapping[str, Buffer]) -> Expr:
    """The load by which members of a kernel read a matmul's result."""
    buffer = buffers[matmul.out]
    return ex.load(matmul.out, buffer.index(place_of(kernel)), buffer.dtype)


def result_value(
    matmul: Matmul, kernel: Kernel, product: Expr, buffers: Mapping[str, Buffer]
) -> Expr:
    """beta * bias + alpha * product * scales as the library computes it, rounded at the end."""
    wide, value = matmul.accumulate, product
    for scale in matmul.operands.scales:
        dtype = buffers[scale.buffer].dtype
        value = ex.apply("mul", value, _element(scale, kernel, dtype, wide))
    if matmul.alpha != 1:
        value = ex.apply("mul", value, ex.const(_number(matmul.alpha, wide), wide))
    bias = matmul.operands.bias
    if bias is not None and matmul.beta != 0:  # as in eager, a beta of 0 keeps NaN in the bias out
        dtype = buffers[bias.buffer].dtype
        added = _element(bias, kernel, dtype, wide)
        if matmul.beta != 1:
            added = ex.apply("mul", added, ex.const(_number(matmul.beta, wide), wide))
        value = ex.apply("add", value, added)
    return ex.round_to(value, buffers[matmul.out].dtype)


def _element(view: View, kernel: Kernel, dtype: DType, wide: DType) -> Expr:
    """The element of a broadcast operand at the position of a result."""
    return ex.cast(ex.load(view.buffer, index_at(view, place_of(kernel)), dtype), wide)


def _number(value: int | float, dtype: DType) -> int | float:
    return float(value) if dtype.is_float else int(value)


# -- kernels -------------------------------------------------------------------------------


def contracted(matmul: Matmul, program: Program) -> Kernel | str:
    """A kernel that computes a matmul and nothing else, or why there is none."""
    reason = _why_not(matmul, program)
    if reason:
        return reason
    *rows, columns = sizes_of(matmul)
    axes = (
        *(Axis(f"x{k}", size) for k, size in enumerate(rows)),
        Axis(f"x{len(rows)}", columns, reduced=True),
    )
    made = Kernel(
        f"matmul_{matmul.out}",
        axes,
        (),
        frozenset({matmul.out}),
        contraction=Contraction((matmul,)),
    )
    return _counted(made, program)


def contracted_with(matmuls: Sequence[Matmul], epilogue: Kernel, plan: Plan) -> Kernel | str:
    """A kernel that computes matmuls and the pointwise kernel that reads them, or why not."""
    for matmul in matmuls:
        reason = _why_not(matmul, plan.program) or _why_apart(matmul, epilogue, plan)
        if reason:
            return reason
    if len({sizes_of(matmul) for matmul in matmuls}) > 1:
        return "the results of the matmuls have different sizes"
    reason = _why_not_pointwise(epilogue)
    if reason:
        return reason
    made = _over_matrices(matmuls, epilogue, plan.program)
    if made is None:
        return "the kernel does not run over the rows and columns of the result"
    for matmul in matmuls:
        wanted = result_load(matmul, made, plan.program.buffers)
        reads = {r for m in made.members for r in m.loop.reads() if r.buffer == matmul.out}
        if reads != {wanted}:
            return f"{matmul.out} is read at other elements than it is made"
    return _counted(made, plan.program)


def with_prologue(kernel: Kernel, prologue: Loop, program: Program) -> Kernel:
    """A contraction that computes its right operand by a loop."""
    assert kernel.contraction is not None
    made = replace(kernel, contraction=replace(kernel.contraction, prologue=prologue))
    return _counted(made, program)


def _why_not(matmul: Matmul, program: Program) -> str:
    row, operands = matmul_call(matmul.op), matmul.operands
    rank = len(operands.b.shape)
    if row is None or rank not in (2, 3) or len(operands.a.shape) != rank:
        return "not a matmul of matrices"
    if matmul.window is not None:
        return "it fills a part of its result"
    if program.buffers[matmul.out].shape != sizes_of(matmul):
        return "its operands are broadcast"
    if not all(isinstance(number, int | float) for number in (matmul.alpha, matmul.beta)):
        return "its factors are not numbers"
    dims = [d for view in matmul.views() for d in (*view.shape, *view.strides, view.offset)]
    return "its sizes depend on data" if sizes_from_data(dims) else ""


def _why_apart(matmul: Matmul, epilogue: Kernel, plan: Plan) -> str:
    """Why a matmul cannot move to the place of a later kernel that reads it."""
    if matmul not in plan.steps or epilogue not in plan.steps:
        return "one of the steps is not in the plan"
    first, last = plan.steps.index(matmul), plan.steps.index(epilogue)
    if matmul.out not in epilogue.reads() or first > last:
        return f"{epilogue.name} does not read {matmul.out}"
    if epilogue.stored & set(matmul.reads()):
        return f"{epilogue.name} overwrites an operand"
    for step in plan.steps[first + 1 : last]:
        if matmul.out in step.reads():
            return f"{matmul.out} is read before {epilogue.name}"
        if matmul.out in written_by(step):
            return f"{matmul.out} is updated in place before {epilogue.name}"
        if written_by(step) & set(matmul.reads()):
            return f"an operand is overwritten before {epilogue.name}"
    return ""


def _why_not_pointwise(kernel: Kernel) -> str:
    if not kernel.members or kernel.batch is not None or kernel.contraction is not None:
        return f"{kernel.name} is not a kernel of loops"
    axes = {axis.name for axis in kernel.axes}
    for member in kernel.members:
        loop = member.loop
        if not member.is_map or {a.name for a in loop.axes} != axes:
            return f"{loop.out} is not computed element by element"
        indices = [loop.index, *(read.index for read in loop.reads())]
        if any(isinstance(atom, Indirect) for at in indices for atom in ix.atoms_of(at)):
            return f"{loop.out} is indexed by data"
    return ""


def _over_matrices(matmuls: Sequence[Matmul], epilogue: Kernel, program: Program) -> Kernel | None:
    """The kernel over axes of which each is part of the batch and rows, or of the columns."""
    sizes, out = sizes_of(matmuls[0]), matmuls[0].out
    guide = next(r.index for m in epilogue.members for r in m.loop.reads() if r.buffer == out)
    old = domain.order_by(epilogue.axes, guide)
    found = _refined([axis.size for axis in old], sizes)
    if found is None:
        return None
    common, parts_of_old, parts_of_result = found
    columns = set(parts_of_result[-1])
    axes = tuple(Axis(f"x{k}", size, k in columns) for k, size in enumerate(common))
    variables = domain.axis_names(common)
    mapping: dict[Atom, Dim] = {
        axis.atom: domain.joined(common, variables, parts)
        for axis, parts in zip(old, parts_of_old, strict=True)
        if axis.atom is not None
    }
    plain = tuple(replace(axis, reduced=False) for axis in axes)
    members = tuple(_rewritten(m, mapping, plain) for m in epilogue.members)
    outs = [matmul.out for matmul in matmuls]
    stored = epilogue.stored | _needed_elsewhere(outs, epilogue, program)
    return replace(
        epilogue,
        axes=axes,
        members=members,
        stored=frozenset(stored),
        contraction=Contraction(tuple(matmuls)),
    )


def _rewritten(member: Member, mapping: dict[Atom, Dim], axes: tuple[Axis, ...]) -> Member:
    return replace(member, loop=domain.rewrite(member.loop, mapping, axes))


def _needed_elsewhere(outs: Sequence[str], epilogue: Kernel, program: Program) -> set[str]:
    """Results of matmuls that others read, or that the program returns."""
    own = {member.number for member in epilogue.members}
    read = arena.output_buffers(program)
    for number, node in enumerate(program.nodes):
        if number not in own:
            read |= set(accesses(node)[0])
    return {name for name in outs if name in read}


def _counted(kernel: Kernel, program: Program) -> Kernel:
    """The kernel with its bytes and operations; results count as the program's temporaries."""
    assert kernel.contraction is not None
    flops = sum(map(matmul_flops, kernel.contraction.matmuls))
    seen: set[Expr] = set()
    for member in kernel.members:
        count = static_product([axis.size for axis in member.loop.axes]) or 0
        flops += count * sum(e.op in SCALAR_OPS for e in walk(member.loop.value, seen))
    return replace(kernel, num_bytes=arena.kernel_bytes(kernel, program.buffers), num_flops=flops)


# -- plans ---------------------------------------------------------------------------------


def with_contraction(plan: Plan, kernel: Kernel) -> Plan:
    """The plan with a kernel in place of its matmuls and of the kernel of its epilogue."""
    assert kernel.contraction is not None
    matmuls = kernel.contraction.matmuls
    replaced = [step for step in plan.steps if step in matmuls or _is_named(step, kernel.name)]
    steps: list[Step] = [step for step in plan.steps if step not in replaced]
    last = plan.steps.index(replaced[-1])
    steps.insert(last + 1 - len(replaced), kernel)
    buffers = dict(plan.program.buffers)
    for matmul in matmuls:
        # The library used to allocate it: now it is a temporary like any other.
        if buffers[matmul.out].kind is BufferKind.EXTERN:
            buffers[matmul.out] = replace(buffers[matmul.out], kind=BufferKind.TEMP)
    program = replace(plan.program, buffers=buffers)
    return replace(plan, program=program, steps=tuple(steps))


def _is_named(step: Step, name: str) -> bool:
    return isinstance(step, Kernel) and step.name == name
