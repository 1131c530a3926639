"""Every fault is caught by a program that CI runs: what the nets let through once, they hold now.

A row names a fault and the program of the sample in `tests/random_programs` that must fail with it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from perfuse import config
from tests.faults import faults
from tests.random_programs import test_random_programs as sample
from tests.random_programs.check import check_program
from tests.random_programs.corpus import CORPUS
from tests.random_programs.kinds import program_of
from tests.random_programs.mutate import original
from tests.random_programs.program import Program

# The fault, and a seed of the training kind or the name of a program that once failed.
ROWS: tuple[tuple[faults.Fault, int | str], ...] = (
    (faults.offset_forgotten_in_a_kernel, 22),
    (faults.offset_forgotten_by_the_host, "parts_of_a_temporary"),
    (faults.stride_swapped, 5),
    (faults.const_too_many, "sum_with_flip"),
    (faults.kernel_not_called, "overwritten_between"),
    (faults.result_not_written, "silu_of_rows"),
    (faults.last_item_forgotten, "regrouped_norm"),
    (faults.sum_starts_at_one, 28),
    (faults.life_ends_too_early, 17),
    (faults.written_over_while_read, "product_with_its_flip"),
)
CACHE_ROWS: tuple[tuple[faults.Fault, str], ...] = (
    (faults.key_lacks_a_value, "step_with_scalar"),
    (faults.guard_dropped, "step_with_scalar"),
)
CAUGHT = ("wrong", "error")


def program_named(name: int | str) -> Program:
    if isinstance(name, str):
        return original(Random(0), name, seed=0)
    return program_of("training", name)


@pytest.mark.parametrize(("fault", "name"), ROWS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_fault_of_a_generator_is_caught(
    fault: faults.Fault, name: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert name in CORPUS if isinstance(name, str) else name < sample.NUM_TRAINING_SEEDS
    fault(monkeypatch)
    with config.patch({"cache.enabled": False}):
        verdict = check_program(program_named(name), "perfuse")
    assert verdict.status in CAUGHT, verdict


@pytest.mark.parametrize(("fault", "name"), CACHE_ROWS, ids=lambda x: getattr(x, "__name__", x))
def test_a_fault_of_the_cache_is_caught(
    fault: faults.Fault, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Calls with other numbers, from an empty cache and then from a full one."""
    program = program_named(name)
    sizes = tuple((*program.sizes[0][:3], call) for call in range(3))
    program = replace(program, sizes=sizes, is_dynamic=None)
    with config.patch({"cache.dir": str(tmp_path)}):
        fault(monkeypatch)
        verdicts = [check_program(program, "perfuse") for _ in range(2)]
    assert any(v.status in CAUGHT for v in verdicts), verdicts
