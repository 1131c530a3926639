"""Compiled functions and remembered choices: shared, pinned, searched, never a stale program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from click.testing import Result
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

import perfuse
from perfuse import config, counters
from perfuse.autotune import matmuls
from perfuse.cli import app
from perfuse.decision import Decision, library, unmeasured
from perfuse.ir.matmul import LINEAR, RIVALS
from perfuse.testing import fresh_cache, run_and_get_code
from tests.behaviour.scripts import ROOT, finish, start
from tests.harness.compare import assert_as_good_as_eager
from tests.harness.redis_server import redis_server, server_program

pytestmark = pytest.mark.skipif(not RIVALS[0].is_available(), reason="one library only")
A, B = torch.linspace(-1, 1, 192 * 160).reshape(192, 160), torch.ones(160, 176) / 3
MM = "aten.mm.out"


def mm(a: Tensor, b: Tensor) -> Tensor:
    return torch.sin(a) @ b


def counted(name: str) -> int:
    return counters[f"autotune.{name}"]


@pytest.fixture(autouse=True)
def counted_alone() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Races that a named library wins: the last name of this list."""
    wins = [MM]

    def race(subject: str, choices: Any, *_: Any, **__: Any) -> Decision:
        return Decision(subject, library(wins[-1]), unmeasured(choices), "a test")

    monkeypatch.setattr(matmuls, "race", race)
    return wins


def compiled(fn: Any = mm, *, dynamic: bool | None = None) -> str:
    """The host program of a new compile, after a call that gives eager's results."""
    torch._dynamo.reset()
    got, sources = run_and_get_code(torch.compile(fn, backend="perfuse", dynamic=dynamic), A, B)
    assert_as_good_as_eager(got, fn(A, B), fn(A.double(), B.double()))
    return sources[-1]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.usefixtures("races")
def test_one_put_and_a_get_for_every_later_compile(dynamic: bool) -> None:
    kept: dict[str, str] = {}
    num_get = num_put = 0

    class Kept:
        def __init__(self, key: str, is_autotune: bool = False) -> None:
            assert is_autotune

        def get(self, filename: str) -> Any:
            nonlocal num_get
            num_get += filename in kept
            return json.loads(kept[filename]) if filename in kept else None

        def put(self, filename: str, data: Any) -> None:
            nonlocal num_put
            num_put += 1
            kept[filename] = json.dumps(data)

    on = {"autotune_local_cache": False, "autotune_remote_cache": True, "max_autotune": True}
    on["max_autotune_gemm_backends"] = "ATEN"  # a template would be a second question
    with config.patch(on), patch("perfuse.cache.RedisRemoteCacheBackend", Kept):
        for _ in range(4):
            with fresh_cache():
                torch.compile(mm, backend="perfuse", dynamic=dynamic)(A, B)
            torch._dynamo.reset()
    assert (num_get, num_put) == (3, 1)


def test_one_question_is_asked_once_a_compile(races: list[str]) -> None:
    def layers(a: Tensor, b: Tensor) -> Tensor:
        return mm(a, b) + torch.cos(a) @ b

    with fresh_cache():
        compiled(layers)
    assert counted("matmuls_measured") == 1 and counted("cache_hit") == 0


def test_the_local_cache_can_be_off(races: list[str]) -> None:
    with fresh_cache(), config.patch(autotune_local_cache=False):
        compiled(), compiled()
    assert counted("matmuls_measured") == 2


def test_search_uses_what_is_remembered_and_measures_nothing(races: list[str]) -> None:
    races.append(LINEAR)
    with fresh_cache():
        assert "linear" in compiled()
        counters.clear()
        with config.patch(search_autotune_cache=True):
            assert "linear" in compiled()
        assert counted("matmuls_measured") == 0 and counted("local_hit") == 1


def test_search_takes_defaults_until_something_is_remembered(races: list[str]) -> None:
    races.append(LINEAR)
    search = config.patch(search_autotune_cache=True)
    with fresh_cache():
        with search:
            # Which library call, and whether a template is faster still.
            assert "linear" not in compiled() and counted("undecided") == 2
            assert counted("matmuls_measured") == 0
            torch.compile(mm, backend="perfuse")(A, B)  # which may not be cached
        compiled()
        torch._dynamo.reset(), counters.clear()
        with search:
            torch.compile(mm, backend="perfuse")(A, B)
        assert counted("local_hit") == 1 and counters["graph.cache_hit"] == 0


def test_search_beside_max_autotune_tunes(races: list[str]) -> None:
    with fresh_cache(), config.patch(search_autotune_cache=True, max_autotune=True):
        compiled()
    assert counted("contractions_measured") == 1


def test_a_pinned_choice_is_obeyed_by_a_new_machine(races: list[str], tmp_path: Path) -> None:
    lock = str(tmp_path / "perfuse.lock")
    races.append(LINEAR)
    with fresh_cache():
        perfuse.write_lock(lock, perfuse.explain(mm, A, B))
    races.append(MM)
    counters.clear()
    with fresh_cache(), config.patch(lock_file=lock):
        assert "linear" in compiled()
    assert counted("lock_hit") == 1 and counted("matmuls_measured") == 0


def test_programs_of_other_choices_are_not_served(races: list[str], tmp_path: Path) -> None:
    """The cache of graphs and of captures, with a file that appears and changes."""
    lock = tmp_path / "perfuse.lock"
    compile_ = lambda: torch.compile(mm, backend="perfuse")(A, B)  # noqa: E731
    with fresh_cache():
        races.append(LINEAR)
        perfuse.write_lock(str(lock), perfuse.explain(mm, A, B))
    with fresh_cache(), config.patch({"lock_file": str(lock)}):
        with config.patch({"lock_file": ""}):
            races.append(MM)
            compile_()
        torch._dynamo.reset(), counters.clear()
        compile_()
        assert counted("lock_hit") == 1 and counters["capture.cache_hit"] == 0
        torch._dynamo.reset(), counters.clear()
        compile_()
        assert counters["capture.cache_hit"] == 1 and counted("lock_hit") == 0
        text = lock.read_text()
        lock.write_text(text.replace(f'"name": "{LINEAR}"', f'"name": "{MM}"'))
        assert lock.read_text() != text
        torch._dynamo.reset(), counters.clear()
        compile_()
        assert counted("lock_hit") == 1 and counters["capture.cache_hit"] == 0


def test_a_damaged_lock_file_stops_a_compile(tmp_path: Path) -> None:
    lock = tmp_path / "perfuse.lock"
    lock.write_text("<<<<<<< ours\n{}\n")
    with fresh_cache(), config.patch(lock_file=str(lock)):
        with pytest.raises(Exception, match="merge-conflict markers, the first in line 1"):
            torch.compile(mm, backend="perfuse")(A, B)
        torch._dynamo.reset()
        with config.patch(on_error="eager"), pytest.warns(UserWarning, match="merge-conflict"):
            assert torch.equal(torch.compile(mm, backend="perfuse")(A, B), mm(A, B))


MODEL = f"""
import torch

def mm(a, b):
    return torch.sin(a) @ b

def example_args():
    return torch.ones({A.shape}), torch.ones({B.shape})
""".replace("torch.Size", "")


def perfuse_lock(*words: str) -> Result:
    # A console takes its width when it is made: of no terminal it is 80 columns, and lines wrap.
    with patch("perfuse.cli_lock.console", Console(width=300)):
        return CliRunner().invoke(app, ["lock", *words])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    with fresh_cache():
        missing = perfuse_lock("check")
        assert missing.exit_code == 1 and "there is no lock file" in str(missing.exception)
        made = perfuse_lock("write", "--function", "model.py:mm")
        assert made.exit_code == 0 and "perfuse.lock, 1 choices" in made.output
        fine = perfuse_lock("check")
        assert fine.exit_code == 0 and "1 of 1 choices fit" in fine.output
        assert "matmul 192x160x176" in perfuse_lock("show").output
        elsewhere = perfuse_lock("check", "--target", "cuda:90")
        assert elsewhere.exit_code == 1 and "another kind of device" in elsewhere.output
        text = (tmp_path / "perfuse.lock").read_text()
        remembered = perfuse_lock("write", "--replace")
        assert remembered.exit_code == 0 and (tmp_path / "perfuse.lock").read_text() == text


def test_the_command_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perfuse.cli", "lock", "check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1 and "there is no lock file" in done.stdout


COMPILE = (
    MODEL
    + """
import json, perfuse
torch.compile(mm, backend="perfuse")(*example_args())
print(json.dumps(perfuse.counters.snapshot()))
"""
)


@pytest.mark.skipif(server_program() is None, reason="no Redis server")
def test_processes_share_choices_through_the_environment(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        shared = {"PERFUSE_AUTOTUNE_REMOTE_CACHE": "1", "PERFUSE_REDIS_URL": server.url}
        with patch.dict(os.environ, shared):
            machines = [finish(start(COMPILE, tmp_path / name)) for name in ("a", "b")]
        assert server.send("DBSIZE") == 1
    names = ("autotune.matmuls_measured", "autotune.remote_hit")
    assert [[m.get(name, 0) for name in names] for m in machines] == [[1, 0], [0, 1]]
