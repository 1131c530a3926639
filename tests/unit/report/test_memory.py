"""Reports on a training step's memory: rows, a line of bars, a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import perfuse
from perfuse.cli import app
from perfuse.report.explanation import Explanation
from perfuse.report.memory import BARS, TrainingReport

PROGRAM = """
import torch
weights = [torch.randn(64, 64, requires_grad=True) for _ in range(6)]
def loss(x):
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x.sum()
def example_args():
    return torch.randn(1024, 64)
"""


def network(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(torch.tanh(x @ a) @ b).sum()


@pytest.fixture(scope="module")
def told() -> Explanation:
    args = [torch.randn(256, 256, requires_grad=True) for _ in range(3)]
    return perfuse.explain(network, *args)


def test_rows_say_what_becomes_of_each_value(told: Explanation) -> None:
    (report,) = told.training
    kept = [row for row in report.saved if row.num_bytes]
    assert [row.num_bytes for row in kept] == [256 * 256 * 4] * 2
    assert all(row.what.startswith("aten.") and "[256, 256]" in row.what for row in kept)
    assert report.timeline.saved_bytes >= sum(row.num_bytes for row in kept)
    assert all(row.num_flops for row in report.recomputed)
    assert report.recomputed_flops == sum(row.num_flops for row in report.recomputed)
    assert report.budget == ""


def test_the_text_has_it(told: Explanation) -> None:
    text = told.stage("memory")
    (report,) = told.training
    assert report.headline() in text
    assert report.sparkline() in text and BARS[-1] in report.sparkline()
    assert report.sparkline().count("|") == 1
    assert "memory of a training step" in text and "saved" in text


def test_page_and_picture(told: Explanation, tmp_path: Path) -> None:
    page = told.to_html(tmp_path / "page.html").read_text()
    assert "Memory of a training step" in page
    picture = told.to_png(tmp_path / "memory.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000


def test_inference_has_nothing_to_draw(tmp_path: Path) -> None:
    explanation = perfuse.explain(lambda x: x + 1, torch.ones(4))
    assert explanation.training == ()
    with pytest.raises(perfuse.PerfuseError, match="has no backward"):
        explanation.to_png(tmp_path / "memory.png")


def test_the_command_takes_a_budget(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    where = f"{tmp_path / 'program.py'}:loss"
    picture = tmp_path / "memory.png"
    arguments = ["explain", where, "--memory-budget", "0.8", "--png", str(picture)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "(memory_budget 0.8)" in result.output and "aten.mm" in result.output
    assert picture.exists()


def test_bars_are_as_high_as_the_memory(told: Explanation) -> None:
    (report,) = told.training
    assert isinstance(report, TrainingReport)
    highest = max(
        range(len(report.timeline.moments)), key=lambda i: report.timeline.moments[i].total
    )
    assert report.sparkline().replace("|", "")[highest] == BARS[-1]
