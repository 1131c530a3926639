"""Building for AMD: the command of hipcc and clang, limits, and what is kept. No ROCm is needed."""

from __future__ import annotations

import shlex
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from perfuse.build import UNIT_LIBRARY
from perfuse.build.ck import CONFIG_TEXT, build_ck, why_no_ck
from perfuse.codegen.triton.sources import HostUnit
from perfuse.context import Context
from perfuse.errors import CkUnavailable, CompilerFailed
from tests.ck.stand_in import context_with

# hipcc as a program that writes down how it is called, and has g++ do the work.
FAKE = """#!/bin/sh
if [ "$1" = --version ]; then echo "HIP version: 7.0, NAME"; exit; fi
echo "$@" >> COMMANDS
keep=""
for word in "$@"; do
  case "$word" in --offload-arch*|--rocm-path*) ;; hip|-x) ;; *) keep="$keep $word" ;; esac
done
exec g++ -O0 -mf16c $keep
"""


def on_gpu(tmp_path: Path, name: str = "hipcc", **settings: Any) -> Context:
    """A context for gfx942 without interpretation, whose compiler is the fake one."""
    compiler = tmp_path / name
    text = FAKE.replace("COMMANDS", str(tmp_path / "commands")).replace("NAME", str(tmp_path))
    compiler.write_text(text)
    compiler.chmod(stat.S_IRWXU)
    chosen = {"gpu.interpret": False, "rocm.compiler": str(compiler), **settings}
    made = context_with(**chosen)
    gpu = context_with().target.gpu
    assert gpu is not None
    return replace(
        made, target=replace(made.target, kind="hip", gpu=gpu), device=torch.device("cuda:0")
    )


# The compiler is what is tested, not what it compiles.
UNIT = HostUnit(
    "unit0", '#include "ck/config.h"\nextern "C" int answer() {\n  return 42;\n}\n', "ck"
)


@pytest.mark.parametrize(("name", "flag"), [("hipcc", ""), ("clang++", "-x hip")])
def test_the_command(tmp_path: Path, name: str, flag: str) -> None:
    context = on_gpu(tmp_path, name, **{"rocm.arch": "gfx90a", "rocm.home": "/nowhere"})
    assert why_no_ck(context) == ""
    entry = build_ck(UNIT, context)
    assert UNIT_LIBRARY in entry.contents and "ck.cpp" in entry.contents
    assert build_ck(UNIT, context) == entry
    (command,) = (tmp_path / "commands").read_text().splitlines()
    assert "-shared" in command and "--offload-arch=gfx90a" in command and flag in command
    assert ("-x hip" in command) == bool(flag)
    assert "--rocm-path" not in command  # there is no such folder


def test_the_folder_of_rocm_is_passed(tmp_path: Path) -> None:
    build_ck(UNIT, on_gpu(tmp_path, **{"rocm.home": str(tmp_path)}))
    assert f"--rocm-path={tmp_path}" in (tmp_path / "commands").read_text()


def test_another_gpu_is_another_library(tmp_path: Path) -> None:
    keys = {
        build_ck(UNIT, on_gpu(tmp_path, **{"rocm.arch": arch})).key
        for arch in ("", "gfx90a", "gfx942")
    }
    assert len(keys) == 2  # gfx942 is the target's


def test_a_failure_is_kept() -> None:
    unit = HostUnit("unit0", '#include "ck/ck.hpp"\nint x = nothing;\n', "ck")
    context = context_with()
    for _ in range(2):
        with pytest.raises(CompilerFailed, match="nothing") as raised:
            build_ck(unit, context)
        (shown,) = [line for line in str(raised.value).splitlines() if "command: " in line]
        assert tuple(shlex.split(shown)[1:]) == raised.value.command  # a shell takes it as it is
    assert context.counters.snapshot()["build.compiler_runs"] == 1


def test_limits_of_a_compile(tmp_path: Path) -> None:
    """Too little memory or time is an error of that compile, and is not remembered."""
    unit = HostUnit("unit0", f"{UNIT.text}// limited\n", "ck")
    with pytest.raises(CompilerFailed):
        build_ck(unit, context_with(**{"rocm.compile_bytes": 16 << 20}))
    entry = build_ck(unit, context_with())
    assert UNIT_LIBRARY in entry.contents
    slow = on_gpu(tmp_path, **{"build.timeout_s": 1})
    (tmp_path / "hipcc").write_text('#!/bin/sh\n[ "$1" = --version ] || exec sleep 30\n')
    with pytest.raises(CompilerFailed, match="timed out after 1 s"):
        build_ck(unit, slow)


def test_nothing_is_built_without_ck(tmp_path: Path) -> None:
    nowhere = {"rocm.ck_dir": str(tmp_path)}
    with pytest.raises(CkUnavailable, match="is not installed"):
        build_ck(UNIT, context_with(**nowhere))
    assert "CK_USE_XDL" in CONFIG_TEXT


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    context = on_gpu(tmp_path, **{"rocm.compiler": "/nowhere/hipcc"})
    assert why_no_ck(context) == ("no compiler for Composable Kernel (looked for /nowhere/hipcc)")
    with pytest.raises(CkUnavailable, match="no compiler") as raised:
        build_ck(UNIT, context)
    assert "rocm.compiler" in (raised.value.hint or "")
