"""Composable Kernel as a source: which instances are legal for a matmul, and which are raced.

Legality is decided before anything is compiled. If CK has nothing to offer, the reason is recorded;
a CK that is missing, incomplete or does not compile is reported once.
"""

from __future__ import annotations

import functools
import warnings

from perfuse.build.ck import advice_for_ck, why_no_ck
from perfuse.build.ck_installation import (
    CkInstallation,
    CkState,
    inspect_ck,
    installed_instances,
)
from perfuse.candidates.site import Site
from perfuse.candidates.source import Candidate, CandidateReport, Offer
from perfuse.codegen.ck.instance import Instance, preselected_instances
from perfuse.codegen.ck.launch import ck_choice, source_of
from perfuse.codegen.ck.legality import (
    KIND_RULES,
    Case,
    Judged,
    judged,
    refusal,
    why_no_device,
)
from perfuse.codegen.ck.problem import CkProblem, ck_arch, ck_problem
from perfuse.codegen.ck.rank import ranked, sampled
from perfuse.context import Context
from perfuse.errors import CkWarning, CompilerFailed
from perfuse.ir.program import Matmul, Program
from perfuse.logs import channel

LOG = channel("tuning")
NAME = "CK"  # of its row in `sources.py`


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


def ck_offer(site: Site, program: Program, context: Context) -> Offer:
    """The choices that CK proposes here for the one matmul of a site."""
    if len(site.alone) != 1:
        return Offer(reason="several matmuls are computed at once")
    found = judge(site.contracted[0], program, context)
    if isinstance(found, str):
        return Offer(reason=found)
    problem, verdict = found
    if not verdict.legal:
        return Offer(reason=f"{verdict} for {problem}")
    reason = why_no_ck(context)
    if reason:
        report_once(reason, advice_for_ck(context))
        return Offer(reason=reason, is_usable=False)
    chosen = raced(in_order(problem, verdict, context), context)
    return Offer(tuple(map(ck_choice, chosen)), versions=ck_versions(context))


@functools.cache
def report_once(reason: str, advice: str = "") -> None:
    """Warn about a CK that cannot be used, once for each reason."""
    message = f"CK: {reason}{f'; {advice}' if advice else ''}"
    LOG.warning("%s", message)
    warnings.warn(message, CkWarning, stacklevel=2)


def report_failure(error: Exception) -> None:
    """Warn about an instance that does not compile, once for each message."""
    shown = _first_error(error) if isinstance(error, CompilerFailed) else str(error)
    report_once(f"an instance does not compile: {shown}")


def _first_error(error: CompilerFailed) -> str:
    lines = error.output.strip().splitlines()
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")


# -- without a device ----------------------------------------------------------------------


def ck_reports(program: Program, context: Context) -> tuple[CandidateReport, ...]:
    """The candidates of CK for each matmul of a program."""
    found = inspect_ck(context.settings)
    if context.settings.rocm.ck_dir and found.state is not CkState.COMPLETE:
        report_once(f"{found}, so that the instances are those of Perfuse's table", found.advice)
    matmuls = [node for node in program.nodes if isinstance(node, Matmul)]
    return tuple(_report(matmul, program, context) for matmul in matmuls)


def _report(matmul: Matmul, program: Program, context: Context) -> CandidateReport:
    """Every instance that has a matmul's types and layouts, legal ones first, best-ranked first.

    Nothing is compiled, and no CK has to be installed.
    """
    subject = f"{matmul.op} in {matmul.out}"
    found = judge(matmul, program, context)
    if isinstance(found, str):
        return CandidateReport(subject, NAME, (Candidate(NAME, found),))
    problem, verdict = found
    best_first = in_order(problem, verdict, context)
    chosen = set(raced(best_first, context))
    legal = [
        Candidate(each.name, source=source_of(each, problem), is_raced=each in chosen)
        for each in best_first
    ]
    refused = [
        Candidate(each.name, why.text) for each, why in verdict.refused if not why.is_other_kind
    ]
    every = (*legal, *refused) or (Candidate(NAME, str(verdict)),)
    return CandidateReport(f"{subject}, {problem}", NAME, every)


def ck_versions(context: Context) -> tuple[tuple[str, str], ...]:
    """The version of CK that candidates are compiled from, for questions."""
    found: CkInstallation = inspect_ck(context.settings)
    return (("ck", f"{found.version} {found.digest}".strip()),) if found.digest else ()
