"""Legality: the rules replay the counts of the facts, row by row, and exclude CK's traps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from perfuse.codegen.ck.instance import Instance, preselected_instances, shipped_instances
from perfuse.codegen.ck.legality import (
    CK_RULES,
    RULES,
    Case,
    Rule,
    judged,
    prefetch_stages,
    refusal,
)
from perfuse.codegen.ck.problem import CkOperand, CkProblem
from tests.ck.stand_in import every_instance, problem

ARCH = "gfx942"
BY_NAME = {rule.name: rule for rule in RULES}
OF_KIND = (BY_NAME["types"], BY_NAME["layouts"])
# The conditions by which the peer filters its candidates.
PEER = (*OF_KIND, *(BY_NAME[name] for name in ("whole tiles", "depth", "vectors")))


def kept(
    instances: Sequence[Instance], of: CkProblem, rules: Sequence[Rule], k_batch: int = 1
) -> list[Instance]:
    return [i for i in instances if not refusal(Case(i, of, ARCH, k_batch), rules)]


# Sizes, layouts and type; instances, those the peer keeps, of these CK refuses, CK accepts.
FACTS = [
    (problem(128, 128, 64), 648, 444, 388, 64),
    (problem(64, 64, 60), 648, 49, 49, 0),
    (problem(2240, 2048, 256), 648, 494, 20, 624),
    (problem(2240, 2048, 256, "RRR", "BF16"), 304, 244, 4, 296),
    (problem(2048, 2048, 2048), 648, 640, 0, 648),
    (problem(16, 4096, 4096), 648, 410, 0, 648),
    (problem(1, 4096, 4096, "CRR", "BF16"), 344, 0, 0, 0),
    (problem(33, 65, 128), 648, 0, 0, 0),
    (problem(33, 65, 128, "RRR"), 456, 0, 0, 0),
]


@pytest.mark.parametrize(
    ("of", "num_instances", "num_kept", "num_refused", "num_accepted"), FACTS, ids=str
)
def test_the_table_of_the_facts(
    of: CkProblem, num_instances: int, num_kept: int, num_refused: int, num_accepted: int
) -> None:
    instances = kept(every_instance(), of, OF_KIND)
    by_peer, by_ck = kept(instances, of, PEER), kept(instances, of, CK_RULES)
    assert len(instances) == num_instances
    assert len(by_peer) == num_kept
    assert sum(each not in by_ck for each in by_peer) == num_refused
    assert len(by_ck) == num_accepted
    assert set(judged(every_instance(), of, ARCH).legal) <= set(by_ck) & set(by_peer)


# The instances of each kind, as the facts count them.
KINDS = {
    ("RCR", "F16", "F16", "F16"): 648,
    ("RRR", "F16", "F16", "F16"): 456,
    ("RCR", "BF16", "BF16", "BF16"): 352,
    ("RRR", "BF16", "BF16", "BF16"): 304,
    ("CRR", "BF16", "BF16", "BF16"): 344,
    ("CCR", "BF16", "BF16", "BF16"): 400,
    ("RCR", "F8", "F8", "BF16"): 560,
    ("RRR", "F8", "F8", "BF16"): 424,
    ("RCR", "F16", "F8", "F16"): 328,
    ("RRR", "F16", "F8", "F16"): 224,
    ("RCR", "F8", "F16", "F16"): 328,
    ("RRR", "F8", "F16", "F16"): 224,
    ("RCR", "F16", "I4", "F16"): 40,
    ("RCR", "BF16", "I4", "BF16"): 40,
}


def test_instances_by_kind() -> None:
    counts: dict[tuple[str, ...], int] = {}
    for i in every_instance():
        layouts = i.a_layout[0] + i.b_layout[0] + i.c_layout[0]
        key = (layouts, i.a_dtype, i.b_dtype, i.c_dtype)
        counts[key] = counts.get(key, 0) + 1
    assert counts == KINDS


def test_the_products_of_the_seed() -> None:
    f16, bf16 = problem(2240, 2048, 256), problem(2240, 2048, 256, "RRR", "BF16")
    found = judged(preselected_instances(), f16, ARCH)
    assert len(found.legal) == 15
    assert str(found) == "15 of 19 instances are legal"
    # The peer keeps 16, of which CK refuses number 2; CK alone would run two more.
    by_peer = kept(preselected_instances(), f16, PEER)
    assert len(by_peer) == 16 and preselected_instances()[2] in by_peer
    assert preselected_instances()[2] not in found.legal
    assert len(kept(preselected_instances(), f16, CK_RULES)) == 17
    assert len(kept(shipped_instances(), bf16, PEER)) == 244
    assert len(judged(shipped_instances(), bf16, ARCH).legal) == 240
    column_major = problem(50257, 768, 32768, "CRR")
    none = judged(shipped_instances(), column_major, ARCH)
    assert not none.legal and str(none) == "no instance has its types and layouts"


def test_the_prefetch_of_a_compiled_ck() -> None:
    """Seen with CK's own library: number 1 of the preselected refuses K=128, and takes K=192."""
    second = preselected_instances()[1]
    verdicts = [refusal(Case(second, problem(256, 256, k), ARCH)) for k in (128, 192)]
    assert "2 steps of depth do not fill the 2 stages" in str(verdicts[0]) and not verdicts[1]


def test_a_commented_out_line_breaks_a_static_assertion() -> None:
    rule = (BY_NAME["slices"],)
    broken = [i for i in every_instance() if refusal(Case(i, problem(64, 64, 64), ARCH), rule)]
    assert {(i.m_per_block, i.n_per_block, i.a_layout) for i in broken} == {(224, 256, "Col")}
    assert not set(broken) & set(shipped_instances())


PADDED = next(
    i
    for i in shipped_instances()
    if i.padded == "MNK" and i.a_dtype == "F16" and i.pipeline == "v1" and i.b_layout == "Col"
)
WHOLE = problem(256, 256, 2048)
BIAS = CkOperand("Row", "F16", 0)

# A problem that the instance computes, changed so that one rule refuses it.
REFUSED = [
    ("device", Case(PADDED, WHOLE, "gfx1100"), "CK does not support gfx1100"),
    ("types", Case(PADDED, problem(256, 256, 2048, dtype="BF16"), ARCH), "other types"),
    ("layouts", Case(PADDED, problem(256, 256, 2048, "RRR"), ARCH), "other layouts"),
    (
        "atomics",
        Case(replace(PADDED, c_dtype="BF16"), WHOLE, "gfx90a", 2),
        "no bfloat16 atomics on gfx90a",
    ),
    ("depth", Case(PADDED, problem(256, 256, 16), ARCH, 4), "leaves a part of 4 empty"),
    ("vectors", Case(PADDED, problem(256, 98, 2048), ARCH), "98 of C is not a multiple"),
    ("extents", Case(PADDED, problem(1 << 20, 256, 2048), ARCH), "2 GiB"),
    (
        "extents",
        Case(PADDED, replace(WHOLE, d=replace(BIAS, stride=1 << 22)), ARCH),
        "D has 2 GiB",
    ),
    ("overflow", Case(PADDED, replace(WHOLE, alpha=0.5), ARCH), "may overflow in float16"),
    (
        "names",  # as a newer CK may list
        Case(replace(PADDED, a_compute_dtype="TF32"), WHOLE, ARCH),
        "it computes in TF32",
    ),
    (
        "alignment",
        Case(PADDED, replace(WHOLE, a=CkOperand("Row", "F16", 2049)), ARCH),
        "A is misaligned: its rows are 2049 elements apart",
    ),
    (
        "alignment",
        Case(PADDED, replace(WHOLE, d=replace(BIAS, offset=1)), ARCH),
        "first element is number 1",
    ),
    ("split", Case(PADDED, replace(WHOLE, d=BIAS), ARCH, 2), "add the bias several times"),
    (
        "split",
        Case(PADDED, replace(WHOLE, c=CkOperand("Row", "F16", 384)), ARCH, 2),
        "needs a contiguous result",
    ),
    ("split", Case(PADDED, replace(WHOLE, batch=2), ARCH, 2), "a batch is not split"),
]


@pytest.mark.parametrize(("name", "case", "reason"), REFUSED, ids=lambda value: str(value)[:40])
def test_every_rule_says_why(name: str, case: Case, reason: str) -> None:
    assert reason in BY_NAME[name].refusal(case)
    assert refusal(case)


def test_what_is_legal() -> None:
    assert not refusal(Case(PADDED, WHOLE, ARCH))
    assert not refusal(Case(PADDED, WHOLE, ARCH, 2))
    strided = replace(WHOLE, a=CkOperand("Row", "F16", 2300), c=CkOperand("Row", "F16", 384))
    assert not refusal(Case(PADDED, replace(strided, d=BIAS), ARCH))
    assert not refusal(Case(PADDED, problem(250, 256, 2048), ARCH))


def test_every_split_fills_the_pipeline() -> None:
    deep = next(i for i in shipped_instances() if i.pipeline == "v4" and i.a_dtype == "F16")
    steps = 5 * deep.k_per_block
    of = problem(1024, 1024, steps, "RCR" if deep.b_layout == "Col" else "RRR")
    assert not BY_NAME["prefetch"].refusal(Case(deep, of, ARCH))
    assert "3 steps" in BY_NAME["prefetch"].refusal(Case(deep, of, ARCH, 2))
    assert {prefetch_stages(i) for i in shipped_instances() if i.pipeline == "v2"} <= set(
        range(2, 9)
    )
