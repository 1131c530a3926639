"""Matmuls that C++ templates are known to win on a kind of CPU: default mode takes them unmeasured.

A template takes the compiler about a second, all the time that default mode has for measuring. So a
row names a class of matmuls, not single sizes, and the template that beat the libraries clearly
wherever the class was measured, with no more error than theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, replace

from perfuse.autotune.contractions import Contraction, contraction_of
from perfuse.codegen.cpp.templates.choices import (
    FEW_ROWS,
    SOURCE,
    CppTemplateKind,
    template_of,
)
from perfuse.context import Context
from perfuse.decision import Choice, Decision, unmeasured
from perfuse.ir.dtype import DType
from perfuse.ir.program import Matmul, sizes_from_data
from perfuse.schedule.contract import depth_of, sizes_of
from perfuse.schedule.plan import Plan
from perfuse.schedule.read_stored import computed_right
from perfuse.schedule.size_hints import value_of
from perfuse.target import Target, cpu_model

_RESULTS = "benchmarks/results/2026-11-18-cpu-matmuls"
_LANGUAGE = "benchmarks/results/2026-11-18-cpu-language"
_EXPERTS = "benchmarks/results/2026-11-18-cpu-experts"
_INTEL = "benchmarks/results/2026-11-19-cpu-intel"
# Rows that stand for a number that is computed from data.
_UNKNOWN_ROWS = 64
# Below this, a second of compile time does not pay off soon: a weight of 512 by 512.
_LEAST_WEIGHT = 1 << 18
_LEAST_WORK = 1 << 25


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """The matmul of two matrices, as rows look at it."""

    rows: int
    columns: int
    depth: int
    dtype: DType  # of both operands
    along_depth: bool  # the second operand is stored by columns, as the weight of a linear layer
    changes: bool = False  # calls differ in the number of rows; `rows` is a likely one
    is_computed: bool = False  # a kernel computes the second operand for it alone

    @property
    def work(self) -> int:
        """Its multiplications."""
        return self.rows * self.columns * self.depth


@dataclass(frozen=True, slots=True)
class KnownContraction:
    """A class of matmuls on a kind of CPU, and the kind of template that wins there."""

    name: str
    is_there: Callable[[Target], bool]
    holds: Callable[[CpuFacts], bool]
    kind: CppTemplateKind
    measured: str  # how it compared with the libraries, and where that is recorded
    changes: bool = False  # whether it is for numbers of rows that change from call to call

    def is_meant(self, facts: CpuFacts) -> bool:
        return self.changes == facts.changes and self.holds(facts)


def is_amd_avx512(target: Target) -> bool:
    """Where MKL multiplies float32 at half of oneDNN's speed, and there are no matrix units."""
    return target.isa == "avx512" and "AMD" in cpu_model()


def _is_amd_with_pairs(target: Target) -> bool:
    return is_amd_avx512(target) and target.has_bf16_pairs


def is_intel_with_pairs(target: Target) -> bool:
    """Where both libraries multiply float32 at the speed of the registers, but not few rows.

    The measured one also has matrix units, which multiply more than a few rows of bfloat16 faster.
    """
    return target.isa == "avx512" and target.has_bf16_pairs and "Intel" in cpu_model()


def _sums_long(facts: CpuFacts) -> bool:
    """Whether oneDNN's error is more than twice that of MKL, which sums in parts of its own.

    That holds from 1280 on, as measured; the packed right operand takes 512 columns.
    """
    return facts.dtype is DType.F32 and 1280 <= facts.depth <= 8192


def _has_few_rows(facts: CpuFacts, dtype: DType, most: int) -> bool:
    is_large = facts.columns * facts.depth >= _LEAST_WEIGHT
    return facts.rows <= most and facts.along_depth and facts.dtype is dtype and is_large


def _is_of_an_expert(facts: CpuFacts) -> bool:
    """Rows that a loop over experts gathers: too few for a race, and another number each time."""
    is_small = 1 << 18 <= facts.work < 1 << 24 and facts.depth <= 4096
    return facts.dtype is DType.F32 and is_small and facts.rows >= 8


def _computes_weight(facts: CpuFacts, dtype: DType, most: int) -> bool:
    """Few rows, and a weight that a kernel would dequantise first: most of the time is its."""
    return facts.is_computed and _has_few_rows(facts, dtype, most)


KNOWN: list[KnownContraction] = [
    KnownContraction(
        "few rows of bfloat16 times a weight that is computed",
        _is_amd_with_pairs,
        lambda facts: _computes_weight(facts, DType.BF16, FEW_ROWS),
        CppTemplateKind.PAIRS,
        f"1.5 to 3 times the speed of a kernel and the library ({_LANGUAGE})",
    ),
    KnownContraction(
        "few rows of float32 times a weight that is computed",
        is_amd_avx512,
        lambda facts: _computes_weight(facts, DType.F32, FEW_ROWS),
        CppTemplateKind.DOTS,
        f"1.4 to 3 times the speed of a kernel and the library ({_LANGUAGE})",
    ),
    KnownContraction(
        "a few rows times a weight that is computed",
        lambda target: target.isa in ("avx2", "avx512"),
        lambda facts: _computes_weight(facts, facts.dtype, 4),
        CppTemplateKind.DOTS,
        f"1.5 to 4 times the speed of a kernel and the library ({_LANGUAGE})",
    ),
    KnownContraction(
        "few rows of bfloat16 times the weight of a linear layer",
        _is_amd_with_pairs,
        lambda facts: _has_few_rows(facts, DType.BF16, 32),
        CppTemplateKind.PAIRS,
        f"1.2 to 3 times the library's speed ({_RESULTS})",
    ),
    KnownContraction(
        "few rows of float32 times the weight of a linear layer",
        is_amd_avx512,
        lambda facts: _has_few_rows(facts, DType.F32, 48 if _sums_long(facts) else 8),
        CppTemplateKind.DOTS,
        f"1.3 to 2.3 times the libraries' speed ({_RESULTS})",
    ),
    KnownContraction(
        "a few rows of bfloat16 times the weight of a linear layer",
        is_intel_with_pairs,
        lambda facts: _has_few_rows(facts, DType.BF16, 4),
        CppTemplateKind.PAIRS,
        f"2.1 to 7 times the library's speed ({_INTEL})",
    ),
    KnownContraction(
        "some rows of float32 times the weight of a linear layer",
        is_intel_with_pairs,
        lambda facts: _has_few_rows(facts, DType.F32, 32),
        CppTemplateKind.DOTS,
        f"1.05 to 2 times the libraries' speed ({_INTEL})",
    ),
    KnownContraction(
        "float32 with large K",
        is_amd_avx512,
        lambda facts: _sums_long(facts) and facts.rows >= 64 and facts.work >= _LEAST_WORK,
        CppTemplateKind.PACKED,
        f"1.8 to 2.2 times MKL's speed; oneDNN's error is twice as large ({_RESULTS})",
    ),
    KnownContraction(
        "some rows of float32, whose number changes",
        is_amd_avx512,
        _is_of_an_expert,
        CppTemplateKind.PACKED,
        f"1.3 to 2 times MKL's speed; oneDNN compiles for each number of rows ({_EXPERTS})",
        changes=True,
    ),
]


def with_known_contractions(
    plan: Plan, context: Context, decided: Set[str]
) -> tuple[Plan, Set[str]]:
    """The plan with each matmul of a known class computed by its template, and their results.

    Those in `decided` are skipped.
    """
    rows = [row for row in KNOWN if row.is_there(context.target)]
    known: set[str] = set()
    if not rows or not context.settings.cpu.tune_matmuls:
        return plan, known
    for step in plan.steps:
        if not isinstance(step, Matmul) or step.out in decided:
            continue
        facts = facts_of(step, plan)
        row = next((r for r in rows if facts is not None and r.is_meant(facts)), None)
        raced = facts is not None and not facts.changes
        found = contraction_of(step, plan, context, is_raced=raced) if row is not None else None
        choice = _template(found, row) if found is not None and row is not None else None
        if found is not None and row is not None and choice is not None:
            known.add(step.out)
            rivals = unmeasured((found.choices[0], choice))
            decision = Decision(str(found), choice, rivals, f"{row.name}: {row.measured}")
            plan = found.applied(choice)
            if decision not in plan.decisions:
                plan = replace(plan, decisions=(*plan.decisions, decision))
    return plan, known


def _template(found: Contraction, row: KnownContraction) -> Choice | None:
    """The first template of the kind that wins, if one is legal."""
    templates = (choice for choice in found.choices if choice.source == SOURCE)
    return next((choice for choice in templates if template_of(choice).kind is row.kind), None)


def facts_of(matmul: Matmul, plan: Plan) -> CpuFacts | None:
    """Sizes, type and layout of a matmul; None where a size is not known, or the types differ."""
    a, b = matmul.operands.a, matmul.operands.b
    dtypes = {plan.program.buffers[view.buffer].dtype for view in (a, b)}
    if len(b.shape) != 2 or len(dtypes) != 1:
        return None
    (rows, columns), depth = sizes_of(matmul), depth_of(matmul)
    if not isinstance(columns, int) or not isinstance(depth, int):
        return None
    changes = not isinstance(rows, int)
    likely = _UNKNOWN_ROWS if sizes_from_data([rows]) else value_of(rows, plan.program.hints)
    is_computed = not changes and computed_right(plan, matmul) is not None
    along_depth = b.strides[0] == 1
    return CpuFacts(likely, columns, depth, dtypes.pop(), along_depth, changes, is_computed)
