"""Contractions on the CPU: a C++ template with the epilogue inside against library calls.

Each large matmul is raced with the kernels around it, as one: on one side those that widen its
operands, a library call, and the pointwise kernel that reads it; on the other one generated kernel
for each template. A challenger must be about as exact as the default, judged against a product in
float64, and beat it by a margin. This runs only if `max_autotune` or `max_autotune_gemm` is on, or
a decision is remembered.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from perfuse.autotune.device_kind import current_versions, device_kind
from perfuse.autotune.exactness import MOST_ERROR, reference_gate, reference_of
from perfuse.autotune.library_calls import cpu_matmul_of, with_library_call
from perfuse.autotune.program_request import random_inputs
from perfuse.autotune.race import Rules
from perfuse.autotune.race_plans import PlanRace, race_plans
from perfuse.autotune.run_alone import identity_of, loaded, plan_of_steps
from perfuse.autotune.stored import is_consulted, stored_or_measured
from perfuse.backends import backend_of
from perfuse.cache import keys
from perfuse.candidates.library import choices_of
from perfuse.candidates.sources import is_selected
from perfuse.codegen.cpp.templates.choices import FEW_ROWS, SOURCE, choice_of, propose
from perfuse.context import Context
from perfuse.decision import Choice, Decision, Question, identified, library
from perfuse.ir.dtype import DType
from perfuse.ir.matmul import rival_call
from perfuse.ir.program import BufferKind, Matmul, Program
from perfuse.schedule.contract import (
    contracted,
    contracted_with,
    depth_of,
    matmul_flops,
    sizes_of,
    with_contraction,
    with_prologue,
)
from perfuse.schedule.plan import Kernel, Plan, Step, static_product, with_template
from perfuse.schedule.read_stored import ReadStored, compute_right, read_stored
from perfuse.schedule.schedule import place
from perfuse.selection import is_selecting
from perfuse.torch_compat.state import disable_dispatch_modes, disabled_autocast

RULES = Rules(margin=0.97, budget_s=0.25, fewest_rounds=5, most_rounds=60)
# A template saves calls besides, so smaller matmuls are raced than between libraries.
_SMALLER = 8


@dataclass(frozen=True, slots=True)
class Contraction:
    """A matmul and the kernel that reads it: library call and kernel, or one generated kernel."""

    whole: Plan  # as it is
    own: Plan  # the same, in which the matmul is one that templates know
    matmul: Matmul  # of the whole
    steps: tuple[Step, ...]  # the default: the library call, and the epilogue if it is fused
    kernel: Kernel
    choices: tuple[Choice, ...]  # the library's first, then other calls, then templates

    def __str__(self) -> str:
        sizes = "x".join(map(repr, (*sizes_of(self.matmul), depth_of(self.matmul))))
        loops = len(self.kernel.members)
        return f"matmul {sizes}" + (f" with {loops} loops" if loops else "")

    def alone(self, choice: Choice) -> Plan:
        """A plan of the same steps alone, as a choice computes them."""
        if choice.source == SOURCE:
            plan = plan_of_steps((self.kernel,), self.own, self.kernel.stored)
            return with_template(plan, self.kernel.name, choice)
        plan = plan_of_steps(self.steps, self.whole, self.kernel.stored)
        return with_library_call(plan, {self.matmul.out: choice})

    def applied(self, choice: Choice) -> Plan:
        """The whole plan with a choice."""
        if choice.source == SOURCE:
            made = with_contraction(self.own, self.kernel)
            return with_template(made, self.kernel.name, choice)
        return with_library_call(self.whole, {self.matmul.out: choice})


def tune_contractions(
    plan: Plan, context: Context, apart: Set[str] = frozenset()
) -> tuple[Plan, Set[str]]:
    """The plan with matmuls as they measured fastest, and the results that were decided on.

    Those in `apart` are skipped.
    """
    if not (is_selecting(context.settings) or is_consulted(context)):
        return plan, frozenset()
    least = max(1, context.settings.thresholds.tuned_matmul_work // _SMALLER)
    decisions: dict[str, Decision] = {}
    decided: set[str] = set()
    for step in plan.steps:
        if not isinstance(step, Matmul) or step.out in apart or matmul_flops(step) < 2 * least:
            continue
        found = contraction_of(step, plan, context)
        if found is None:
            continue
        text = identity_of(found.alone(found.choices[0]))
        if text not in decisions:
            decisions[text] = decide(found, context)
        if not decisions[text].is_open:
            decided.add(step.out)
            chosen = decisions[text].chosen
            plan = plan if chosen == found.choices[0] else found.applied(chosen)
    return replace(plan, decisions=(*plan.decisions, *decisions.values())), decided


def contraction_of(
    matmul: Matmul, plan: Plan, context: Context, *, is_raced: bool = True
) -> Contraction | None:
    """A matmul as templates compute it; None where none does, or it cannot be raced but has to."""
    stored = _read_in_place(*_with_aten(plan, matmul), context)
    changed, own = stored.plan, stored.matmul
    reader = next((k for k in changed.kernels if own.out in k.reads()), None)
    fused = "nothing reads it" if reader is None else contracted_with([own], reader, changed)
    kernel = fused if isinstance(fused, Kernel) else contracted(own, changed.program)
    if not isinstance(kernel, Kernel) or _overwrites(kernel, plan.program):
        return None
    if stored.prologue is not None:
        kernel = with_prologue(kernel, stored.prologue, plan.program)
    if is_raced and not _is_measurable(kernel, plan.program):
        return None
    proposed = map(choice_of, propose(kernel, plan.program.buffers, context.target))
    templates = [choice for choice in proposed if is_selected(choice, context)]
    if not templates:
        return None
    default: list[Step] = [*stored.widening, matmul]
    if isinstance(fused, Kernel) and reader is not None:
        default.append(reader)
    choices = (*_library_calls(matmul, plan.program, context), *templates)
    return Contraction(plan, changed, matmul, tuple(default), kernel, choices)


def _read_in_place(plan: Plan, matmul: Matmul, context: Context) -> ReadStored:
    """The matmul with operands that are read as they are stored, or computed on the way."""
    rows, pairs = sizes_of(matmul)[0], context.target.has_bf16_pairs
    stored = read_stored(plan, matmul)
    is_read = stored.matmul.operands.b is not matmul.operands.b
    is_half = plan.program.buffers[matmul.operands.b.buffer].dtype is DType.BF16
    if not isinstance(rows, int) or rows > FEW_ROWS or (is_read and not (pairs and is_half)):
        return stored
    return compute_right(plan, matmul)


def _library_calls(matmul: Matmul, program: Program, context: Context) -> list[Choice]:
    """The call of the plan, and the others that compute it where ATEN is selected."""
    problem = cpu_matmul_of(matmul, program, 1)
    others = choices_of(problem) if problem is not None else ()
    return [matmul.choice, *(c for c in others if c != matmul.choice and is_selected(c, context))]


def _with_aten(plan: Plan, matmul: Matmul) -> tuple[Plan, Matmul]:
    """The plan with a matmul as ATen's call, whichever library was chosen for it."""
    if rival_call(matmul.op) is None:
        return plan, matmul
    op = "aten.mm.out" if matmul.operands.bias is None else "aten.addmm.out"
    own = replace(matmul, choice=library(op))
    nodes = tuple(own if node is matmul else node for node in plan.program.nodes)
    steps = tuple(own if step is matmul else step for step in plan.steps)
    return replace(plan, program=replace(plan.program, nodes=nodes), steps=steps), own


def _is_measurable(kernel: Kernel, program: Program) -> bool:
    """Whether all sizes are known."""
    names = {*kernel.reads(), *kernel.makes()} & program.buffers.keys()
    sizes = [program.buffers[name].num_elements for name in names]
    return static_product(sizes) is not None


def _overwrites(kernel: Kernel, program: Program) -> bool:
    """Whether something that is given is overwritten, so that runs do not repeat."""
    return any(program.buffers[name].kind is BufferKind.INPUT for name in kernel.makes())


def question_of(found: Contraction, context: Context) -> Question:
    """The question which choice is fastest on this kind of CPU.

    The text of one generated kernel stands for all: an edit of Perfuse that does not change it
    keeps the decision.
    """
    threads = f"{torch.get_num_threads()} threads"
    default, template = found.choices[0], next(c for c in found.choices if c.source == SOURCE)
    ours = place(found.alone(template), context)
    text = "".join(backend_of(context.target).generate(ours, context).texts)
    identity = identity_of(found.alone(default))
    return Question(
        keys.CONTRACTION.name,
        identified(f"{found} on {threads}", f"{identity} {threads} {text}"),
        found.choices,
        device_kind(context.target),
        tuple(sorted(current_versions(context.target).items())),
        f"{RULES} {MOST_ERROR}" + ("" if is_selected(default, context) else ", no ATEN"),
    )


def decide(found: Contraction, context: Context) -> Decision:
    """The remembered decision for a contraction on this kind of CPU, or a new one."""
    question = question_of(found, context)

    def measure() -> Decision:
        with disable_dispatch_modes(), disabled_autocast():
            return measured(found, question, context)

    wanted = measure if is_selecting(context.settings) else None
    counter = "autotune.contractions_measured"
    return stored_or_measured(question, str(found), context, wanted, counter)


def measured(found: Contraction, question: Question, context: Context) -> Decision:
    """Race the choices of a contraction."""
    alone = found.alone(found.choices[0])
    inputs = random_inputs(alone.program, context.device)
    rivals = PlanRace(str(found), question.problem, found.choices, found.alone, inputs)
    last = found.steps[-1]
    epilogue = last if isinstance(last, Kernel) else None
    assert found.kernel.contraction is not None
    matmuls = found.kernel.contraction.matmuls
    given = {**inputs, **_computed(found, alone, inputs, context)}
    exact = reference_of(matmuls, epilogue, alone, given, context)
    return race_plans(rivals, reference_gate(exact), RULES, context)


def _computed(
    found: Contraction, alone: Plan, inputs: Mapping[str, Tensor], context: Context
) -> dict[str, Tensor]:
    """The operand that the kernel computes itself, as the default has it."""
    assert found.kernel.contraction is not None
    prologue = found.kernel.contraction.prologue
    if prologue is None:
        return {}
    last = next(i for i, step in enumerate(alone.steps) if prologue.out in step.makes())
    makers = place(plan_of_steps(alone.steps[: last + 1], alone, {prologue.out}), context)
    (made,) = loaded(makers, context)([inputs[name] for name in makers.program.inputs])
    return {prologue.out: made}
