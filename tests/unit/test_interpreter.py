"""Versions of Python that are refused."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from perfuse.capture.backend import check_interpreter
from perfuse.errors import UnsupportedPython

ROOT = Path(__file__).parent.parent.parent


def test_python_3_13_0_is_refused() -> None:
    with pytest.raises(UnsupportedPython, match=r"3\.13\.0(.|\n)*later Python 3\.13"):
        check_interpreter((3, 13, 0, "final", 0))


@pytest.mark.parametrize("version", [(3, 11, 7), (3, 12, 0), (3, 13, 1), (3, 14, 0)])
def test_others_are_taken(version: tuple[int, int, int]) -> None:
    check_interpreter(version)


def test_the_metadata_refuses_it_too() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "!=3.13.0" in project["requires-python"].split(",")
