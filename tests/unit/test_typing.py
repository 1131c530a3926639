"""Types that users see: `perfuse.compile` keeps signatures, an editable install shows them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# With warn_unused_ignores (part of --strict), an ignore that is not needed is an error too: each
# one here says that the checker refuses the line.
PROGRAM = """
from typing import assert_type

import torch
from torch import Tensor, nn

import perfuse


def plain(x: Tensor, scale: float = 1.0) -> tuple[Tensor, int]:
    return x * scale, 1


class Net(nn.Module):
    def extra(self) -> int:
        return 1


fast = perfuse.compile(plain, mode="max-autotune", options={"verify": True})
assert_type(fast(torch.ones(1), scale=2.0), tuple[Tensor, int])
fast("text")  # type: ignore[arg-type]
fast(torch.ones(1), size=2.0)  # type: ignore[call-arg]

net = perfuse.compile(Net())
assert_type(net, Net)
assert_type(net.extra(), int)


@perfuse.compile
def decorated(x: Tensor) -> Tensor:
    return x


@perfuse.compile(fullgraph=True, dynamic=False)
def configured(x: Tensor, n: int) -> str:
    return ""


assert_type(decorated(torch.ones(1)), Tensor)
assert_type(configured(torch.ones(1), 2), str)
configured(torch.ones(1), "2")  # type: ignore[arg-type]
assert_type(perfuse.compile(mode="default")(Net()), Net)
assert_type(perfuse.memory_efficient_fusion(Net(), memory_budget="1GiB"), Net)
assert_type(perfuse.memory_efficient_fusion(plain)(torch.ones(1)), tuple[Tensor, int])
perfuse.compile(1)  # type: ignore[call-overload]
perfuse.compile(plain, mod="default")  # type: ignore[call-overload]
assert_type(perfuse.explain(plain, torch.ones(1)).stage("plan"), str)
"""


def test_signatures_are_kept(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", str(tmp_path / "program.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_editable_install_is_a_path(tmp_path: Path) -> None:
    """mypy and pyright follow paths in .pth files, and no import hooks."""
    pytest.importorskip("setuptools")
    project, wheels = tmp_path / "project", tmp_path / "wheels"
    shutil.copytree(ROOT / "perfuse", project / "perfuse")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project / name)
    wheels.mkdir()
    build = f"from setuptools import build_meta; build_meta.build_editable({str(wheels)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=project, check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        (path,) = (name for name in names if name.endswith(".pth"))
        assert Path(files.read(path).decode().strip()) == project.resolve()
        assert not [name for name in names if "finder" in name]
    assert (project / "perfuse" / "py.typed").exists()
