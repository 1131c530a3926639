"""The launcher against a driver of C++ functions: what arrives at a kernel, and what is filled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from perfuse.codegen.host.source import HostSource
from perfuse.codegen.host.tables import GpuTables
from perfuse.errors import ForkedGpuCall
from perfuse.runtime import bind_gpu

STUB = Path(__file__).parent / "stub_driver.cpp"
COMPILER = shutil.which("g++") or shutil.which("clang++")

SCRIPT = """
import ctypes, json, sys
sys.modules["triton"] = None  # launching must do without it
import torch
from perfuse import config
from perfuse.build import LIBRARY
from perfuse.build.bundle import Bundle, CodeObject
from perfuse.build.triton import build_launcher
from perfuse.codegen.host.source import HostSource
from perfuse.codegen.host.tables import FillRow, GpuTables, LaunchRow, MappedLaunchRow
from perfuse.context import Context
from perfuse.gpu import Platform
from perfuse.runtime.bind_gpu import launcher_of
from perfuse.runtime.frame import GpuFrame
from perfuse.torch_compat.tensors import element_bytes

stub = ctypes.CDLL("libcuda.so.1")
context = Context.default(config.snapshot().with_overrides({"cpu.compiler": sys.argv[1]}))
code = CodeObject("k", "add", 128, 65536, 0, 32, 0, b"CODE")
library = build_launcher(context)
library = library and library.read_bytes(LIBRARY)
launcher = launcher_of(Bundle(Platform.CUDA, "sm_90", (code,)), context, library)
patterns = [(torch.uint8, 7), (torch.float16, 1.5), (torch.float32, float("-inf")),
            (torch.int64, -1), (torch.float64, float("-inf"))]
fills = [FillRow(3 + k, element_bytes(v, d).hex(), 5) for k, (d, v) in enumerate(patterns)]
launches = [LaunchRow("k", (1, 2), (1, 2), (4, 1, 1)), LaunchRow("k", (1, 2), (1, 2), (-1, 1, 1))]
tables = GpuTables("cpu", (*fills, *launches), ((0, 5), (5, 2)), (), ())
host = HostSource("", 8, 3, 0, (), (), (), 0, (), (), tables)
frame = GpuFrame(host, [])
launcher.prepare(frame)
x, y = torch.arange(32, dtype=torch.float32), torch.zeros(8)
filled = [torch.zeros(6, dtype=d) for d, _ in patterns]
for place, tensor in enumerate([x, y, *filled], 1):
    frame.pointers[place] = tensor.data_ptr()
frame.sizes[1], frame.sizes[2] = (5 << 40) + 100, 3  # an i32 reads the low half
frame.grids[3 * 6] = 6
stub.forget_context()  # as in a thread that is new to the driver
codes = [launcher.launch(segment, 0) for segment in frame.segments]
result = {"codes": codes, "y": y.tolist(), "filled": [str(f.tolist()) for f in filled]}
frame.grids[3 * 6] = 0
before = stub.launches()
launcher.launch(frame.segments[1], 0)
result["launches_of_an_empty_grid"] = stub.launches() - before
try:
    launcher.failed(launcher.launch(frame.segments[1], 13))
except RuntimeError as error:
    result["error"] = str(error)
try:
    other = CodeObject("k", "sub", 128, 0, 0, 1, 0, b"CODE")
    launcher_of(Bundle(Platform.CUDA, "sm_90", (other,)), context, library)
except Exception as error:
    result["missing"] = str(error)
try:
    large = CodeObject("k", "add", 1024, 262272, 0, 56, 0, b"CODE")
    launcher_of(Bundle(Platform.CUDA, "sm_90", (large,)), context, library)
except Exception as error:
    result["large"] = str(error)
shown = CodeObject("m", "show", 128, 65536, 0, 32, 0, b"CODE")
launcher = launcher_of(Bundle(Platform.CUDA, "sm_90", (shown,)), context, library)
maps = ((2, 8, 2, 30, 20, 80, 16, 64),)
tables = GpuTables("cpu", (MappedLaunchRow("m", (1,), (), (1, 1, 1), maps),), ((0, 1),), (), ())
frame = GpuFrame(HostSource("", 3, 1, 0, (), (), (), 0, (), (), tables), [])
launcher.prepare(frame)
y, matrix, other = torch.zeros(16), torch.arange(9, dtype=torch.int32), torch.ones(9).int()
frame.pointers[1] = y.data_ptr()
result["maps"] = []
for tensor in (matrix, matrix, other):
    frame.pointers[2] = tensor.data_ptr()
    result["codes"].append(launcher.launch(frame.segments[0], 0))
    result["maps"].append(y.int().tolist()[:13])
print(json.dumps(result))
"""


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("compiler", ["native", "python"])
def test_what_arrives_at_a_kernel(compiler: str, tmp_path: Path) -> None:
    assert COMPILER is not None
    library = tmp_path / "libcuda.so.1"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", str(STUB), "-o", str(library)], check=True)
    chosen = COMPILER if compiler == "native" else "no-such-compiler"
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PERFUSE_CACHE_DIR": str(tmp_path / "c")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, chosen], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["codes"] == [0, 0, 0, 0, 0]
    # The third word of the matrix, sizes, strides and block, the kind, and how often it was made.
    facts = [20, 30, 80, 64, 16, 1232]
    passed = [30, 20, 40, 1, 0]
    assert got["maps"] == [[word, *facts, n, *passed] for word, n in ((2, 1), (2, 1), (1, 2))]
    assert got["y"] == [100.0, 103.0, 106.0, 109.0, 112.0, 115.0, 0.0, 0.0]
    assert got["filled"] == [
        "[7, 7, 7, 7, 7, 0]",
        "[1.5, 1.5, 1.5, 1.5, 1.5, 0.0]",
        "[-inf, -inf, -inf, -inf, -inf, 0.0]",
        "[-1, -1, -1, -1, -1, 0]",
        "[-inf, -inf, -inf, -inf, -inf, 0.0]",
    ]
    assert got["launches_of_an_empty_grid"] == 1
    assert "illegal memory access" in got["error"]
    assert "cannot load the kernel k" in got["missing"]
    assert "262272 bytes of shared memory and 1024 threads per block" in got["large"]


def test_a_forked_process_is_told_to_be_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = GpuTables("cuda:0", (), (), (), ())
    host = HostSource("", 1, 1, 0, (), (), (), 0, (), (), tables)
    monkeypatch.setattr(bind_gpu, "is_forked", lambda: True)
    take_frame = bind_gpu._frames(host, SimpleNamespace(keeps_memory=False))  # type: ignore[arg-type]
    with pytest.raises(ForkedGpuCall, match=r'what to do: .*"spawn"'):
        take_frame(0)
