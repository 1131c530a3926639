"""Templates ranked for a GPU that is not there: compiled, read, ordered, pinned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from perfuse.autotune.rank import RankedTemplate, Ranking, _candidates
from perfuse.autotune.sites import plan_of_site, sites_of
from perfuse.autotune.templates import tune_templates
from perfuse.cache.lock_file import read_lock
from perfuse.candidates.triton import template_choices
from perfuse.capture.rank import matmul_inputs, rank_for
from perfuse.cli import app
from perfuse.codegen.triton.templates.template import SOURCE
from perfuse.errors import ConfigError
from perfuse.gpu import gpu_of_name
from tests.triton.contractions import context_for
from tests.unit.autotune.questions import question
from tests.unit.lower.samples import bf16
from tests.unit.planning import plans_of

SIZES = "64x64x128:bf16:NT"


def test_candidates_are_compiled_ranked_and_pinned(tmp_path: Path) -> None:
    """The file replays the choice where nothing is measured."""
    path = str(tmp_path / "perfuse.lock")
    ran = CliRunner().invoke(app, ["rank", "--matmul", SIZES, "--best", "2", "--lock", path])
    assert ran.exit_code == 0, ran.output
    assert "registers" in ran.output and "written" in ran.output
    lock = read_lock(path)
    assert lock is not None
    (entry,) = lock.entries.values()
    assert entry.chosen.source == SOURCE and len(entry.candidates) == 2
    context = context_for("sm_90")
    settings = context.settings.with_overrides({"lock_file": path})
    locked = replace(context, settings=settings)
    a, b = bf16(64, 128), bf16(64, 128).t()
    (plan,) = plans_of(torch.mm, a, b, context=locked)
    (choice,) = tune_templates(plan, locked).templates.values()
    assert choice.name == entry.chosen.name


def test_resources_are_those_of_the_machine_code() -> None:
    context = context_for("sm_90")
    (plan,) = plans_of(torch.mm, *matmul_of(SIZES), context=context)
    (site,) = sites_of(plan)
    alone = plan_of_site(site, plan)
    choices = template_choices(site, alone.program, gpu_of_name("sm_90"), tf32=False)[:2]
    for row in _candidates(site, alone, choices, context):
        assert 16 < row.num_registers <= 255 and row.shared_bytes > 0 and not row.failure
        assert row.predicted_us > 2


def matmul_of(text: str) -> list[torch.Tensor]:
    return [torch.randn(t.shape).to(t.dtype).as_strided(t.shape, t.stride()) for t in
            matmul_inputs(text)]  # fmt: skip


def test_what_cannot_be_built_is_never_pinned() -> None:
    asked = question()
    broken = RankedTemplate(asked.candidates[0], 1.0, failure="KernelTooLarge")
    assert Ranking("a test", asked, (broken,)).decision(3) is None


def test_matmuls_are_described_by_sizes_dtype_and_layout() -> None:
    left, right = matmul_inputs("8x16x32x64:f16:TN")
    assert (left.shape, right.shape) == ((8, 16, 64), (8, 64, 32))
    assert left.stride()[-2:] == (1, 16) and right.is_contiguous() and left.dtype is torch.float16
    for wrong in ("64x64", "64x64xK", "64x64x64:f12", "0x4x4"):
        with pytest.raises(ConfigError, match="does not describe a matmul"):
            matmul_inputs(wrong)


def test_a_cpu_has_no_ranking() -> None:
    with pytest.raises(Exception, match="not a GPU"):
        rank_for(torch.mm, matmul_of(SIZES), target="cpu")
