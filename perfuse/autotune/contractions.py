"""Contractions on the CPU: a C++ template with the epilogue inside against a library call.

Each large matmul is raced with the kernels around it, as one: on one side those that widen its
operands, the library call, and the pointwise kernel that reads it; on the other a kernel of ours
for each template. A challenger must be about as exact as the default, judged against a product in
float64, and beat it by a margin. Only where
`max_autotune` or `max_autotune_gemm` is on, or a decision is remembered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from perfuse.autotune.compile_together import compile_together, num_compile_threads
from perfuse.autotune.machine import current_versions, device_kind
from perfuse.autotune.race import MOST_ERROR, Gate, Rules, Run
from perfuse.autotune.race_selected import race_selected
from perfuse.autotune.request import operand_like
from perfuse.autotune.run_alone import built, loaded
from perfuse.autotune.screen import screened
from perfuse.autotune.select import is_selecting
from perfuse.autotune.sources import is_selected
from perfuse.autotune.stored import is_consulted, stored_or_measured
from perfuse.backends import backend_of
from perfuse.cache import keys
from perfuse.codegen.cpp.templates.choices import choice_of, propose
from perfuse.context import Context
from perfuse.decision import Choice, Decision, Question, identified, library
from perfuse.ir.dtype import to_torch
from perfuse.ir.matmul import rival_call
from perfuse.ir.program import Buffer, BufferKind, Matmul, Node, Program, View
from perfuse.schedule.contract import (
    contracted,
    contracted_with,
    depth_of,
    matmul_flops,
    sizes_of,
    with_contraction,
)
from perfuse.schedule.plan import Kernel, Plan, Step, static_product, with_template
from perfuse.schedule.read_stored import read_stored
from perfuse.schedule.schedule import place
from perfuse.torch_compat.state import disable_dispatch_modes, disabled_autocast

RULES = Rules(margin=0.97, budget_s=0.25, fewest_rounds=5, most_rounds=60)
# A template saves calls besides, so smaller matmuls are raced than between libraries.
_SMALLER = 8
# Differences from the default, as a part of the largest result: sums in another order, then
# rounded. By the bytes of a result's elements.
_LARGEST_DIFFERENCE = {2: 2.0**-6, 4: 1e-4, 8: 1e-4}
# Errors this small, as a part of the largest result, are those of the last rounding.
_ROUNDING = 2.0**-26


@dataclass(frozen=True, slots=True)
class Contest:
    """A matmul and the kernel that reads it, as library and kernel, and as one kernel of ours."""

    plan: Plan  # the whole plan, in which the matmul is one that templates know
    steps: tuple[Step, ...]  # the default: the library call, and the epilogue if it is fused
    kernel: Kernel
    choices: tuple[Choice, ...]  # the library first

    @property
    def matmul(self) -> Matmul:
        assert self.kernel.contraction is not None
        (matmul,) = self.kernel.contraction.matmuls
        return matmul

    def __str__(self) -> str:
        sizes = "x".join(map(repr, (*sizes_of(self.matmul), depth_of(self.matmul))))
        loops = len(self.kernel.members)
        return f"matmul {sizes}" + (f" with {loops} loops" if loops else "")


def identity_of(contest: Contest) -> str:
    """The text of a contest without names: equal layers of a model have equal ones."""
    buffers = contest.plan.program.buffers
    steps = (*contest.steps, contest.kernel)
    touched = [name for step in steps for name in (*step.reads(), *sorted(step.makes()))]
    numbers = {name: f"t{i}" for i, name in enumerate(dict.fromkeys(touched))}
    lines = [str(replace(s, name="k") if isinstance(s, Kernel) else s) for s in steps]
    lines += [str(replace(buffers[n], kind=BufferKind.TEMP)) for n in numbers]
    names = re.compile(rf"\b({'|'.join(map(re.escape, numbers))})\b")
    return names.sub(lambda found: numbers[found[0]], "\n".join(lines))


def tune_contractions(plan: Plan, context: Context) -> Plan:
    """The plan with matmuls computed by our templates where those measured faster."""
    if context.target.gpu is not None or not (is_selecting(context) or is_consulted(context)):
        return plan
    least = max(1, context.settings.thresholds.tuned_matmul_work // _SMALLER)
    decisions: dict[str, Decision] = {}
    for step in plan.steps:
        if not isinstance(step, Matmul) or matmul_flops(step) < 2 * least:
            continue
        contest = contest_of(step, plan, context)
        if contest is None:
            continue
        text = identity_of(contest)
        if text not in decisions:
            decisions[text] = decide(contest, context)
        chosen = decisions[text].chosen
        if chosen != contest.choices[0]:
            made = with_contraction(contest.plan, contest.kernel)
            plan = with_template(made, contest.kernel.name, chosen)
    return replace(plan, decisions=(*plan.decisions, *decisions.values()))


def contest_of(matmul: Matmul, plan: Plan, context: Context) -> Contest | None:
    """The contest for a matmul; None where no template computes it or it cannot be measured."""
    stored = read_stored(*_with_aten(plan, matmul))
    changed, own = stored.plan, stored.matmul
    reader = next((k for k in changed.kernels if own.out in k.reads()), None)
    fused = "nothing reads it" if reader is None else contracted_with([own], reader, changed)
    kernel = fused if isinstance(fused, Kernel) else contracted(own, changed.program)
    if not isinstance(kernel, Kernel) or not _is_measurable(kernel, plan.program):
        return None
    proposed = map(choice_of, propose(kernel, plan.program.buffers, context.target))
    templates = [choice for choice in proposed if is_selected(choice, context)]
    if not templates:
        return None
    default: list[Step] = [*stored.widening, matmul]
    if kernel is fused and reader is not None:
        default.append(reader)
    return Contest(changed, tuple(default), kernel, (matmul.choice, *templates))


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
    """Sizes are known, and nothing that is given is overwritten: runs repeat."""
    names = {*kernel.reads(), *kernel.makes()}
    sizes = [program.buffers[name].num_elements for name in names]
    made = (program.buffers[name].kind for name in kernel.makes())
    return static_product(sizes) is not None and BufferKind.INPUT not in made


def question_of(contest: Contest, context: Context) -> Question:
    """The question which choice is fastest on this kind of CPU.

    The text of a kernel of ours stands for all: an edit of Perfuse that leaves it as it is keeps
    the decision.
    """
    threads = f"{torch.get_num_threads()} threads"
    ours = _alone(contest, contest.choices[1], context)
    text = "".join(backend_of(context.target).generate(ours, context).texts)
    return Question(
        keys.CONTRACTION.name,
        identified(f"{contest} on {threads}", f"{identity_of(contest)} {threads} {text}"),
        contest.choices,
        device_kind(context.target),
        tuple(sorted(current_versions(context.target).items())),
        f"{RULES} {MOST_ERROR}" + ("" if is_selected(contest.choices[0], context) else ", no ATEN"),
    )


def decide(contest: Contest, context: Context) -> Decision:
    """The remembered decision for a contraction on this kind of CPU, or a new one."""

    def measure() -> Decision:
        with disable_dispatch_modes(), disabled_autocast():
            return measured(contest, context)

    wanted = measure if is_selecting(context) else None
    return stored_or_measured(
        question_of(contest, context),
        str(contest),
        context,
        wanted,
        "autotune.contractions_measured",
    )


def measured(contest: Contest, context: Context) -> Decision:
    """Race the choices of a contest; all are compiled before the first is measured."""
    plans = {choice: _alone(contest, choice, context) for choice in contest.choices}
    builds = [(choice, partial(built, plan, context)) for choice, plan in plans.items()]
    compile_together(builds, num_compile_threads(context, len(builds)), context.counters)
    inputs = _random_inputs(plans[contest.choices[0]].program)

    def enter(choice: Choice) -> Run:
        call = loaded(plans[choice], context)
        given = [inputs[name] for name in plans[choice].program.inputs]
        return lambda: call(list(given))

    def screen(asked: Sequence[Choice]) -> Mapping[Choice, str]:
        names = plans[contest.choices[0]].program.inputs
        operands = [operand_like(inputs[name]) for name in names]
        return screened(identity_of(contest), asked, plans.__getitem__, operands, context)

    gate = _gate(_exact_results(contest, inputs, context))
    return race_selected(
        str(contest), contest.choices, enter, RULES, context, gate=gate, screen=screen
    )


def _alone(contest: Contest, choice: Choice, context: Context) -> Plan:
    """A plan of the contest alone, as a choice computes it."""
    kernel, known = contest.kernel, contest.plan.program.buffers
    if choice == contest.choices[0]:
        return place(_plan_of(contest.steps, known, kernel.stored), context)
    # The library may return memory of its own; a kernel of ours fills the program's.
    own = {name: replace(known[name], kind=BufferKind.TEMP) for name in kernel.makes()}
    plan = _plan_of((kernel,), {**known, **own}, kernel.stored)
    return place(with_template(plan, kernel.name, choice), context)


def _plan_of(steps: Sequence[Step], known: Mapping[str, Buffer], stored: Set[str]) -> Plan:
    """A plan of some steps: what they read is given, what of `stored` they make is returned."""
    made = {name for step in steps for name in step.makes()}
    read = [name for step in steps for name in step.reads()]
    given = tuple(sorted({name for name in read if name not in made}))
    buffers = {name: replace(known[name], kind=BufferKind.INPUT) for name in given}
    buffers |= {name: known[name] for name in sorted(made)}
    outputs = tuple(
        View(name, buffers[name].shape, buffers[name].strides, 0) for name in sorted(stored & made)
    )
    nodes = tuple(node for step in steps for node in _nodes(step))
    return Plan(Program(given, buffers, nodes, outputs), tuple(steps), (), {}, 0)


def _nodes(step: Step) -> Sequence[Node]:
    if not isinstance(step, Kernel):
        return (step,)
    matmuls = () if step.contraction is None else step.contraction.matmuls
    return (*matmuls, *(member.loop for member in step.members))


def _random_inputs(program: Program) -> dict[str, torch.Tensor]:
    """The same numbers each time, of both signs."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name in program.inputs:
        buffer = program.buffers[name]
        assert isinstance(buffer.num_elements, int), "sizes are known"
        flat = torch.randn(max(buffer.num_elements, 1), generator=generator)
        shape: Any = (buffer.shape, buffer.strides)
        made[name] = flat.to(to_torch(buffer.dtype)).as_strided(*shape)
    return made


# -- exactness -----------------------------------------------------------------------------

Results = Sequence[torch.Tensor | None]


def _exact_results(
    contest: Contest, inputs: Mapping[str, torch.Tensor], context: Context
) -> Results:
    """Results from a product in float64, rounded once; None for those it is not known for."""
    matmul, known = contest.matmul, contest.plan.program.buffers
    buffer = known[matmul.out]
    shape: Any = (buffer.shape, buffer.strides)
    product = torch.empty_strided(*shape, dtype=to_torch(buffer.dtype))
    product.copy_(_exact_product(matmul, inputs))
    found = {matmul.out: product}
    last = contest.steps[-1]
    if isinstance(last, Kernel):
        plan = place(_plan_of((last,), known, last.stored), context)
        given = {**inputs, **found}
        results = loaded(plan, context)([given[name] for name in plan.program.inputs])
        found |= dict(zip(sorted(last.stored), results, strict=True))
    return [found.get(name) for name in sorted(contest.kernel.stored)]


def _exact_product(matmul: Matmul, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    def operand(view: View) -> torch.Tensor:
        where: Any = (view.shape, view.strides, view.offset)
        return inputs[view.buffer].as_strided(*where).double()

    operands = matmul.operands
    product = operand(operands.a) @ operand(operands.b) * matmul.alpha
    if operands.bias is not None:
        product = product + operand(operands.bias) * matmul.beta
    return torch.as_tensor(product)


def _gate(exact: Results) -> Gate:
    """Challengers have to agree with the default, and to be about as exact. NaN never passes."""

    def refusal(default: Any, challenger: Any) -> str | None:
        for wanted, expected, got in zip(exact, default, challenger, strict=True):
            if expected.numel() == 0:
                continue
            scale = float(expected.double().abs().max()) or 1.0
            limit = _LARGEST_DIFFERENCE.get(expected.element_size(), 0.0) * scale
            if not float((got.double() - expected.double()).abs().max()) <= limit:
                return "its result differs"
            if wanted is not None and expected.is_floating_point():
                errors = [_error(result, wanted) for result in (expected, got)]
                if not errors[1] <= MOST_ERROR * errors[0] + _ROUNDING * scale:
                    return f"its error is {errors[1] / errors[0]:.1f} times the default's"
        return None

    return refusal


def _error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact.double()).square().mean().sqrt())
