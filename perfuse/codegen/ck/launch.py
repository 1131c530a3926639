"""Choices of Composable Kernel instances, and the host calls that carry them out."""

from __future__ import annotations

from perfuse.codegen.ck.instance import Instance, instance_of
from perfuse.codegen.ck.problem import ELEMENT_BYTES, CkProblem, ck_arch, ck_problem
from perfuse.codegen.ck.source import ck_source, epilogue_of, size_table
from perfuse.codegen.triton.emit import Dialect
from perfuse.codegen.triton.sources import HostCall, HostLaunch
from perfuse.context import Context
from perfuse.decision import Choice
from perfuse.ir.index import Dim
from perfuse.ir.program import Matmul
from perfuse.schedule.plan import Kernel, Plan

SOURCE = "ck"
_INSTANCE, _SPLIT = "instance", "k_batch"


def ck_choice(instance: Instance, k_batch: int = 1) -> Choice:
    """An instance as tuning names it; its arguments are part of the choice."""
    split = f" / {k_batch}" if k_batch > 1 else ""
    options = ((_INSTANCE, instance.text), (_SPLIT, k_batch))
    return Choice(SOURCE, f"{instance.name}{split}", options)


def instance_of_choice(choice: Choice) -> tuple[Instance, int]:
    """The instance of a choice and the number of its depth parts; ValueError if it has none."""
    options = dict(choice.options)
    return instance_of(str(options.get(_INSTANCE, ""))), int(options.get(_SPLIT) or 1)


def source_of(instance: Instance, problem: CkProblem) -> str:
    """The C++ source of an instance for a problem."""
    is_batched = problem.batch is not None
    return ck_source(instance, epilogue_of(problem, instance), is_batched=is_batched)


def write_ck(kernel: Kernel, plan: Plan, dialect: Dialect, context: Context) -> HostLaunch:
    """The host call that computes a contraction."""
    assert kernel.contraction is not None
    (matmul,) = kernel.contraction.matmuls
    problem = ck_problem(matmul, plan.program.buffers, ck_arch(context))
    assert isinstance(problem, CkProblem), f"{kernel.name}: {problem}"
    instance, k_batch = instance_of_choice(plan.templates[kernel.name])
    sizes, factors = size_table(problem, k_batch), (problem.alpha, problem.beta)
    call = HostCall(_offsets(matmul, problem), sizes, factors)
    return HostLaunch(source_of(instance, problem), _passed(matmul, problem), call)


def _passed(matmul: Matmul, problem: CkProblem) -> tuple[str, ...]:
    """The buffers in the order of the launcher's pointers: A, B, a bias, the scales, C."""
    operands = matmul.operands
    bias = () if problem.d is None or operands.bias is None else (operands.bias.buffer,)
    scales = (view.buffer for view in operands.scales)
    return (operands.a.buffer, operands.b.buffer, *bias, *scales, matmul.out)


def _offsets(matmul: Matmul, problem: CkProblem) -> tuple[int, ...]:
    """Bytes from the start of each of these buffers."""
    given = [each for each in (problem.a, problem.b, problem.d) if each is not None]
    offsets = [each.offset * ELEMENT_BYTES[each.dtype] for each in given]
    offsets += [_known(view.offset) * ELEMENT_BYTES["F32"] for view in matmul.operands.scales]
    return tuple(map(int, (*offsets, problem.c.offset * ELEMENT_BYTES[problem.c.dtype])))


def _known(offset: Dim) -> int:
    assert isinstance(offset, int), "CK's problems are static"
    return offset
