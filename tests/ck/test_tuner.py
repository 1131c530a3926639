"""Composable Kernel through the whole tuner on CPU tensors: choosing, caching and fallback."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import perfuse
from perfuse import config
from perfuse.autotune import templates
from perfuse.autotune.search import Rules
from perfuse.candidates import ck
from perfuse.counters import counters
from perfuse.decision import Decision
from perfuse.errors import CkWarning
from tests.ck.stand_in import FOLDER, TUNED
from tests.harness.compare import assert_as_good_as_eager

BACKENDS = ("CK", "ATen,Triton,CK")
TWO = {**TUNED, "rocm.n_max_profiling_configs": 2}


@pytest.fixture(autouse=True)
def short_races(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One round: what wins does not matter here."""
    monkeypatch.setattr(templates, "RULES", Rules(0.98, budget_s=0.0, fewest_rounds=1))
    ck.report_once.cache_clear()
    torch._dynamo.reset()
    yield


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def compiled(fn: Callable[..., Any], *args: Any, **settings: Any) -> tuple[Any, list[Decision]]:
    """The result of a function compiled with these settings, and the decisions behind it."""
    with config.patch(settings):
        result = torch.compile(fn, backend="perfuse", dynamic=False)(*args)
        graphs = perfuse.explain(fn, *args).graphs
    return result, [decision for graph in graphs for decision in graph.decisions]


def assert_right(fn: Callable[..., Any], args: tuple[torch.Tensor, ...], got: Any) -> None:
    """As exact as eager: of millions of sums some are near 0, so no fixed limit would do."""
    assert_as_good_as_eager(got, fn(*args), fn(*(arg.double() for arg in args)))


def rivals(decision: Decision) -> list[str]:
    return [rival.choice.source for rival in decision.rivals]


def counted(name: str) -> int:
    return counters.snapshot().get(name, 0)


# -- the three products of the seed --------------------------------------------------------


@pytest.mark.parametrize(
    ("backends", "rows"),
    [
        pytest.param("CK", 2240, marks=pytest.mark.slow),  # ATen takes seconds for it on AVX2
        pytest.param("ATen,Triton,CK", 2240, marks=pytest.mark.slow),
        ("CK", 64),
        ("ATen,Triton,CK", 64),
    ],
)
def test_precompile(backends: str, rows: int) -> None:
    """The product of the seed; with fewer rows also in a worker."""
    a, b = torch.randn(rows, 256).bfloat16(), torch.randn(256, 2048).bfloat16()
    chosen = {**TWO, "max_autotune_gemm_backends": backends, "autotune_in_subproc": rows < 100}
    got, (decision,) = compiled(mm, a, b, **chosen)
    assert_right(mm, (a, b), got)
    assert rivals(decision) == ["library", "ck", "ck"]
    assert all(r.median_us is not None for r in decision.rivals[1:])
    if backends == "CK":
        assert decision.chosen.source == "ck"


def test_precompile_preselected() -> None:
    a, b = torch.randn(2240, 256).half(), torch.randn(2048, 256).half().t()
    chosen = {**TUNED, "max_autotune_gemm_backends": "CK", "rocm.use_preselected_instances": True}
    got, (decision,) = compiled(mm, a, b, **chosen)
    assert_right(mm, (a, b), got)
    assert rivals(decision) == ["library", *["ck"] * 15]
    assert not any(rival.refusal for rival in decision.rivals[1:])
    assert decision.chosen.source == "ck"


@pytest.mark.parametrize("backends", BACKENDS)
def test_precompile_non_contiguous(backends: str) -> None:
    """As in the seed, a column-major A with an odd number of rows, in smaller sizes."""
    a = torch.randn(257 * 304).half().as_strided((257, 128), (1, 304))
    b = torch.randn(128, 96).half()
    got, (decision,) = compiled(mm, a, b, **TWO, max_autotune_gemm_backends=backends)
    assert_right(mm, (a, b), got)
    assert decision.chosen.source == "library"
    assert "no instance has its types and layouts" in decision.reason
    assert "CRR f16xf16->f16" in decision.reason


# -- more than a product -------------------------------------------------------------------

X, W, C = torch.randn(64, 128).half(), torch.randn(96, 128).half(), torch.randn(96).half()
BF = torch.bfloat16
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "bias": (F.linear, (X, W, C)),
    "factors": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), (C, X, W.t())),
    "bias of no weight": (lambda c, a, b: torch.addmm(c, a, b, beta=0), (C * torch.nan, X, W.t())),
    "full bias": (torch.addmm, (torch.randn(64, 96).half(), X, W.t())),
    "epilogue": (lambda a, b: F.gelu(a @ b), (X, W.t())),
    "offset": (lambda a, b: a[32:, 64:] @ b, (torch.randn(96, 192).half(), W.t())),
    "batched": (torch.bmm, (torch.randn(2, 64, 256).to(BF), torch.randn(2, 96, 256).to(BF).mT)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_values(name: str) -> None:
    fn, args = PROGRAMS[name]
    one = {**TUNED, "rocm.n_max_profiling_configs": 1, "max_autotune_gemm_backends": "CK"}
    got, (decision,) = compiled(fn, *args, **one)
    assert decision.chosen.source == "ck", decision.reason
    assert_right(fn, args, got)


def test_two_products_that_meet() -> None:
    """Templates would compute both in one kernel; CK computes each."""

    def two(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return a @ b + c @ d

    one = {**TUNED, "rocm.n_max_profiling_configs": 1, "max_autotune_gemm_backends": "CK"}
    args = (X, W.t(), X.flip(0), W.flip(0).t())
    got, decisions = compiled(two, *args, **one)
    assert [decision.chosen.source for decision in decisions] == ["ck"]  # the same question
    assert_right(two, args, got)


# -- remembering, and falling back ---------------------------------------------------------

SMALL = (torch.randn(128, 64).half(), torch.randn(96, 64).half().t())
ON_SMALL = {**TWO, "max_autotune_gemm_backends": "CK"}


def test_a_decision_and_its_library_are_kept() -> None:
    first, (decision,) = compiled(mm, *SMALL, **ON_SMALL)
    runs, measured = counted("build.compiler_runs"), counted("autotune.sites_measured")
    torch._dynamo.reset()
    again, (kept,) = compiled(mm, *SMALL, **ON_SMALL)
    assert torch.equal(first, again)
    assert kept.chosen == decision.chosen
    assert counted("build.compiler_runs") == runs
    assert counted("autotune.sites_measured") == measured


def test_a_missing_ck_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nowhere = {**ON_SMALL, "rocm.ck_dir": str(tmp_path)}
    warned = pytest.warns(CkWarning, match=r"looked in .*rocm\.ck_dir")  # where, and what to do
    with caplog.at_level(logging.WARNING, "perfuse.tuning"), warned as told:
        for function in (mm, lambda a, b: (a @ b) * 2):
            torch._dynamo.reset()
            got, (decision,) = compiled(function, *SMALL, **nowhere)
            assert_right(function, SMALL, got)
            assert decision.chosen.source == "library"
            assert "is not installed" in decision.reason and not decision.is_final
    assert [str(tmp_path) in record.message for record in caplog.records] == [True]
    assert len([warning for warning in told if warning.category is CkWarning]) == 1


def test_an_incomplete_ck_is_mended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The missing file is named; once it is there, CK is used, whatever was decided before."""
    shutil.copytree(FOLDER / "include", tmp_path / "include")
    (tmp_path / "include/ck/stream_config.hpp").unlink()
    broken = {**ON_SMALL, "rocm.ck_dir": str(tmp_path), "rocm.n_max_profiling_configs": 1}
    warned = pytest.warns(CkWarning, match="lacks ck/stream_config.hpp")
    with caplog.at_level(logging.WARNING, "perfuse.tuning"), warned:
        _, (decision,) = compiled(mm, *SMALL, **broken)
    assert "lacks ck/stream_config.hpp" in decision.reason
    assert len(caplog.records) == 1
    shutil.copytree(FOLDER / "include", tmp_path / "include", dirs_exist_ok=True)
    torch._dynamo.reset()
    _, (decision,) = compiled(mm, *SMALL, **broken)
    assert decision.chosen.source == "ck"


def test_a_ck_that_does_not_compile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(FOLDER / "include", tmp_path / "include")
    layout = tmp_path / "include/ck/tensor_operation/gpu/device/tensor_layout.hpp"
    layout.write_text("#pragma once\n#error this header is broken\n")
    broken = {**ON_SMALL, "rocm.ck_dir": str(tmp_path)}
    warning = pytest.warns(CkWarning, match="this header is broken")
    with caplog.at_level(logging.WARNING, "perfuse.tuning"), warning:
        got, (decision,) = compiled(mm, *SMALL, **broken)
    assert_right(mm, SMALL, got)
    assert decision.chosen.source == "library"
    assert all("this header is broken" in rival.refusal for rival in decision.rivals[1:])
    warned = [r.message for r in caplog.records if "does not compile" in r.message]
    assert len(warned) == 1 and "this header is broken" in warned[0]
