"""The sweep: its sample against eager, and its own judgement."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.harness.backend import default_backend
from tests.sweep import judge
from tests.sweep.families import FAMILIES
from tests.sweep.packages import use_packages
from tests.sweep.run import is_ours, rows_of, skips, table_of
from tests.sweep.sample import SAMPLE
from tests.sweep.subject import NotMade, Subject, noise, variant_of
from tests.sweep.worker import swept

use_packages()
ROWS, MISSING = rows_of(list(FAMILIES))


@pytest.mark.parametrize("row", SAMPLE)
def test_matches_eager(row: str) -> None:
    for reason in MISSING:
        if reason.startswith(f"skip {row.split('/')[0]}:"):
            pytest.skip(reason)
    result = swept(row, default_backend())
    assert result["status"] == "pass", result


def test_every_row_of_the_sample_exists() -> None:
    missing = {reason.split()[1].rstrip(":") for reason in MISSING}
    assert {row for row in SAMPLE if row.split("/")[0] not in missing} <= set(ROWS)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.inner(x).relu().mean((2, 3))}


def net() -> Subject:
    torch.manual_seed(0)
    return Subject(Net(), ((noise(2, 3, 6, 6),), {}))


def test_a_gradient_that_is_lost_is_found_and_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the backend under test leaves the weight's gradient at zero."""
    real = judge.compiled_by

    def broken(backend: str, subject: Subject) -> tuple[list[torch.Tensor], int]:
        got, num_graphs = real(backend, subject)
        if backend == "eager":
            got[1].zero_()
        return got, num_graphs

    monkeypatch.setattr(judge, "compiled_by", broken)
    monkeypatch.setattr(judge, "PEER", "aot_eager")
    result = judge.judged(variant_of(net(), "train_channels_last"), "eager")
    assert (result["status"], result["whose"]) == ("wrong", "ours") and is_ours(result)
    table = table_of({"timm/net/train": result}, ["timm/net/train", "timm/net/eval"])
    assert table.row_count == 2


def test_channels_last_is_asked_for_where_it_means_something() -> None:
    subject = variant_of(net(), "eval_channels_last")
    assert subject.call[0][0].is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(NotMade):
        variant_of(Subject(nn.Linear(3, 3), ((noise(2, 3),), {})), "eval_channels_last")


def test_skips_are_counted_by_reason() -> None:
    skip = {"status": "skip", "message": "detection"}
    results = {
        "a/b/eval": skip,
        "a/b/train": skip,
        "a/c/eval": skip,
        "a/d/eval": {"status": "pass"},
    }
    assert skips(results) == ["skip 2: detection: a/b, a/c"]


def test_a_model_that_insists_on_float32_is_held_against_a_stand_in() -> None:
    class Insists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"y": self.inner(x.float() * torch.ones(16))}

    torch.manual_seed(0)
    subject = Subject(Insists(), ((), {"x": noise(4, 16)}))
    eager = judge.evaluate(subject, subject.model, subject.call)
    assert not judge.complaints_of(subject, eager, eager)
    assert judge.complaints_of(subject, eager, [eager[0] + 1e-4])
