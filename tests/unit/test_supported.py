"""Which versions of PyTorch are supported, and the warning about the others."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from perfuse import supported
from perfuse.errors import VersionWarning

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.11.0", True),
        ("2.13.0+cpu", True),
        ("2.15.1a0+git1234", True),
        ("2.10.1", False),
        ("2.9.0", False),
        ("2.16.0.dev20261101", False),
        ("3.0.0", False),
        ("1.13.1", False),
        ("unknown", False),
    ],
)
def test_range(version: str, expected: bool) -> None:
    assert supported.is_supported(version) == expected


def test_the_range_is_that_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (oldest, newest), after = (supported.OLDEST, supported.NEWEST), supported.NEWEST[1] + 1
    assert f'"torch>={oldest[0]}.{oldest[1]},<{newest[0]}.{after}"' in text


def test_a_warning_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supported, "torch_version", lambda: "2.42.0")
    with pytest.warns(VersionWarning, match=r"PyTorch 2\.11 to 2\.15, but this is 2\.42\.0"):
        supported.warn_unsupported_torch()
    monkeypatch.setattr(supported, "torch_version", lambda: "2.12.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        supported.warn_unsupported_torch()


IMPORT = """
import sys, types
{torch}
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import perfuse
    import perfuse.errors
print([str(w.message) for w in caught])
"""


def imported(torch: str) -> str:
    command = [sys.executable, "-c", IMPORT.format(torch=torch)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_warns_once() -> None:
    fake = 'sys.modules["torch"] = types.ModuleType("torch"); sys.modules["torch"].__version__ ='
    assert imported(f'{fake} "2.16.0"').count("supports PyTorch") == 1
    assert imported("") == "[]", "the installed one is supported"
