"""Logs: quiet by default, channels on request, sources where PyTorch's switches lead people."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from perfuse import logs
from perfuse.counters import counters
from perfuse.errors import ConfigWarning
from perfuse.torch_compat import records

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import torch
weight = torch.randn(8, 8, requires_grad=True)
def function(x):
    return torch.linalg.svdvals(torch.relu(x @ weight).softmax(0)).sum()
torch.compile(function, backend="perfuse")(torch.ones(4, 8)).backward()
"""


def run(folder: Path, **variables: str) -> str:
    """The stderr of a program under these variables."""
    own = {"PERFUSE_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(ROOT), **variables}
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("TORCH", "PERFUSE"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder, env={**kept, **own}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_library_is_quiet(tmp_path: Path) -> None:
    assert run(tmp_path) == ""


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder and the logs of two processes, the second of which has a full cache."""
    folder = tmp_path_factory.mktemp("logged")
    asked = {"TORCH_LOGS": "output_code", "TORCH_COMPILE_DEBUG": "1"}
    channels = "capture, fusion,fallback,compile,+cache,+code"
    return folder, [run(folder, PERFUSE_LOG=channels, **asked) for _ in range(2)]


def test_channels_on_request(logged: tuple[Path, list[str]]) -> None:
    folder, (first, _) = logged
    assert "[perfuse.capture] graph of " in first and "traced and compiled" in first
    assert "kernels, " in first and "refused" in first
    assert "[perfuse.fallback] aten._linalg_svd.default: no lowering for this op (" in first
    assert "[perfuse.cache] graph not found: graph-" in first
    assert "[perfuse.cache] build.cache_miss +1" in first, "+ shows what is counted"
    assert "fuse " in first and "place " in first and " ms" in first
    second = run(folder, PERFUSE_LOG="capture,cache")
    assert "loaded from the cache" in second or "graph loaded: graph-" in second
    assert "build.cache" not in second and "[perfuse.fusion]" not in second


def test_a_program_with_handlers_of_its_own_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    handler, stream = logs._Stderr(), io.StringIO()
    handler.setStream(stream)
    record = logging.LogRecord("perfuse.fusion", logging.INFO, "", 0, "3 kernels", (), None)
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    handler.handle(record)
    assert stream.getvalue() == ""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    handler.handle(record)
    assert stream.getvalue() == "3 kernels\n"


def test_sources_are_where_people_look(logged: tuple[Path, list[str]]) -> None:
    """In both logs and in PyTorch's debug folder, and a cache does not silence it."""
    folder, texts = logged
    for text in texts:
        for kind in ("forward", "backward"):
            assert f"[__output_code] Output code of the {kind} graph" in text
            assert f"[perfuse.code] Output code of the {kind} graph" in text
        assert "static void kernel0(" in text and "def call(args):" in text
    runs = sorted(folder.glob("torch_compile_debug/run_*/perfuse"))
    assert len(runs) == 2
    for home in runs:
        assert sorted(f.name for f in home.iterdir()) == ["graph_0_forward", "graph_1_backward"]
        files = {file.name: file.read_text() for file in (home / "graph_0_forward").iterdir()}
        assert {"graph.txt", "program.txt", "plan.txt", "host.py", "kernels_0.cpp"} == set(files)
        assert "aten.mm" in files["graph.txt"] and "def call(args):" in files["host.py"]


def test_other_logs_of_pytorch_print_no_sources() -> None:
    log = records.output_code_log()
    assert log is not None and not records.is_output_code_wanted()
    torch._logging.set_logs(output_code=True)
    try:
        assert records.is_output_code_wanted()
    finally:
        torch._logging.set_logs()
    assert not records.is_output_code_wanted()


def test_levels_and_unknown_channels() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert logs.parse("") == {} and logs.parse("fusion") == {"fusion": logging.INFO}
        assert logs.parse("all,+cache,-tuning") == {
            **dict.fromkeys(logs.CHANNELS, logging.INFO),
            "cache": logging.DEBUG,
            "tuning": logging.ERROR,
        }
    with pytest.warns(ConfigWarning, match="unknown channel 'fusoin'; did you mean 'fusion'"):
        assert logs.parse("fusoin,cache") == {"cache": logging.INFO}


def test_what_is_counted_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="perfuse.cache"):
        counters.inc("cache.damaged")
        counters.inc("schedule.kernels")
    assert [record.message for record in caplog.records] == ["cache.damaged +1"]
