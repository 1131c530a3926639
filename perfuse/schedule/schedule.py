"""`fuse` and `place`: loops of a Program become kernels in order, temporaries get memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from perfuse.context import Context
from perfuse.ir.attention import Attention
from perfuse.ir.expr import SCALAR_OPS, Expr, walk
from perfuse.ir.program import ARGUMENTS, BufferKind, LibraryCall, Loop, Opaque, Program
from perfuse.schedule import arena, shape
from perfuse.schedule.allocate import with_memory
from perfuse.schedule.attention import attention_kernel
from perfuse.schedule.batch import batched
from perfuse.schedule.fuse import Fuser, accesses
from perfuse.schedule.in_place import written_over
from perfuse.schedule.lifetimes import Placement, lifetimes
from perfuse.schedule.order import frugal_order, late_results, program_order
from perfuse.schedule.plan import Kernel, Plan, Role, Step, static_product
from perfuse.schedule.sink_casts import narrow_reductions
from perfuse.schedule.split_axes import split_last, split_map
from perfuse.schedule.store_narrow import keep_extremes_wide, rounded_as_stored, store_as_rounded

# Library calls between two loops that may still fuse when memory is limited: those of a block.
NEAR = 4

# An arena that a GPU program keeps is at most this large: where temporaries below the threshold
# take more, only those below a fourth of it are placed there, and so on.
GPU_ARENA_BYTES = 1 << 20
_GPU_ARENA_SHARES = (1, 4, 16)

# On a CPU: temporaries from the size on that the pool serves, then those from a fourth of it on.
_ARENA_SHARES = (1, 4)

# The part of a program's peak that is worth allocations of its own for large temporaries.
_LEAST_SAVING = 1 / 64

# Calls that only create a tensor of one number.
_NUMBERS = frozenset({"aten.full.default", "aten.scalar_tensor.default"})


def fuse(program: Program, context: Context) -> Plan:
    """Kernels and library calls in order, nothing placed yet.

    Of a few fusions and orders, more with a memory budget, the one with the lowest peak: the first
    of equals.
    """
    program = store_as_rounded(narrow_reductions(_without_dead_loops(program)))
    program = keep_extremes_wide(program)
    plans = [_plan(program, fuser, order, context) for fuser, order in _tries(program, context)]
    plan = plans[0]
    if len(plans) > 1:
        plan = min(plans, key=lambda made: _peak(place(made, context), context))
    context.counters.inc("schedule.loops", sum(isinstance(n, Loop) for n in program.nodes))
    context.counters.inc("schedule.kernels", len(plan.kernels))
    return plan


def place(plan: Plan, context: Context) -> Plan:
    """The plan with memory for its temporaries.

    An arena lasts as long as the call, and large temporaries outside of it as long as they are
    needed, but each takes a call of the allocator: so they are where that lowers the peak, with a
    budget by any amount.
    """
    best = _placed(plan, context)
    if context.target.gpu is not None:
        return best
    least = 0.0 if context.settings.memory_budget is not None else _LEAST_SAVING
    for share in _ARENA_SHARES:
        largest = plan.thresholds.pool_bytes // share
        if best.arena_bytes < largest:
            continue
        apart = _placed(plan, context, largest)
        if _peak(apart, context) < (1 - least) * _peak(best, context):
            best = apart
    return best


def _peak(plan: Plan, context: Context) -> int:
    return lifetimes(plan, Placement.of(context)).peak()


def _tries(program: Program, context: Context) -> Iterator[tuple[Fuser, list[int]]]:
    wide = _fused(program, None, context)
    order = program_order(wide)
    yield wide, order
    late = late_results(wide, program, order) if context.target.gpu is None else order
    if late != order:
        yield wide, late
    # A backward, in which a recomputed forward may run beside the rest.
    if context.settings.memory_budget is not None and program.donated:
        near = _fused(program, NEAR, context)
        yield near, program_order(near)
        yield near, frugal_order(near, program)


def _fused(program: Program, reach: int | None, context: Context) -> Fuser:
    is_gpu = context.target.gpu is not None
    fuser = Fuser(program, reach, context.settings.max_fusion_size, is_gpu=is_gpu)
    fuser.run()
    return fuser


def _plan(program: Program, fuser: Fuser, order: list[int], context: Context) -> Plan:
    """Kernels and calls in order, equal ones joined, nothing placed yet."""
    steps: list[Step] = []
    outside = _outside_uses(program, fuser)
    for home in order:
        group = fuser.groups[home]
        if group.members:
            steps.append(_kernel(f"k{len(steps)}", fuser, home, outside, program))
        else:
            node = program.nodes[group.nodes[0]]
            assert isinstance(node, LibraryCall)
            if isinstance(node, Attention):
                steps.append(attention_kernel(f"k{len(steps)}", node, outside, program))
            else:
                steps.append(node)
    made, refused = batched(program, tuple(steps), context)
    settings, refusals = context.settings, (*fuser.refusals, *refused)
    plan = Plan(program, made, refusals, {}, 0, thresholds=settings.thresholds)
    return replace(plan, is_guarded=settings.guards_memory)


def _placed(plan: Plan, context: Context, largest: int | None = None) -> Plan:
    """The plan with temporaries in an arena: all, or those smaller than `largest`."""
    if context.target.gpu is not None:
        return with_memory(_placed_on_gpu(plan, context), is_gpu=True)
    placed = arena.arena_buffers(plan.program, plan.steps, largest)
    over = written_over(plan.program, plan.steps, placed)
    guard = 1 if plan.is_guarded else None
    places, arena_bytes = arena.place(plan.program, plan.steps, largest, over, guard)
    plan = replace(plan, places=places, arena_bytes=arena_bytes, arena_limit=largest, over=over)
    return with_memory(plan, is_gpu=False)


def _placed_on_gpu(plan: Plan, context: Context) -> Plan:
    """The plan with its small temporaries in an arena: each costs the host more than the GPU.

    Others come from PyTorch's allocator, which other programs share.
    """
    shares = _GPU_ARENA_SHARES if context.settings.memory_budget is None else ()
    for share in shares:
        largest = plan.thresholds.gpu_arena_tensor_bytes // share
        guard = 16 if plan.is_guarded else None
        places, arena_bytes = arena.place(plan.program, plan.steps, largest, guard=guard)
        if arena_bytes <= GPU_ARENA_BYTES:
            return replace(plan, places=places, arena_bytes=arena_bytes, arena_limit=largest)
    return replace(plan, arena_limit=0)


def _without_dead_loops(program: Program) -> Program:
    """Drop loops, and gradients of attention, whose results are unused."""
    needed = arena.output_buffers(program)
    needed |= {o.name for o in program.outputs if isinstance(o, Opaque)}
    needed |= {n for n, b in program.buffers.items() if b.kind == BufferKind.INPUT}
    kept = []
    for node in reversed(program.nodes):
        if isinstance(node, Loop) and node.out not in needed:
            continue
        if isinstance(node, LibraryCall) and _is_pure(node) and not needed & set(node.outs):
            continue
        reads, _ = accesses(node)
        needed.update(reads)
        kept.append(node)
    if len(kept) == len(program.nodes):
        return program
    return replace(program, nodes=tuple(reversed(kept)))


def _is_pure(call: LibraryCall) -> bool:
    """Whether a call is known to do nothing but compute its results."""
    return call.op in _NUMBERS or (isinstance(call, Attention) and not call.mutates)


def _outside_uses(program: Program, fuser: Fuser) -> dict[str, set[int]]:
    """For each buffer the groups that touch it; -1 stands for the world outside."""
    uses: dict[str, set[int]] = {}
    for number, node in enumerate(program.nodes):
        reads, _ = accesses(node)
        for name in reads:
            uses.setdefault(name, set()).add(fuser.home[number])
    for name in arena.output_buffers(program):
        uses.setdefault(name, set()).add(-1)
    return uses


def _kernel(
    name: str, fuser: Fuser, home: int, uses: dict[str, set[int]], program: Program
) -> Kernel:
    group = fuser.groups[home]
    axes, members = shape.collapse(shape.axes_of(group), group.members)
    if not fuser.is_gpu:
        axes, members = split_map(*split_last(axes, members))
    arguments = [m.loop.out for m in members if program.buffers[m.loop.out].kind in ARGUMENTS]
    members = shape.stage(members, arguments)
    stored = set()
    several = Counter(m.loop.out for m in members)
    for m in members:
        out = m.loop.out
        is_used_elsewhere = bool(uses.get(out, set()) - {home})
        is_shared = program.buffers[out].kind != BufferKind.TEMP or several[out] > 1
        is_late = m.role in (Role.OUTER, Role.ALL, Role.SCATTER, Role.SCAN)
        if is_used_elsewhere or is_shared or is_late:
            stored.add(out)
    made = Kernel(name, axes, members, frozenset(stored))
    made = replace(made, members=rounded_as_stored(made, program.buffers))
    num_bytes = arena.kernel_bytes(made, program.buffers)
    return replace(made, num_bytes=num_bytes, num_flops=_flops(made))


def _flops(kernel: Kernel) -> int:
    total = 0
    seen: set[Expr] = set()
    for m in kernel.members:
        count = static_product([a.size for a in m.loop.axes]) or 0
        ops = sum(e.op in SCALAR_OPS for e in walk(m.loop.value, seen))
        total += count * (ops + m.loop.is_reduction)
    return total
