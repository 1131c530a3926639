"""Templates by measurement: each distinct matmul, with what follows it, raced on the GPU.

The library's call, followed by the kernel that reads its result, is the default. A template takes
its place where it is about as exact against a wider type, and faster by a margin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perfuse.autotune.ck import (
    CkOffer,
    ck_offer,
    ck_versions,
    is_ck_selected,
    is_measured_on_cpu,
    report_failures,
    with_progress,
)
from perfuse.autotune.compile_together import compile_together, num_compile_threads
from perfuse.autotune.machine import device_kind, generated_versions, library_versions
from perfuse.autotune.race import MOST_ERROR, Gate, Rules, Run, Timer
from perfuse.autotune.race_selected import race_selected
from perfuse.autotune.request import operand_like
from perfuse.autotune.run_alone import built, loaded
from perfuse.autotune.screen import screened
from perfuse.autotune.search import wall_timer
from perfuse.autotune.select import is_selecting
from perfuse.autotune.sites import (
    Site,
    choices_of,
    identity_of,
    plan_of_site,
    sites_of,
    with_choice,
)
from perfuse.autotune.sources import CK, TRITON, is_selected, selected_sources
from perfuse.autotune.stored import is_consulted, stored_or_measured
from perfuse.autotune.tiles import plan_of_one
from perfuse.cache import keys
from perfuse.codegen.triton.unit import generate_triton
from perfuse.context import Context
from perfuse.decision import NOT_REMEMBERED, Choice, Decision, Question, identified
from perfuse.ir.dtype import to_torch
from perfuse.ir.index import Dim
from perfuse.ir.program import Matmul, Program, View
from perfuse.runtime.measure import event_timer
from perfuse.schedule.plan import Plan
from perfuse.schedule.schedule import place
from perfuse.schedule.size_hints import value_of
from perfuse.torch_compat.state import allows_tf32, disable_dispatch_modes, disabled_autocast

# Readings are the GPU's own, with caches flushed before each turn.
RULES = Rules(margin=0.98, budget_s=0.5, fewest_rounds=7, most_rounds=15)
NO_OFFER = CkOffer()
_ROWS_AT_ONCE = 2048  # of a reference, which is computed in a wider type


def tune_templates(plan: Plan, context: Context) -> Plan:
    """Matmuls computed as measured on this GPU, in the modes that tune."""
    if context.target.gpu is None:
        return plan
    timer = _timer(context)
    if is_selecting(context) and timer is not None:
        with disable_dispatch_modes(), disabled_autocast():
            return measured_templates(plan, context, timer)
    return measured_templates(plan, context, None) if is_consulted(context) else plan


def _timer(context: Context) -> Timer | None:
    """The clock of the device that candidates run on; None where they cannot be measured."""
    if is_measured_on_cpu(context):
        return wall_timer()
    is_there = torch.cuda.is_available() and not context.settings.gpu.interpret
    return event_timer(context.device) if is_there else None


def measured_templates(plan: Plan, context: Context, timer: Timer | None) -> Plan:
    """The plan with each site computed in the way that measured fastest.

    Without a timer, the ways are those that are remembered.
    """
    is_fused = context.settings.benchmark_epilogue_fusion and not _is_ck_alone(context)
    decisions: dict[Question, Decision] = {}
    for site in list(sites_of(plan, with_epilogues=is_fused)):
        alone = plan_of_site(site, plan)
        offer = _offer(site, alone, context)
        question = question_of(site, alone, context, offer)
        if question not in decisions:
            decisions[question] = decide(question, site, alone, context, timer, offer)
        plan = with_choice(plan, site, decisions[question].chosen)
    return replace(plan, decisions=(*plan.decisions, *decisions.values()))


def _is_ck_alone(context: Context) -> bool:
    """Whether no template that fuses an epilogue competes with CK, which has one matmul each."""
    names = {s.name for s in selected_sources(context.settings.max_autotune_gemm_backends)}
    has_templates = TRITON.name in names and not is_measured_on_cpu(context)
    return is_ck_selected(context) and not has_templates


def _offer(site: Site, alone: Plan, context: Context) -> CkOffer:
    """The proposals of CK for the one matmul of a site."""
    if len(site.alone) != 1:
        return CkOffer(silent="several matmuls are computed at once")
    return ck_offer(site.matmuls[0], alone.program, context)


def question_of(site: Site, alone: Plan, context: Context, offer: CkOffer = NO_OFFER) -> Question:
    """The question which way to compute a site is fastest on this kind of GPU.

    The text of the first template stands for them all: an edit of Perfuse that leaves it as it is
    keeps the decision.
    """
    gpu = context.target.gpu
    assert gpu is not None
    first, *others = choices_of(site, alone.program, gpu, allows_tf32())
    others = [choice for choice in others if is_selected(choice, context)]
    # An interpreter's time says nothing about a kernel.
    choices = [first, *(() if is_measured_on_cpu(context) else others), *offer.choices]
    text = f"{identity_of(alone)} tf32 {allows_tf32()}"
    if len(choices) > 1:
        text += "".join(generate_triton(with_choice(alone, site, choices[1]), context).texts)
    versions = ck_versions(context) if offer.choices else ()
    return Question(
        keys.TEMPLATE.name,
        identified(str(site).partition(" with ")[0], text),
        tuple(choices),
        device_kind(context.target),
        (*library_versions(gpu.kind), *generated_versions(), *versions),
        f"{RULES} {MOST_ERROR}" + ("" if is_selected(choices[0], context) else ", without ATEN"),
    )


def decide(
    question: Question,
    site: Site,
    alone: Plan,
    context: Context,
    timer: Timer | None,
    offer: CkOffer = NO_OFFER,
) -> Decision:
    """The remembered decision for a site on this kind of GPU, or a new one."""
    choices = question.candidates

    def measure() -> Decision:
        plan_of = partial(_placed, site, alone, context)
        # One that fails will fail again where it is measured.
        builds = [(c, partial(_built, plan_of, c, context)) for c in choices]
        has_failed = _compile(builds, str(site), context)
        inputs = inputs_of(alone.program, context.device)
        made = race_selected(
            str(site),
            choices,
            entered(site, alone, inputs, context),
            RULES,
            context,
            gate=reference_gate(reference_of(site, alone, inputs, context)),
            timer=timer,
            screen=partial(_screened, question, plan_of, inputs, context),
            silent=_silent(offer, context),
        )
        is_final = offer.is_usable and not has_failed
        return made if is_final else replace(made, reason=f"{made.reason}; {NOT_REMEMBERED}")

    measured = None if timer is None else measure
    return stored_or_measured(question, str(site), context, measured, "autotune.sites_measured")


def _compile(
    builds: Sequence[tuple[Choice, Callable[[], object]]], subject: str, context: Context
) -> bool:
    """Compile candidates in parallel; whether any of CK failed, which is reported.

    Those of CK take minutes, and show how many are left.
    """
    reporting, progress = with_progress(builds, subject)
    with progress:
        num_threads = num_compile_threads(context, len(builds))
        return report_failures(compile_together(reporting, num_threads, context.counters))


def _silent(offer: CkOffer, context: Context) -> dict[str, str]:
    return {CK.name: offer.silent} if offer.silent and is_ck_selected(context) else {}


# -- running -------------------------------------------------------------------------------


def runnable(plan: Plan, inputs: Sequence[Any], context: Context) -> Run:
    """A callable that runs a plan on these inputs."""
    call = loaded(plan, context)
    return lambda: call(list(inputs))


def entered(
    site: Site, alone: Plan, inputs: Sequence[Any], context: Context
) -> Callable[[Choice], Run]:
    """Callables that run a site in the way of each choice."""
    return lambda choice: runnable(
        place(with_choice(alone, site, choice), context), inputs, context
    )


def _built(plan_of: Callable[[Choice], Plan], choice: Choice, context: Context) -> object:
    return built(plan_of(choice), context)


def _placed(site: Site, alone: Plan, context: Context, choice: Choice) -> Plan:
    return place(with_choice(alone, site, choice), context)


def _screened(
    question: Question,
    plan_of: Callable[[Choice], Plan],
    inputs: Sequence[Tensor],
    context: Context,
    choices: Sequence[Choice],
) -> dict[Choice, str]:
    """Why choices must not run in this process, where settings ask for workers."""
    operands = [operand_like(tensor) for tensor in inputs]
    return screened(question.problem, choices, plan_of, operands, context)


def inputs_of(program: Program, device: torch.device) -> list[Tensor]:
    """Normal random numbers in the shapes that a program takes, the same ones each time."""
    generator = torch.Generator(device).manual_seed(0)
    made = []
    for name in program.inputs:
        buffer = program.buffers[name]
        span = value_of(buffer.num_elements, program.hints)
        flat = torch.randn(max(span, 1), device=device, generator=generator)
        if not buffer.dtype.is_float:
            flat = (flat * 4).clamp(-100, 100)
        shape, strides = (_likely(dims, program) for dims in (buffer.shape, buffer.strides))
        made.append(flat.to(to_torch(buffer.dtype)).as_strided(shape, strides))
    return made


def _likely(dims: Sequence[Dim], program: Program) -> list[int]:
    return [value_of(dim, program.hints) for dim in dims]


# -- exactness -----------------------------------------------------------------------------


def reference_of(
    site: Site, alone: Plan, inputs: Sequence[Tensor], context: Context
) -> tuple[Tensor, ...] | None:
    """The results of a site from products in a wider type; None where memory is short."""
    given = dict(zip(alone.program.inputs, inputs, strict=True))
    try:
        products = {m.out: _exact(m, given, alone.program) for m in site.matmuls}
        known = {**given, **products}
        if site.epilogue is not None:
            one = plan_of_one(site.epilogue, alone.program)
            one = replace(one, program=replace(one.program, hints=alone.program.hints))
            run = runnable(place(one, context), [known[n] for n in one.program.inputs], context)
            views: Any = one.program.outputs
            known |= {v.buffer: made for v, made in zip(views, run(), strict=True)}
    except torch.OutOfMemoryError:
        return None
    results: Any = alone.program.outputs
    return tuple(known[view.buffer] for view in results)


def _exact(matmul: Matmul, given: dict[str, Tensor], program: Program) -> Tensor:
    """A matmul's result: halves multiplied in float32, others in float64, rounded at the end."""
    buffer = program.buffers[matmul.out]
    a, b, bias = (
        None if view is None else _seen(given[view.buffer], view, program)
        for view in (matmul.operands.a, matmul.operands.b, matmul.operands.bias)
    )
    assert a is not None and b is not None
    wide = torch.float32 if a.dtype in (torch.float16, torch.bfloat16) else torch.float64
    right = b.to(wide)
    shape, strides = (_likely(dims, program) for dims in (buffer.shape, buffer.strides))
    out = torch.empty_strided(shape, strides, dtype=to_torch(buffer.dtype), device=a.device)
    added = None if bias is None or matmul.beta == 0 else bias.to(wide).broadcast_to(shape)
    for first in range(0, a.shape[-2], _ROWS_AT_ONCE):
        rows = (..., slice(first, first + _ROWS_AT_ONCE), slice(None))
        with _exact_products():
            made = (a[rows].to(wide) @ right) * matmul.alpha
        out[rows] = (made if added is None else made + added[rows] * matmul.beta).to(out.dtype)
    return out


@contextlib.contextmanager
def _exact_products() -> Any:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _seen(tensor: Tensor, view: View, program: Program) -> Tensor:
    shape, strides = (_likely(dims, program) for dims in (view.shape, view.strides))
    return tensor.as_strided(shape, strides, value_of(view.offset, program.hints))


def reference_gate(reference: tuple[Tensor, ...] | None) -> Gate:
    """Challengers have to be about as close to the reference as the default. NaN never passes."""

    def refusal(default: Sequence[Tensor], challenger: Sequence[Tensor]) -> str | None:
        wanted = default if reference is None else reference
        for number, (exact, old, new) in enumerate(zip(wanted, default, challenger, strict=True)):
            allowed, found = _errors(old, exact), _errors(new, exact)
            spacing = float(exact.abs().max()) * _epsilon(exact)
            limits = (MOST_ERROR * allowed[0] + spacing / 8, MOST_ERROR * allowed[1] + spacing)
            if not all(f <= limit for f, limit in zip(found, limits, strict=True)):
                return f"result {number}: error {found[0]:.2e}, the default's {allowed[0]:.2e}"
        return None

    return refusal


def _epsilon(tensor: Tensor) -> float:
    return float(torch.finfo(tensor.dtype).eps) if tensor.dtype.is_floating_point else 0.0


def _errors(result: Tensor, exact: Tensor) -> tuple[float, float]:
    """The root mean square of the differences, and the largest one."""
    if not result.numel():
        return 0.0, 0.0
    wide = torch.float64 if exact.dtype in (torch.float64, torch.int64) else torch.float32
    apart = (result.to(wide) - exact.to(wide)).abs()
    return float(apart.square().mean().sqrt()), float(apart.max())
