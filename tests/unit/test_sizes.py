"""Amounts of memory: every way to write one, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from perfuse import config
from perfuse.errors import ConfigError
from perfuse.sizes import Budget, parse_budget, spell_bytes

WRITTEN = [
    ("14GiB", Budget(14 << 30)),
    ("14 gib", Budget(14 << 30)),
    ("300MB", Budget(300_000_000)),
    ("1.5KiB", Budget(1536)),
    ("1_000", Budget(1000)),
    (4096, Budget(4096)),
    (1, Budget(1)),
    (1.0, Budget(fraction=1.0)),
    (0.0, Budget(fraction=0.0)),
    ("0.25", Budget(fraction=0.25)),
    ("50%", Budget(fraction=0.5)),
]


@pytest.mark.parametrize(("value", "budget"), WRITTEN, ids=str)
def test_written_budgets(value: Any, budget: Budget) -> None:
    assert parse_budget(value) == budget
    with config.patch(memory_budget=value) as settings:
        assert settings.memory_budget == value
        assert f"memory_budget={value!r}" in settings.cache_key()


REFUSED = [
    ("14 GiBs", "not a unit of memory"),
    ("much", "bytes"),
    ("-3MB", "bytes"),
    ("", "bytes"),
    (0, "at least 1"),
    ("0MB", "at least 1"),
    (1.5, "between 0 and 1"),
    (-0.1, "between 0 and 1"),
    (float("nan"), "between 0 and 1"),
    ("150%", "between 0 and 1"),
    (True, "cannot be True"),
    ([1], "cannot be"),
    (-5, "cannot be -5"),
]


@pytest.mark.parametrize(("value", "words"), REFUSED, ids=str)
def test_refused_budgets(value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught, config.patch(memory_budget=value):
        pass
    assert "memory_budget" in str(caught.value)


def test_from_the_environment() -> None:
    read = config.from_environment
    assert read({"PERFUSE_MEMORY_BUDGET": "14GiB"}).memory_budget == "14GiB"
    assert read({"PERFUSE_MEMORY_BUDGET": "0.5"}).memory_budget == "0.5"
    assert read({"PERFUSE_MEMORY_BUDGET": "4096"}).memory_budget == 4096
    assert read({"PERFUSE_MEMORY_BUDGET": "none"}).memory_budget is None
    with pytest.raises(ConfigError, match=r"\$PERFUSE_MEMORY_BUDGET"):
        read({"PERFUSE_MEMORY_BUDGET": "lots"})


def test_limits() -> None:
    assert Budget(100).limit(1000) == 100
    assert Budget(fraction=0.5).limit(1001) == 500
    assert str(Budget(3 << 20)) == "3.00 MiB" and str(Budget(fraction=0.5)) == "50 %"
    assert [spell_bytes(n) for n in (12, 1536, 3 << 40)] == ["12 B", "1.50 KiB", "3.00 TiB"]
