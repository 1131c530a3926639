"""Candidates of Composable Kernel: which instances are legal for a matmul, and which are raced.

Legality is decided before anything is compiled. Where CK has nothing to offer the reason is
recorded; a CK that is missing, incomplete or does not compile is reported once.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from perfuse.autotune.progress import TuningProgress
from perfuse.autotune.sources import CK, selected_sources
from perfuse.build.ck import advice_for_ck, is_interpreted, why_no_ck
from perfuse.build.ck_installation import (
    CkInstallation,
    CkState,
    inspect_ck,
    installed_instances,
)
from perfuse.codegen.ck.instance import Instance, preselected_instances
from perfuse.codegen.ck.launch import SOURCE, ck_choice, source_of
from perfuse.codegen.ck.legality import (
    KIND_RULES,
    Case,
    Judged,
    judged,
    refusal,
    why_no_device,
)
from perfuse.codegen.ck.problem import CkProblem, ck_problem
from perfuse.codegen.ck.rank import ranked, sampled
from perfuse.codegen.triton.unit import ck_arch
from perfuse.context import Context
from perfuse.decision import Choice
from perfuse.errors import CkWarning, CompilerFailed
from perfuse.ir.program import Matmul, Program
from perfuse.logs import channel

LOG = channel("tuning")


@dataclass(frozen=True, slots=True)
class CkCandidate:
    """An instance for a matmul: its C++ source if it is legal, else the reason why it is not."""

    name: str
    refusal: str = ""
    source: str = field(default="", repr=False)
    is_raced: bool = False  # of the legal ones, those that are compiled and measured

    def __str__(self) -> str:
        return f"{self.name}: {self.refusal or ('legal, raced' if self.is_raced else 'legal')}"


@dataclass(frozen=True, slots=True)
class CkReport:
    """The candidates of CK for one matmul of a program."""

    subject: str
    candidates: tuple[CkCandidate, ...]

    @property
    def legal(self) -> tuple[CkCandidate, ...]:
        return tuple(each for each in self.candidates if not each.refusal)

    def __str__(self) -> str:
        told = f"{self.subject}: {len(self.legal)} of {len(self.candidates)} candidates are legal"
        return "\n".join([told, *(f"  {each}" for each in self.candidates)])


@dataclass(frozen=True, slots=True)
class CkOffer:
    """The proposals of CK for a matmul: choices, the best-ranked first; a reason if none."""

    choices: tuple[Choice, ...] = ()
    silent: str = ""
    is_usable: bool = True  # whether CK can be compiled here


def is_ck_selected(context: Context) -> bool:
    """Whether the settings select CK, and the target is a GPU that it is for."""
    selected = selected_sources(context.settings.max_autotune_gemm_backends)
    return CK in selected and CK.serves(context.target)


def is_measured_on_cpu(context: Context) -> bool:
    """Whether CK is raced on CPU tensors: with headers that compile there, in place of a GPU."""
    return is_interpreted(context) and is_ck_selected(context)


def considered(problem: CkProblem, context: Context) -> tuple[Instance, ...]:
    """The instances that the settings ask for: preselected, installed, or shipped."""
    if context.settings.rocm.use_preselected_instances:
        return preselected_instances()
    installation = inspect_ck(context.settings)
    return installed_instances(installation, is_batched=problem.batch is not None).instances


def judge(matmul: Matmul, program: Program, context: Context) -> tuple[CkProblem, Judged] | str:
    """A matmul as CK's problem with a verdict on every instance, or why it is not one."""
    arch = ck_arch(context)
    why = why_no_device(arch)
    problem = why or ck_problem(matmul, program.buffers, arch)
    if isinstance(problem, str):
        return problem
    if context.settings.rocm.use_preselected_instances and not _has_preselected(problem, arch):
        return f"rocm.use_preselected_instances leaves no instance for {problem}"
    return problem, judged(considered(problem, context), problem, arch)


def _has_preselected(problem: CkProblem, arch: str) -> bool:
    """Whether a preselected instance has a problem's types and layouts; none is for batches."""
    if problem.batch is not None:
        return False
    return any(
        not refusal(Case(each, problem, arch), KIND_RULES) for each in preselected_instances()
    )


def in_order(problem: CkProblem, verdict: Judged, context: Context) -> tuple[Instance, ...]:
    """The legal instances, the best-ranked first."""
    gpu = context.target.gpu
    assert gpu is not None
    return ranked(verdict.legal, problem, gpu)


def raced(legal: tuple[Instance, ...], context: Context) -> tuple[Instance, ...]:
    """Those of the ranked instances that are compiled and measured."""
    return sampled(legal, context.settings.rocm.n_max_profiling_configs)


def ck_offer(matmul: Matmul, program: Program, context: Context) -> CkOffer:
    """The choices that CK proposes here for a matmul."""
    if not is_ck_selected(context):
        return CkOffer(silent="not selected")
    found = judge(matmul, program, context)
    if isinstance(found, str):
        return CkOffer(silent=found)
    problem, verdict = found
    if not verdict.legal:
        return CkOffer(silent=f"{verdict} for {problem}")
    reason = why_no_ck(context)
    if reason:
        report_once(reason, advice_for_ck(context))
        return CkOffer(silent=reason, is_usable=False)
    chosen = raced(in_order(problem, verdict, context), context)
    return CkOffer(tuple(ck_choice(each) for each in chosen))


@functools.cache
def report_once(reason: str, advice: str = "") -> None:
    """Warn about a CK that cannot be used, once for each reason."""
    message = f"CK: {reason}{f'; {advice}' if advice else ''}"
    LOG.warning("%s", message)
    warnings.warn(message, CkWarning, stacklevel=2)


def report_failures(errors: Mapping[Hashable, Exception]) -> bool:
    """Warn about instances that do not compile, once for each message; whether there are any."""
    own = [e for c, e in errors.items() if isinstance(c, Choice) and c.source == SOURCE]
    for error in own:
        told = _first_error(error) if isinstance(error, CompilerFailed) else str(error)
        report_once(f"an instance does not compile: {told}")
    return bool(own)


def _first_error(error: CompilerFailed) -> str:
    lines = error.output.strip().splitlines()
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")


def with_progress(
    builds: Sequence[tuple[Choice, Callable[[], object]]], subject: str
) -> tuple[list[tuple[Choice, Callable[[], object]]], TuningProgress]:
    """The same builds; those of CK report how many are left."""
    num_left = sum(choice.source == SOURCE for choice, _ in builds)
    progress, lock = TuningProgress(f"CK for {subject}", num_left), threading.Lock()
    left = [num_left]

    def build(choice: Choice, run: Callable[[], object]) -> object:
        try:
            return run()
        finally:
            with lock:
                left[0] -= 1
                progress.advance()
                LOG.info("CK for %s: %s is compiled, %d left", subject, choice, left[0])

    made = [
        (c, functools.partial(build, c, run) if c.source == SOURCE else run) for c, run in builds
    ]
    return made, progress


# -- without a device ----------------------------------------------------------------------


def ck_reports(program: Program, context: Context) -> tuple[CkReport, ...]:
    """The candidates of CK for each matmul of a program, where settings select CK."""
    if not is_ck_selected(context):
        return ()
    found = inspect_ck(context.settings)
    if context.settings.rocm.ck_dir and found.state is not CkState.COMPLETE:
        report_once(f"{found}, so that the instances are those of Perfuse's table", found.advice)
    matmuls = [node for node in program.nodes if isinstance(node, Matmul)]
    return tuple(_report(matmul, program, context) for matmul in matmuls)


def _report(matmul: Matmul, program: Program, context: Context) -> CkReport:
    """Every instance that has a matmul's types and layouts, legal ones first, the best before.

    Nothing is compiled, and no CK has to be installed.
    """
    subject = f"{matmul.op} in {matmul.out}"
    found = judge(matmul, program, context)
    if isinstance(found, str):
        return CkReport(subject, (CkCandidate("CK", found),))
    problem, verdict = found
    best_first = in_order(problem, verdict, context)
    chosen = set(raced(best_first, context))
    legal = [
        CkCandidate(each.name, source=source_of(each, problem), is_raced=each in chosen)
        for each in best_first
    ]
    refused = [
        CkCandidate(each.name, why)
        for each, why in verdict.refused
        if not why.startswith("it has other")
    ]
    every = (*legal, *refused) or (CkCandidate("CK", str(verdict)),)
    return CkReport(f"{subject}, {problem}", every)


def ck_versions(context: Context) -> tuple[tuple[str, str], ...]:
    """The CK that candidates are compiled of, for questions."""
    found: CkInstallation = inspect_ck(context.settings)
    return (("ck", f"{found.version} {found.digest}".strip()),) if found.digest else ()
