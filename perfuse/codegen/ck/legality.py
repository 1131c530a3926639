"""The limits of Composable Kernel, checked before a compile, which takes about a minute.

Rules are rows. CK's own reproduce `IsSupportedArgument` and `CheckValidity` of its sources (1.1.0);
the others exclude what CK compiles or runs unchecked and would get wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from perfuse.codegen.ck.instance import Instance
from perfuse.codegen.ck.problem import COL, ELEMENT_BYTES, ROW, CkOperand, CkProblem

ARCHS = ("gfx908", "gfx90a", "gfx942", "gfx950")
BF16_ATOMICS = ("gfx942", "gfx950")
# Sizes and offsets are 32-bit numbers in CK, and ranges of buffers are counted in bytes.
MOST_BYTES = 1 << 31
_PREFETCH = {"v1": 1, "v3": 2, "v4": 4, "v5": 3}


@dataclass(frozen=True, slots=True)
class Case:
    """An instance for a problem on a GPU, with the depth split into `k_batch` parts."""

    instance: Instance
    problem: CkProblem
    arch: str
    k_batch: int = 1


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition: what it is about, and why a case does not meet it; "" where it does."""

    name: str
    refusal: Callable[[Case], str]
    is_of_kind: bool = False  # it compares types and layouts: another instance may have them


@dataclass(frozen=True, slots=True)
class CkRefusal:
    """Why an instance must not be compiled for a problem."""

    text: str
    is_other_kind: bool = False  # it is for matmuls of other types or layouts

    def __str__(self) -> str:
        return self.text


def why_no_device(arch: str) -> str:
    """Why CK has no instances for a GPU; "" where it has."""
    return "" if arch in ARCHS else f"CK does not support {arch}, only {', '.join(ARCHS)}"


def _device(case: Case) -> str:
    return why_no_device(case.arch)


def _types(case: Case) -> str:
    i, p = case.instance, case.problem
    of_instance = (i.a_dtype, i.b_dtype, i.c_dtype)
    return "" if of_instance == (p.a.dtype, p.b.dtype, p.c.dtype) else "it has other types"


def _layouts(case: Case) -> str:
    i, p = case.instance, case.problem
    of_instance = (i.a_layout, i.b_layout, i.c_layout)
    return "" if of_instance == (p.a.layout, p.b.layout, p.c.layout) else "it has other layouts"


def _atomics(case: Case) -> str:
    is_added = case.k_batch > 1 and case.instance.c_dtype == "BF16"
    return f"no bfloat16 atomics on {case.arch}" if is_added and _lacks_bf16(case) else ""


def _lacks_bf16(case: Case) -> bool:
    return case.arch not in BF16_ATOMICS


def _depth(case: Case) -> str:
    i, k, split = case.instance, case.problem.k, case.k_batch
    if "K" in i.padded:
        step = math.lcm(i.a_k1, i.b_k1)
        is_whole = -(-k // (split * step)) * step * (split - 1) < k
        return "" if is_whole else f"K={k} leaves a part of {split} empty"
    for step in (i.a_k1, i.b_k1, split * i.k_per_block):
        if k % step:
            return f"K={k} is not a multiple of {step}"
    return ""


def _strided_tiles(case: Case) -> str:
    i, p = case.instance, case.problem
    if i.a_layout == COL and "M" not in i.padded and p.m % i.m_per_block:
        return f"M={p.m} of a column-major A is not a multiple of {i.m_per_block}"
    if i.b_layout == ROW and "N" not in i.padded and p.n % i.n_per_block:
        return f"N={p.n} of a row-major B is not a multiple of {i.n_per_block}"
    return ""


def _vectors(case: Case) -> str:
    i, p = case.instance, case.problem
    rows = (
        ("A", p.k if i.a_layout == ROW else p.m, i.a_vector),
        ("B", p.n if i.b_layout == ROW else p.k, i.b_vector),
        ("C", p.n if i.c_layout == ROW else p.m, i.c_vector),
    )
    for name, extent, vector in rows:
        if extent % vector:
            return f"the contiguous extent {extent} of {name} is not a multiple of {vector}"
    return ""


def prefetch_stages(instance: Instance) -> int:
    """The number of blocks of depth that a pipeline loads ahead."""
    if instance.pipeline != "v2":
        return _PREFETCH.get(instance.pipeline, 8)  # an unknown one is assumed to be deep
    groups = max(256 // instance.block_size, 1)
    rows = instance.m_per_block * ELEMENT_BYTES[instance.a_dtype]
    columns = instance.n_per_block * ELEMENT_BYTES[instance.b_dtype]
    wanted = math.ceil((32768 // groups) / ((rows + columns) * instance.k_per_block))
    return min(max(wanted, 2), 8)


def _prefetch(case: Case) -> str:
    i = case.instance
    loops = -(-case.problem.k // (case.k_batch * i.k_per_block))
    stages = prefetch_stages(i)
    if i.pipeline == "v1" or loops > stages:
        return ""
    return f"{loops} steps of depth do not fill the {stages} stages of pipeline {i.pipeline}"


def _names(case: Case) -> str:
    """A newer CK may list types of which neither size nor exactness is known here."""
    i = case.instance
    named = (i.accumulator_dtype, i.shuffle_dtype, i.a_compute_dtype, i.b_compute_dtype)
    unknown = [name for name in named if name and name not in ELEMENT_BYTES]
    return f"it computes in {unknown[0]}, which is not known here" if unknown else ""


def _slices(case: Case) -> str:
    """A static assertion of CK, which would otherwise fail after a minute of compiling."""
    i = case.instance
    rows = (
        ("A", i.m_per_block, i.a_k1, i.a_cluster, i.a_vector_dim, i.a_vector),
        ("B", i.n_per_block, i.b_k1, i.b_cluster, i.b_vector_dim, i.b_vector),
    )
    for name, extent, k1, cluster, dim, vector in rows:
        sizes = (i.k_per_block // k1, extent, k1)
        if (sizes[dim] // cluster[dim]) % vector:
            return f"a thread's slice of {name} is not a multiple of {vector}"
    return ""


def _whole_tiles(case: Case) -> str:
    """CK does not check this: it relies on the range checks of buffer loads."""
    i, p = case.instance, case.problem
    for name, extent, tile in (("M", p.m, i.m_per_block), ("N", p.n, i.n_per_block)):
        if name not in i.padded and extent % tile:
            return f"{name}={extent} is not a multiple of {tile} and not padded"
    return ""


def _alignment(case: Case) -> str:
    """Loads need an address that is a multiple of 4 bytes, which CK does not check."""
    p = case.problem
    for name, operand in (("A", p.a), ("B", p.b), ("C", p.c), ("D", p.d)):
        if operand is None:
            continue
        steps = (
            ("rows are {} elements apart", operand.stride),
            ("matrices are {} elements apart", operand.batch_stride),
            ("first element is number {}", operand.offset),
        )
        for form, count in steps:
            if count * ELEMENT_BYTES[operand.dtype] % 4:
                return f"{name} is misaligned: its {form.format(count)}"
    return ""


def _overflow(case: Case) -> str:
    """CK rounds sums to the type of the tile in shared memory before it multiplies them."""
    p, is_scaled = case.problem, case.problem.is_scaled
    if case.instance.shuffle_dtype == "F16" and (is_scaled or abs(p.alpha) < 1):
        return "sums that a factor would make smaller may overflow in float16"
    return ""


def _span(operand: CkOperand | None, rows: int, columns: int, batch: int) -> float:
    if operand is None:
        return 0
    first = rows if operand.layout == ROW else columns
    steps = first * operand.stride + (batch - 1) * operand.batch_stride
    return steps * ELEMENT_BYTES[operand.dtype]


def _extents(case: Case) -> str:
    p, batch = case.problem, case.problem.batch or 1
    spans = {"A": _span(p.a, p.m, p.k, batch), "B": _span(p.b, p.k, p.n, batch)}
    spans |= {"C": _span(p.c, p.m, p.n, batch), "D": _span(p.d, p.m, p.n, batch)}
    large = next((name for name, span in spans.items() if span >= MOST_BYTES), None)
    return "" if large is None else f"{large} has 2 GiB or more"


def _split(case: Case) -> str:
    """Every part of a split applies the epilogue, and C is cleared as if it were contiguous."""
    p = case.problem
    if case.k_batch == 1:
        return ""
    if p.d is not None:
        return "a split depth would add the bias several times"
    if p.batch is not None:
        return "a batch is not split"
    return "" if p.c.stride == p.n else "a split depth needs a contiguous result"


KIND_RULES = (
    Rule("types", _types, is_of_kind=True),
    Rule("layouts", _layouts, is_of_kind=True),
)
CK_RULES = (
    Rule("device", _device),
    *KIND_RULES,
    Rule("atomics", _atomics),
    Rule("depth", _depth),
    Rule("strided tiles", _strided_tiles),
    Rule("vectors", _vectors),
    Rule("prefetch", _prefetch),
)
OWN_RULES = (
    Rule("names", _names),
    Rule("slices", _slices),
    Rule("whole tiles", _whole_tiles),
    Rule("alignment", _alignment),
    Rule("overflow", _overflow),
    Rule("extents", _extents),
    Rule("split", _split),
)
RULES = (*CK_RULES, *OWN_RULES)


def refusal(case: Case, rules: Sequence[Rule] = RULES) -> CkRefusal | None:
    """Why an instance must not be compiled for a problem; None where it may be."""
    found = ((rule, why) for rule in rules if (why := rule.refusal(case)))
    return next((CkRefusal(why, rule.is_of_kind) for rule, why in found), None)


@dataclass(frozen=True, slots=True)
class Judged:
    """Instances for a problem: those that are legal, and why the others are not."""

    legal: tuple[Instance, ...]
    refused: tuple[tuple[Instance, CkRefusal], ...]

    def __str__(self) -> str:
        """One line: the number of instances by reason, the most frequent first."""
        if self.legal:
            return f"{len(self.legal)} of {len(self.legal) + len(self.refused)} instances are legal"
        if not self.refused:
            return "there are no instances"
        counts = Counter(why for _, why in self.refused)
        if all(why.is_other_kind for why in counts):
            return "no instance has its types and layouts"
        first = sorted(counts.items(), key=lambda row: (row[0].is_other_kind, -row[1]))[:3]
        return "no legal instance: " + "; ".join(f"{why} ({count})" for why, count in first)


def judged(
    instances: Iterable[Instance], problem: CkProblem, arch: str, k_batch: int = 1
) -> Judged:
    """Every instance with its verdict, in their order."""
    cases = [Case(instance, problem, arch, k_batch) for instance in instances]
    verdicts = [(case.instance, refusal(case)) for case in cases]
    legal = tuple(instance for instance, why in verdicts if why is None)
    return Judged(legal, tuple((instance, why) for instance, why in verdicts if why is not None))
