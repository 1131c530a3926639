"""`Source`: proposes choices for matmuls, and defines how one is written, built and measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perfuse.cache.manifest import Entry
from perfuse.candidates.request import BenchmarkRequest
from perfuse.candidates.site import Site
from perfuse.codegen.triton.sources import HostUnit
from perfuse.context import Context
from perfuse.decision import Choice
from perfuse.ir.program import Matmul, Program
from perfuse.schedule.plan import Plan
from perfuse.target import Target

if TYPE_CHECKING:
    from perfuse.codegen.triton.unit import WriteContraction


@dataclass(frozen=True, slots=True)
class Offer:
    """The choices that a source proposes for a site, the best first; a reason if there are none."""

    choices: tuple[Choice, ...] = ()
    reason: str = ""
    is_usable: bool = True  # False: what is wrong on this machine may get fixed
    versions: tuple[tuple[str, str], ...] = ()  # of what the choices are made of


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to compute a matmul: its source if it is legal, else the reason why it is not."""

    name: str
    refusal: str = ""
    source: str = field(default="", repr=False)  # the C++ that computes it
    is_raced: bool = False  # of the legal ones, those that are compiled and measured

    def __str__(self) -> str:
        return f"{self.name}: {self.refusal or ('legal, raced' if self.is_raced else 'legal')}"


@dataclass(frozen=True, slots=True)
class CandidateReport:
    """The candidates of one source for one matmul of a program."""

    subject: str
    backend: str  # as settings name the row
    candidates: tuple[Candidate, ...]

    @property
    def legal(self) -> tuple[Candidate, ...]:
        return tuple(each for each in self.candidates if not each.refusal)

    def __str__(self) -> str:
        count = f"{len(self.legal)} of {len(self.candidates)} candidates are legal"
        return "\n".join([f"{self.subject}: {count}", *(f"  {each}" for each in self.candidates)])


@dataclass(frozen=True, slots=True)
class Contractions:
    """How a source computes the sites of a GPU's plan, as kernels of the plan."""

    propose: Callable[[Site, Program, Context], Offer]
    write: WriteContraction | None  # None: the plan's own library call
    build: Callable[[HostUnit, Context], Entry] | None = None  # the library of a host call
    fuses_epilogues: bool = False
    # Candidates run on CPU tensors where programs are interpreted, so that their times count there.
    is_timed_on_cpu: bool = False
    # Reports a candidate that does not compile; then the decision is not remembered.
    report_failure: Callable[[Exception], None] | None = None
    # The candidates for the matmuls of a program that is compiled for another machine.
    report: Callable[[Program, Context], tuple[CandidateReport, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A row: its choices for matmuls on a CPU, each measured by a request, and for those of a GPU.

    A choice belongs to the row whose name in small letters is its source.
    """

    name: str  # in capitals, as settings name it
    serves: Callable[[Target], bool]
    propose: Callable[[Any, Context], Sequence[Choice]] = lambda problem, context: ()
    request: Callable[[Any, Choice, Context], BenchmarkRequest] | None = None
    build: Callable[[Any, Choice, Context], object] | None = None  # compiles it ahead of `request`
    # Puts a choice for a matmul into a plan; None: a library call of the table of rivals.
    apply: Callable[[Plan, Matmul, Choice, Context], Plan] | None = None
    contractions: Contractions | None = None
