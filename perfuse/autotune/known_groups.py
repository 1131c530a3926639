"""Matmuls of groups of rows on a CPU: a generated kernel where it is known to win.

The libraries' calls are made group by group, from Python. oneDNN, twice as fast as MKL on some
CPUs, compiles a kernel for each number of rows that it meets: 0.35 ms and more, where a group takes
0.1 ms, and the numbers change with every call.
"""

from __future__ import annotations

from dataclasses import replace

from perfuse.autotune.known_contractions import is_amd_avx512
from perfuse.context import Context
from perfuse.ir.dtype import DType
from perfuse.ir.matmul import GROUPED_MATMUL, GROUPED_OUTER
from perfuse.ir.program import Buffer, Extern, contiguous_strides
from perfuse.schedule.arena import kernel_bytes
from perfuse.schedule.plan import Kernel, Plan, Step


def with_known_groups(plan: Plan, context: Context) -> Plan:
    """The plan with matmuls of groups of float32 as kernels, on CPUs where MKL is slow.

    Measured on Zen 5: 1.3 to 2.2 times MKL's speed (benchmarks/results/2026-11-18-cpu-experts).
    """
    if not is_amd_avx512(context.target) or not context.settings.cpu.tune_matmuls:
        return plan
    return replace(plan, steps=tuple(_as_kernel(step, plan) for step in plan.steps))


def _as_kernel(step: Step, plan: Plan) -> Step:
    if not isinstance(step, Extern) or step.op not in (GROUPED_MATMUL, GROUPED_OUTER):
        return step
    buffers = plan.program.buffers
    left, right, ends = step.args
    (out,) = step.outs
    assert out is not None
    is_dense = not any(s == 0 for v in (left, right) for s in v.strides) and ends.strides == (1,)
    if buffers[out].dtype is not DType.F32 or not is_dense or not _is_contiguous(buffers[out]):
        return step
    made = Kernel(f"k_{out}", (), (), frozenset({out}), grouped=step)
    return replace(made, num_bytes=kernel_bytes(made, buffers))


def _is_contiguous(buffer: Buffer) -> bool:
    return buffer.strides == contiguous_strides(buffer.shape)
