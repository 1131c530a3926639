"""Host calls at run time: through the C++ launcher, its Python version, and artefacts."""

from __future__ import annotations

import ctypes
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

import perfuse
from perfuse import config
from perfuse.build import LIBRARY
from perfuse.build.loader import load_library
from perfuse.build.triton import build_launcher
from perfuse.codegen.ck.source import size_table
from perfuse.codegen.host.tables import GpuTables, HostCallRow
from perfuse.runtime.host_library import CallArguments
from perfuse.runtime.python_launcher import PythonLibrary
from perfuse.runtime.records import document_of, tables_of
from tests.ck.stand_in import TUNED, context_with, library_of, problem
from tests.ck.test_source import BIAS, F16, assert_close


def in_cpp() -> Any:
    entry = build_launcher(context_with())
    assert entry is not None
    return load_library(entry.read_bytes(LIBRARY)).pf_launch


def in_python() -> Any:
    return object.__new__(PythonLibrary).pf_launch  # without a driver


@pytest.mark.parametrize("launcher", [in_cpp, in_python])
def test_launchers_make_host_calls(launcher: Any) -> None:
    """A record with no threads: addresses from the frame's table, with offsets, and factors."""
    a, b, bias = torch.randn(64, 64).half(), torch.randn(64, 64).half().t(), torch.randn(64).half()
    out = torch.empty(32, 64).half()
    pointers = array("q", [0, a.data_ptr(), b.data_ptr(), bias.data_ptr(), out.data_ptr()])
    row = HostCallRow(
        "unit0", (1, 2, 3, 4), (32 * 64 * 2, 0, 0, 0), size_table(problem(32, 64, 64)), (2.0, 0.5)
    )
    library = library_of(F16, BIAS)
    made = CallArguments(pointers.buffer_info()[0], row, None)
    record = array("Q", made.words(library.address))
    segment = array("Q", [1, record.buffer_info()[0], 0])
    launch = launcher()
    if isinstance(launch, ctypes._CFuncPtr):
        launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    assert launch(segment.buffer_info()[0], 0) == 0
    assert_close(out, 2 * (a[32:].double() @ b.double()) + 0.5 * bias.double())


def test_rows_are_stored() -> None:
    row = HostCallRow("unit0", (1, 2), (0, 8), (3, 4, 5), (1.0, 0.5))
    tables = GpuTables("cuda:0", (row,), ((0, 1),), (), ())
    assert tables_of(document_of(tables)) == tables


def test_an_artefact_holds_its_libraries(tmp_path: Path) -> None:
    args = (torch.randn(64, 128).half(), torch.randn(96, 128).half().t())
    one = {**TUNED, "rocm.n_max_profiling_configs": 1, "max_autotune_gemm_backends": "CK"}
    with config.patch(one):
        perfuse.aot_compile(lambda a, b: a @ b, args, path=tmp_path / "made")
        loaded = perfuse.load(tmp_path / "made")
    assert list((tmp_path / "made").glob("*-unit0.so"))
    assert_close(loaded(*args), args[0].double() @ args[1].double())
