"""Amounts of memory as people write them: "14GiB", 300_000_000, or a fraction of something."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

UNITS = {"": 1, "b": 1}
UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)}
UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)}
FORMS = 'bytes ("14GiB", "300MB", 300_000_000) or a fraction (0.5, "50%")'


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit on memory: bytes, or a fraction of what is used without a limit."""

    num_bytes: int | None = None
    fraction: float | None = None

    def limit(self, unconstrained: int) -> int:
        """The budget in bytes, given the peak without one."""
        if self.num_bytes is not None:
            return self.num_bytes
        assert self.fraction is not None
        return math.floor(self.fraction * unconstrained)

    def __str__(self) -> str:
        if self.num_bytes is not None:
            return spell_bytes(self.num_bytes)
        return f"{100 * (self.fraction or 0):.4g} %"


def parse_budget(value: str | int | float) -> Budget:
    """Parse a budget; a ValueError states what is wrong with it."""
    if isinstance(value, bool):
        raise ValueError(f"a budget must be {FORMS}")
    if isinstance(value, int):
        return _of_bytes(value)
    if isinstance(value, float):
        return _of_fraction(value)
    return _of_text(value)


def _of_bytes(count: int) -> Budget:
    if count < 1:
        raise ValueError("a budget in bytes must be at least 1")
    return Budget(num_bytes=count)


def _of_fraction(fraction: float) -> Budget:
    if not 0.0 <= fraction <= 1.0:  # NaN too
        raise ValueError("a fraction must be between 0 and 1; give bytes as an integer or string")
    return Budget(fraction=fraction)


def _of_text(text: str) -> Budget:
    found = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([a-zA-Z]*|%)\s*", text)
    if found is None:
        raise ValueError(f"a budget must be {FORMS}")
    number, unit = found.group(1).replace("_", ""), found.group(2).lower()
    if unit == "%":
        return _of_fraction(float(number) / 100)
    if unit not in UNITS:
        raise ValueError(
            f"{found.group(2)!r} is not a unit of memory: use KB, MB, GB, KiB, MiB, GiB"
        )
    if unit == "" and "." in number:
        return _of_fraction(float(number))
    if "." in number:
        return _of_bytes(round(float(number) * UNITS[unit]))
    return _of_bytes(int(number) * UNITS[unit])  # exact, where a float would not be


def spell_bytes(count: float) -> str:
    """Format a number of bytes: 1.50 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
