"""Targets of the cases on the CPU, and which of them were missed."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report import Row, geometric_mean

# Not of the kinds that are asked for: mostly library calls.
PRODUCTS = ("mm_", "addmm_", "conv", "attn")
# Bound by memory and by nothing else: few operations a byte, and none that is expensive.
PLAIN = frozenset(
    """add swish hard_swish layer_norm add_layer_norm rmsnorm_t5
    e4m3_q e4m3_dq e4m3_rt e5m2_q e5m2_dq e5m2_rt""".split()
)
LEAST = {"kernels": 1.0, "models": 0.97}
LEAST_MEAN = {"kernels": 2.0, "models": 1.05}
LEAST_OF_MEMORY = 0.85


def missed(group: str, rows: Sequence[Row]) -> list[str]:
    """Each target that was not reached, in words; a case that failed reached none."""
    if group not in LEAST:
        return []
    asked = [r for r in rows if not r["name"].startswith(PRODUCTS)]
    found = [text for row in asked for text in _missed_by(row, LEAST[group])]
    mean = geometric_mean(r["over_peer"] for r in asked) or 0.0
    if mean < LEAST_MEAN[group]:
        found.append(f"geometric mean {mean:.2f} < {LEAST_MEAN[group]}")
    return found


def _missed_by(row: Row, least: float) -> list[str]:
    if row["over_peer"] is None or "Perfuse" in row["failures"]:
        return [f"{row['name']} failed"]
    found = []
    if row["over_peer"] < least:
        found.append(f"{row['name']} {row['over_peer']:.2f}x < {least}x")
    if row["name"] in PLAIN and row["of_memory"] < LEAST_OF_MEMORY:
        found.append(f"{row['name']} {row['of_memory']:.0%} of memory < {LEAST_OF_MEMORY:.0%}")
    return found
