"""Questions, decisions and contexts for tests of what remembers them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from perfuse.config import Settings
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.decision import Choice, Decision, Question, Rival, library
from perfuse.target import host_target

FIRST, SECOND = library("aten.mm.out"), library("mkldnn._linear_pointwise.default")
TILED = Choice("tile", "rows 4x64", (("rows", 4), ("columns", 64), ("streams", True)))
VERSIONS = (("onednn", "3.1"), ("torch", "2.13"))


def question(problem: str = "a problem", **changes: Any) -> Question:
    asked = Question("matmul", problem, (FIRST, SECOND, TILED), "a device", VERSIONS, "rules")
    return replace(asked, **changes)


def decision(asked: Question, chosen: Choice = SECOND) -> Decision:
    rivals = tuple(Rival(choice, 1.0, 1.5, 0.25) for choice in asked.candidates)
    return Decision("matmul 64x64x64", chosen, rivals, "a test", asked)


def context(folder: Path, **overrides: Any) -> Context:
    """A context with a cache in this folder and counters of its own."""
    settings = Settings().with_overrides({"cache.dir": str(folder), **overrides})
    return Context(host_target(settings), settings, Counters())
