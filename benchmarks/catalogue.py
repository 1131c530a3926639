"""Every case by name."""

from __future__ import annotations

import torch

from benchmarks.cases import Case, Problem, forward_problem
from benchmarks.kernels import kernels
from benchmarks.models import models


def tiny() -> Problem:
    """So little work that what is left is the cost of a call."""
    return forward_problem(lambda x: x + 1, [torch.ones(8)])


def catalogue() -> dict[str, Case]:
    overhead = Case("call overhead", "overhead", "x + 1 on 8 floats", tiny)
    return {case.name: case for case in (*kernels(), *models(), overhead)}
