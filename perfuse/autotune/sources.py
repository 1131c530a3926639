"""Candidate sources: who proposes choices for a problem, an open list of rows.

The setting `max_autotune_gemm_backends` selects rows by name. A source that proposes nothing is
reported with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perfuse.autotune.problem import LibraryMatmul, Problem, choices_of
from perfuse.autotune.request import BenchmarkRequest
from perfuse.context import Context
from perfuse.decision import Choice
from perfuse.errors import ConfigError, UnknownOption
from perfuse.gpu import Platform
from perfuse.ir.program import Matmul
from perfuse.logs import channel
from perfuse.schedule.plan import Plan
from perfuse.selection import backend_names
from perfuse.target import Target

LOG = channel("tuning")
SETTING = "max_autotune_gemm_backends"


def _proposes_nothing(problem: Any, context: Context) -> Sequence[Choice]:
    return ()


def _no_request(problem: Any, choice: Choice, context: Context) -> BenchmarkRequest:
    raise NotImplementedError(f"{choice} cannot be measured")


@dataclass(frozen=True, slots=True)
class Source:
    """A row: the choices that a source proposes, and how one of them is built and measured."""

    name: str  # in capitals, as settings name it
    serves: Callable[[Target], bool]
    propose: Callable[[Any, Context], Sequence[Choice]] = _proposes_nothing
    request: Callable[[Any, Choice, Context], BenchmarkRequest] = _no_request
    build: Callable[[Any, Choice, Context], object] | None = None  # compiles it ahead of `request`
    # Puts a choice for a matmul into a plan; None: a library call of the table of rivals.
    apply: Callable[[Plan, Matmul, Choice, Context], Plan] | None = None


def _library_choices(problem: Any, context: Context) -> Sequence[Choice]:
    is_known = isinstance(problem, Problem) and context.target.gpu is None
    return choices_of(problem) if is_known else ()


def _library_request(problem: Any, choice: Choice, context: Context) -> BenchmarkRequest:
    return LibraryMatmul(choice.name, problem)


def _is_gpu(target: Target) -> bool:
    return target.gpu is not None


ATEN = Source("ATEN", lambda target: True, _library_choices, _library_request)
TRITON = Source("TRITON", _is_gpu)
CPP = Source("CPP", lambda target: target.gpu is None)
CK = Source("CK", lambda target: target.kind is Platform.HIP)

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


# Names of backends by the sources of choices; others are their own.
_BACKENDS = {"library": ATEN.name}


def is_selected(choice: Choice, context: Context) -> bool:
    """Whether the settings select the source that proposes a choice."""
    names = {s.name for s in selected_sources(context.settings.max_autotune_gemm_backends)}
    return _BACKENDS.get(choice.source, choice.source.upper()) in names


def apply_of(choice: Choice) -> Callable[[Plan, Matmul, Choice, Context], Plan] | None:
    """How a choice is put into a plan; None for a library call."""
    name = _BACKENDS.get(choice.source, choice.source.upper())
    return next((source.apply for source in SOURCES if source.name == name), None)


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
            told = f"no candidate for {problem}" if serves else f"not on {context.target.kind}"
            silent[source.name] = told
            LOG.info("%s proposes nothing: %s", source.name, told)
            context.counters.inc(f"autotune.no_candidate.{source.name}")
    return Offers(choices, silent)
