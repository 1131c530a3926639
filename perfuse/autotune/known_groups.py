"""Matmuls of groups of rows on a CPU: a generated kernel where it is known to win.

The libraries' calls are made group by group, from Python. oneDNN, twice as fast as MKL on some
CPUs, compiles a kernel for each number of rows that it meets: 0.35 ms and more, where a group takes
0.1 ms, and the numbers change with every call.
"""

from __future__ import annotations

from dataclasses import replace

from perfuse.autotune.known_contractions import is_amd_avx512, is_intel_with_pairs
from perfuse.context import Context
from perfuse.ir.dtype import DType
from perfuse.ir.matmul import ATEN_GROUPED_MATMUL, GROUPED_MATMUL, GROUPED_OUTER
from perfuse.ir.program import Buffer, BufferKind, Extern, View, contiguous_strides
from perfuse.schedule.arena import kernel_bytes
from perfuse.schedule.plan import Kernel, Plan
from perfuse.target import Target


def with_known_groups(plan: Plan, context: Context) -> Plan:
    """The plan with matmuls of groups as kernels, on CPUs where they are known to win.

    Measured on Zen 5: 1.3 to 2.2 times MKL's speed in float32
    (benchmarks/results/2026-11-18-cpu-experts), 0.94 to 3 times ATen's in bfloat16, the least with
    hundreds of rows in every group (benchmarks/results/2026-11-18-cpu-language). On an Intel Xeon:
    1.02 to 1.7 times a block with MKL's calls in float32, but down to 0.3 times with bfloat16,
    which has matrix units there (benchmarks/results/2026-11-19-cpu-intel).
    """
    target = context.target
    is_known = is_amd_avx512(target) or is_intel_with_pairs(target)
    if not is_known or not context.settings.cpu.tune_matmuls:
        return plan
    for number, step in enumerate(plan.steps):
        call = _as_ours(step, plan, target) if isinstance(step, Extern) else None
        if call is not None:
            plan = _with_kernel(plan, number, call)
    return plan


def _as_ours(call: Extern, plan: Plan, target: Target) -> Extern | None:
    """The call as an op of ours, if the kernel computes it."""
    if call.op not in (GROUPED_MATMUL, GROUPED_OUTER, ATEN_GROUPED_MATMUL):
        return None
    buffers, out, given = plan.program.buffers, call.outs[0], call.args
    views = [view for view in given if isinstance(view, View)]
    if out is None or len(views) != 3 or given[: len(views)] != tuple(views):
        return None
    left, right, ends = views
    types = [buffers[name].dtype for name in (left.buffer, right.buffer, out)]
    is_dense = not any(s == 0 for v in (left, right) for s in v.strides) and ends.strides == (1,)
    if not is_dense or not _is_contiguous(buffers[out]):
        return None
    if call.op != ATEN_GROUPED_MATMUL:
        return call if types[-1] is DType.F32 else None
    by_columns = len(left.shape) == 2 and len(right.shape) == 3 and right.strides[1] == 1
    if set(types) != {DType.BF16} or not by_columns:
        return None
    if not target.has_bf16_pairs or not is_amd_avx512(target):
        return None
    return replace(call, op=GROUPED_MATMUL, args=(left, right, ends), kwargs=(), takes_out=True)


def _with_kernel(plan: Plan, number: int, call: Extern) -> Plan:
    """The plan with a kernel that computes a call; the library used to allocate its result."""
    buffers, out = dict(plan.program.buffers), call.outs[0]
    assert out is not None
    if buffers[out].kind is BufferKind.EXTERN:
        buffers[out] = replace(buffers[out], kind=BufferKind.TEMP)
    made = Kernel(f"k_{out}", (), (), frozenset({out}), grouped=call)
    made = replace(made, num_bytes=kernel_bytes(made, buffers))
    steps = (*plan.steps[:number], made, *plan.steps[number + 1 :])
    return replace(plan, program=replace(plan.program, buffers=buffers), steps=steps)


def _is_contiguous(buffer: Buffer) -> bool:
    return buffer.strides == contiguous_strides(buffer.shape)
