"""Programs whose kernels every compiler builds: once broken ones, every kind of kernel, random."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.behaviour.test_found_bugs import ROWS as FOUND_BUGS
from tests.behaviour.test_opdb_bugs import ROWS as OPDB_BUGS
from tests.harness.backend import default_backend
from tests.harness.compare import complaints
from tests.random_programs.check import check_program
from tests.random_programs.kinds import program_of
from tests.unit.codegen.test_isas import compiled, everything, inputs, observed

Check = Callable[[], str]  # what is wrong with the results, or nothing


def kernels_of_all_kinds() -> str:
    torch._dynamo.reset()
    got = observed(compiled(everything), inputs())
    eager, exact = observed(everything, inputs()), observed(everything, inputs(torch.float64))
    return "; ".join(complaints(got, eager, exact))


def random_program(seed: int) -> Check:
    def check() -> str:
        verdict = check_program(program_of("plain", seed, "drawn"), default_backend())
        return "" if verdict.status in ("pass", "skip") else verdict.message

    return check


def behaviour(row: object) -> Check:
    def check() -> str:
        try:
            row.check()  # type: ignore[attr-defined]
        except AssertionError as error:
            return str(error) or "wrong"
        return ""

    return check


def corpus(num_random: int) -> dict[str, Check]:
    """Each program by name."""
    found: dict[str, Check] = {"kernels of all kinds": kernels_of_all_kinds}
    found |= {f"found {row}": behaviour(row) for row in (*FOUND_BUGS, *OPDB_BUGS)}
    return found | {f"random {seed}": random_program(seed) for seed in range(num_random)}
