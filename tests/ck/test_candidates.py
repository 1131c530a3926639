"""Candidates without a GPU, a compiler or CK: `codegen_for`, and the command."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import perfuse
from perfuse import config
from perfuse.candidates.ck import report_once
from perfuse.cli import app
from perfuse.errors import NoValidChoicesError

NO_CK = {"rocm.ck_dir": "/nowhere", "rocm.home": "/nowhere"}
CK = {"max_autotune_gemm_backends": "CK", **NO_CK}

EXAMPLE = """
import torch

def fn(a, b):
    return a @ b

def example_args():
    half = dict(dtype=torch.float16)
    return torch.empty(2240, 256, **half), torch.empty(2048, 256, **half).t()
"""


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def halves(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.float16)


def test_every_candidate_has_a_source_or_a_reason() -> None:
    bf16 = (halves(2240, 256).bfloat16(), halves(256, 2048).bfloat16())
    with config.patch(CK):
        made = perfuse.codegen_for(mm, bf16, target="hip:gfx942")
    (report,) = made.graphs[0].candidates
    assert (len(report.legal), len(report.candidates)) == (240, 304)
    for each in report.candidates:
        assert bool(each.source) != bool(each.refusal)
        assert not each.source or f"// {each.name}\n" in each.source
    assert sum(each.is_raced for each in report.candidates) == 16
    assert report.legal[0].is_raced
    assert "240 of 304 candidates are legal" in str(made)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (
            (torch.empty_strided((50257, 32768), (1, 50304), dtype=torch.float16, device="meta"),
             torch.empty(32768, 768, dtype=torch.float16, device="meta")),
            "no instance has its types and layouts",
        ),
        ((halves(64, 64), halves(64, 62)), "62 of C is not a multiple of"),
        ((halves(64, 64)[:, ::2], halves(32, 64)), "neither rows nor columns"),
        ((halves(64, 64).double(), halves(64, 64).double()), "CK has no instances for f64"),
    ],
    ids=["the seed's", "odd columns", "strided", "double"],
)  # fmt: skip
def test_why_there_is_none(args: tuple[torch.Tensor, ...], reason: str) -> None:
    with config.patch(CK):
        made = perfuse.codegen_for(mm, args, target="hip:gfx942")
    (report,) = made.graphs[0].candidates
    assert not report.legal
    assert any(reason in each.refusal for each in report.candidates), str(report)


def test_elsewhere_there_are_none() -> None:
    with config.patch(CK):
        assert (
            not perfuse.codegen_for(mm, (halves(64, 64),) * 2, target="cuda:90")
            .graphs[0]
            .candidates
        )
    made = perfuse.codegen_for(mm, (halves(64, 64),) * 2, target="hip:gfx942")
    assert not made.graphs[0].candidates


def test_an_architecture_given_by_hand() -> None:
    args = (halves(256, 256), halves(256, 256).t())
    with config.patch({**CK, "rocm.arch": "gfx1100"}):
        (report,) = perfuse.codegen_for(mm, args, target="hip:gfx942").graphs[0].candidates
    (only,) = report.candidates
    assert only.refusal == "CK does not support gfx1100, only gfx908, gfx90a, gfx942, gfx950"
    with config.patch({**CK, "rocm.arch": "gfx942:sramecc+:xnack-"}):  # as rocminfo names it
        (report,) = perfuse.codegen_for(mm, args, target="hip:gfx942").graphs[0].candidates
    assert report.legal


def test_a_folder_that_is_not_there_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    report_once.cache_clear()
    with caplog.at_level(logging.WARNING, "perfuse.tuning"), config.patch(CK):
        perfuse.codegen_for(mm, (halves(64, 64),) * 2, target="hip:gfx942")
    (record,) = caplog.records
    assert "/nowhere/include/ck" in record.message and "Perfuse's table" in record.message


BATCH = (halves(2, 64, 256), halves(2, 96, 256).mT)
BF16 = (halves(64, 256).bfloat16(), halves(96, 256).bfloat16().t())


@pytest.mark.parametrize("args", [BATCH, BF16], ids=["batch", "bfloat16"])
def test_preselected_instances_are_float16s(args: tuple[torch.Tensor, ...]) -> None:
    """The setting is named as the reason: without it CK may have instances."""
    with config.patch({**CK, "rocm.use_preselected_instances": True}):
        (report,) = perfuse.codegen_for(mm, args, target="hip:gfx942").graphs[0].candidates
    (only,) = report.candidates
    assert "rocm.use_preselected_instances leaves no instance" in only.refusal


def test_sizes_have_to_be_static() -> None:
    args = (halves(64, 256), halves(96, 256).t())
    with config.patch(CK):
        made = perfuse.codegen_for(mm, args, target="hip:gfx942", dynamic=True)
    ((only,),) = (report.candidates for report in made.graphs[0].candidates)
    assert only.refusal == "its sizes are not static"


def test_an_unknown_backend_is_a_short_error() -> None:
    with pytest.raises(Exception, match=r"unknown backend .* 'CKTILE'") as raised:
        perfuse.codegen_for(
            mm,
            (halves(64, 64),) * 2,
            target="hip:gfx942",
            options={"max_autotune_gemm_backends": "CKTILE"},
        )
    assert "did you mean 'CK'?" in str(raised.value) and len(str(raised.value)) < 600


def test_without_a_fallback_it_is_an_error() -> None:
    strict = {**CK, "max_autotune": True, "autotune_fallback_to_aten": False}
    with config.patch(strict), pytest.raises(Exception, match="no valid candidate") as raised:
        perfuse.codegen_for(mm, (halves(64, 64), halves(64, 62)), target="hip:gfx942")
    assert NoValidChoicesError.__name__ in f"{type(raised.value).__name__}: {raised.value}"


def test_the_command_prints_the_same(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(EXAMPLE)
    command = ["codegen", f"{tmp_path / 'model.py'}:fn", "--target", "hip:gfx942"]
    with config.patch({**CK, "rocm.use_preselected_instances": True}):
        shown = CliRunner().invoke(app, command)
        written = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out")])
    assert shown.exit_code == written.exit_code == 0, shown.output
    assert "15 of 19 candidates are legal" in shown.output
    assert "4 steps of depth do not fill the 4 stages of pipeline v4" in shown.output
    assert shown.output.count('extern "C" int pf_host_run') == 15
    assert len(list((tmp_path / "out").glob("*_ck0_*.cpp"))) == 15
    assert 'extern "C"' not in written.output
