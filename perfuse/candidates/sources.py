"""Candidate sources: an open list of rows, each of which proposes choices for a problem.

The setting `max_autotune_gemm_backends` selects rows by name. A source that proposes nothing is
reported with the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perfuse.cache.manifest import Entry
from perfuse.candidates.library import ATEN
from perfuse.candidates.site import Site
from perfuse.candidates.source import CandidateReport, Contractions, Offer, Source
from perfuse.codegen.triton.sources import HostUnit
from perfuse.context import Context
from perfuse.decision import Choice
from perfuse.deferred import deferred
from perfuse.errors import ConfigError, UnknownOption
from perfuse.gpu import Platform
from perfuse.ir.program import Program
from perfuse.logs import channel
from perfuse.selection import backend_names

if TYPE_CHECKING:
    from perfuse.codegen.triton.unit import WriteContraction

LOG = channel("tuning")
SETTING = "max_autotune_gemm_backends"

# The templates of `codegen/cpp`, which `autotune/contractions.py` races.
CPP = Source("CPP", lambda target: target.gpu is None)

TRITON = Source(
    "TRITON",
    lambda target: target.gpu is not None,
    contractions=Contractions(
        deferred("perfuse.candidates.triton:template_offer"),
        deferred("perfuse.codegen.triton.unit:write_template"),
        fuses_epilogues=True,
    ),
)
CK = Source(
    "CK",
    lambda target: target.kind is Platform.HIP,
    contractions=Contractions(
        deferred("perfuse.candidates.ck:ck_offer"),
        deferred("perfuse.codegen.ck.launch:write_ck"),
        deferred("perfuse.build.ck:build_ck"),
        is_timed_on_cpu=True,
        report_failure=deferred("perfuse.candidates.ck:report_failure"),
        report=deferred("perfuse.candidates.ck:ck_reports"),
    ),
)

# In the order of proposal, which decides between candidates that are equally fast.
SOURCES: list[Source] = [ATEN, TRITON, CPP, CK]


def selected_sources(text: str) -> tuple[Source, ...]:
    """The sources that a setting names, in the order of the list; an unknown name is an error."""
    named = backend_names(text)
    known = {source.name: source for source in SOURCES}
    for name in named:
        if name not in known:
            raise UnknownOption(name, known, what=f"backend in {SETTING}")
    if not named:
        raise ConfigError(f"{SETTING} names no backend", hint=f"choose among {', '.join(known)}.")
    return tuple(source for name, source in known.items() if name in named)


def source_named(name: str) -> Source:
    """The row by the name that choices have; the library's calls are those of ATen."""
    wanted = ATEN.name if name == "library" else name.upper()
    unknown = Source(wanted, lambda target: False)
    return next((source for source in SOURCES if source.name == wanted), unknown)


def is_selected(choice: Choice, context: Context) -> bool:
    """Whether the settings select the source that proposes a choice."""
    selected = selected_sources(context.settings.max_autotune_gemm_backends)
    return source_named(choice.source) in selected


def silent_sources(context: Context) -> dict[str, str]:
    """Selected sources that cannot serve the target, and those that proposed nothing."""
    selected = selected_sources(context.settings.max_autotune_gemm_backends)
    kind = context.target.kind
    return {
        s.name: "no candidate" if s.serves(context.target) else f"not on {kind}" for s in selected
    }


@dataclass(frozen=True, slots=True)
class Offers:
    """The proposals of the selected sources for a problem, and why some propose nothing."""

    choices: Mapping[Choice, Source]
    silent: Mapping[str, str] = field(default_factory=dict)  # name of a source -> reason

    def __str__(self) -> str:
        return "; ".join(f"{name} proposes nothing: {why}" for name, why in self.silent.items())


def offers_for(problem: Any, context: Context) -> Offers:
    """Ask every selected source; those without candidates are logged and counted."""
    choices: dict[Choice, Source] = {}
    silent: dict[str, str] = {}
    for source in selected_sources(context.settings.max_autotune_gemm_backends):
        serves = source.serves(context.target)
        proposed = source.propose(problem, context) if serves else ()
        choices.update(dict.fromkeys(proposed, source))
        if not proposed:
            why = f"no candidate for {problem}" if serves else f"not on {context.target.kind}"
            silent[source.name] = why
            LOG.info("%s proposes nothing: %s", source.name, why)
            context.counters.inc(f"autotune.no_candidate.{source.name}")
    return Offers(choices, silent)


# -- contractions on a GPU -----------------------------------------------------------------


def writers() -> dict[str, WriteContraction]:
    """How contractions are written, by the source of the choice."""
    rows = {source.name.lower(): source.contractions for source in SOURCES}
    return {name: row.write for name, row in rows.items() if row is not None and row.write}


def build_unit(unit: HostUnit, context: Context) -> Entry:
    """Build the library of a host call as its source does."""
    row = source_named(unit.source).contractions
    assert row is not None and row.build is not None, f"{unit.source} builds no host calls"
    return row.build(unit, context)


def competing(context: Context) -> dict[str, Contractions]:
    """The selected sources of a GPU's contractions, besides the library, by name.

    An interpreter's time says nothing about a kernel: where candidates of a source can be timed on
    CPU tensors, only such sources compete.
    """
    selected = selected_sources(context.settings.max_autotune_gemm_backends)
    found = {
        source.name: source.contractions
        for source in selected
        if source.serves(context.target) and source.contractions is not None
        if source.contractions.write is not None
    }
    timed = {name: row for name, row in found.items() if row.is_timed_on_cpu}
    return timed if context.is_interpreted and timed else found


def is_timed_on_cpu(context: Context) -> bool:
    """Whether candidates for a GPU are raced on CPU tensors, by the wall clock."""
    return context.is_interpreted and any(r.is_timed_on_cpu for r in competing(context).values())


def fuses_epilogues(context: Context) -> bool:
    """Whether a kernel after a matmul belongs to its site: only if some source can fuse it."""
    rows = competing(context).values()
    return not rows or any(row.fuses_epilogues for row in rows)


def contraction_offers(
    site: Site, program: Program, context: Context, among: Collection[str] | None = None
) -> dict[str, Offer]:
    """The proposals of each source for a site; the library's, which is the default, is first.

    `among`: the names of those that are asked besides the library; by default all that compete.
    """
    assert ATEN.contractions is not None
    rows = {n: row for n, row in competing(context).items() if among is None or n in among}
    rows = {ATEN.name: ATEN.contractions, **rows}
    return {name: row.propose(site, program, context) for name, row in rows.items()}


def report_failures(errors: Mapping[Choice, Exception]) -> bool:
    """Have sources report candidates that do not compile; returns whether there were any."""
    rows = [(source_named(choice.source).contractions, error) for choice, error in errors.items()]
    reports = [(row.report_failure, error) for row, error in rows if row and row.report_failure]
    for report, error in reports:
        report(error)
    return bool(reports)


def candidate_reports(program: Program, context: Context) -> tuple[CandidateReport, ...]:
    """The candidates for the matmuls of a program, of the selected sources that list them."""
    reports = [row.report for row in competing(context).values() if row.report is not None]
    return tuple(made for report in reports for made in report(program, context))
