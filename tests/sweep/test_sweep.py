"""The sweep: its sample against eager, and its own judgement."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

from tests.harness.backend import default_backend
from tests.harness.draws import moved_inputs, shaken_inputs, shaken_model
from tests.sweep import judge
from tests.sweep.families import FAMILIES
from tests.sweep.packages import use_packages
from tests.sweep.run import is_cut_off, is_ours, rows_of, skips, table_of
from tests.sweep.sample import SAMPLE
from tests.sweep.subject import NotMade, Subject, noise, variant_of
from tests.sweep.worker import swept

Spoil = Callable[[torch.Tensor], torch.Tensor]

use_packages()
rows_of_family = cache(lambda family: rows_of([family]))  # imports packages, which takes seconds


@pytest.mark.parametrize("row", SAMPLE)
def test_matches_eager(row: str) -> None:
    rows, missing = rows_of_family(row.split("/")[0])
    if missing:
        pytest.skip(missing[0])
    assert row in rows
    result = swept(row, default_backend())
    assert result["status"] == "pass", result


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


class Chaotic(nn.Module):
    """Batch norms over four elements and ReLUs: a last bit decides which branches are taken."""

    def __init__(self) -> None:
        super().__init__()
        blocks = ((nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(24))
        self.inner = nn.Sequential(*(layer for block in blocks for layer in block))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.inner(x)}


def chaotic() -> Subject:
    torch.manual_seed(0)
    return Subject(Chaotic(), ((noise(4, 16),), {})).training()


def test_an_ill_conditioned_step_is_held_against_other_roundings_of_it() -> None:
    """Eager with other roundings passes, though far outside the limits of one run of eager."""
    subject = chaotic()
    eager = judge.evaluate(subject, chaotic().model, subject.call)
    other = judge.evaluate(subject, shaken_model(subject.model, seed=99), subject.call)
    exact, is_wide = judge.reference(subject, eager)
    assert is_wide and judge.outside_limits(other, eager, exact)
    assert not judge.complaints_of(subject, eager, other, "eager")


@pytest.mark.parametrize(
    "spoil",
    [
        torch.zeros_like,  # a gradient that is lost
        lambda x: x * 1.5,  # a factor forgotten
        lambda x: x.roll(1, 0),  # rows read at the wrong place
        lambda x: torch.cat([x[:-1], x[-1:] * float("nan")]),  # a part never written
    ],
)
def test_what_is_wrong_is_found_in_an_ill_conditioned_step(spoil: Spoil) -> None:
    subject = chaotic()
    eager = judge.evaluate(subject, chaotic().model, subject.call)
    broken = [spoil(x) if i == 1 else x for i, x in enumerate(eager)]
    found = judge.complaints_of(subject, eager, broken, "eager")
    assert len(found) == 1 and found[0].startswith("output 1:")


@pytest.mark.parametrize("is_broken", [False, True])
def test_single_elements_are_decided_in_float64(
    is_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An element that a branch at a tie moved is right in float64; one read elsewhere is not."""
    subject = chaotic()
    eager = judge.evaluate(subject, chaotic().model, subject.call)
    runs = [eager, *judge.shaken_runs(subject)]
    exact, _ = judge.reference(subject, eager)
    errors = [[float((x[1] - exact[1]).norm(p=p)) for x in runs] for p in (2.0, float("inf"))]
    got = [x.clone() for x in eager]
    got[1] = exact[1].float()  # as near as can be, but for one element
    got[1][0, 0] += (max(errors[0]) + 2 * max(errors[1])) / 2 + 1e-3 * max(errors[0])
    real = judge.compiled_by

    def compiled(backend: str, double: Subject) -> tuple[list[torch.Tensor], int]:
        results, num_graphs = real(backend, double)
        results[1][0, 0] += 1e-3 * is_broken
        return results, num_graphs

    monkeypatch.setattr(judge, "compiled_by", compiled)
    assert judge.farther_outputs({1: "far"}, got, exact, runs)
    assert bool(judge.complaints_of(subject, eager, got, "eager")) == is_broken


@pytest.mark.parametrize("is_broken", [False, True])
@pytest.mark.parametrize("is_drawn", [False, True])
def test_norms_are_held_against_more_runs(
    is_drawn: bool, is_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A branch that eager takes rarely passes if float64 is right, and not if eager never does."""
    subject = chaotic()
    eager = judge.evaluate(subject, chaotic().model, subject.call)
    rare = [x * 1.5 if i == 1 else x for i, x in enumerate(eager)]
    real_run, real_compile = judge.shaken_run, judge.compiled_by

    def shaken_run(subject: Subject, seed: int) -> list[torch.Tensor]:
        return rare if is_drawn and seed == 20 else real_run(subject, seed)

    def compiled(backend: str, double: Subject) -> tuple[list[torch.Tensor], int]:
        results, num_graphs = real_compile(backend, double)
        results[1][0, 0] += 1e-3 * is_broken
        return results, num_graphs

    monkeypatch.setattr(judge, "shaken_run", shaken_run)
    monkeypatch.setattr(judge, "compiled_by", compiled)
    found = judge.complaints_of(subject, eager, rare, "eager")
    assert bool(found) == (is_broken or not is_drawn)


def test_inputs_are_moved_where_there_are_no_parameters() -> None:
    """Another order of the sum in a mean that cancels is as good as eager's."""
    images = noise(2, 3, 6, 6)
    images -= images.double().mean((0, 2, 3), keepdim=True).float()
    norm = nn.BatchNorm2d(3, affine=False)
    subject = Subject(norm, ((images,), {})).training()
    eager = judge.evaluate(subject, copy.deepcopy(norm), subject.call)
    means = 0.1 * images.permute(1, 0, 2, 3).reshape(3, 72).cumsum(1)[:, -1] / 72
    assert means.shape == eager[1].shape
    assert not judge.complaints_of(subject, eager, [eager[0], means, *eager[2:]], "eager")
    assert judge.complaints_of(subject, eager, [eager[0], means + 1e-6, *eager[2:]], "eager")


def test_whole_numbers_among_the_inputs_are_not_moved() -> None:
    places = torch.tensor([0.0, 1.0, 2.0, 2.5])
    for other in (moved_inputs(places, "apart"), shaken_inputs(places, 0)):
        assert torch.equal(other[:3], places[:3])
    assert moved_inputs(places, "up")[3] > places[3]


def test_samples_of_modules_are_the_same_in_every_process() -> None:
    first, second = (FAMILIES["modules"].make("BatchNorm2d", "train").call for _ in range(2))
    assert torch.equal(first[0][0][0][0], second[0][0][0][0])


def test_a_module_that_keeps_what_it_computed_is_judged() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.utils.weight_norm(nn.Linear(4, 4))
            self.kept: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            self.kept = [self.inner(x)]
            return {"y": self.kept[0].relu()}

    torch.manual_seed(0)
    subject = variant_of(Subject(Keeps(), ((noise(3, 4),), {})), "train")
    assert judge.judged(subject, "eager")["status"] == "pass"


def test_channels_last_is_asked_for_where_it_means_something() -> None:
    subject = variant_of(net(), "eval_channels_last")
    assert subject.call[0][0].is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(NotMade):
        variant_of(Subject(nn.Linear(3, 3), ((noise(2, 3),), {})), "eval_channels_last")


def test_a_row_cut_off_by_the_end_of_the_run_is_not_a_result() -> None:
    assert is_cut_off({"status": "timeout", "seconds": 7.3}, timeout_s=200)
    assert not is_cut_off({"status": "timeout", "seconds": 200.3}, timeout_s=200)
    assert not is_cut_off({"status": "pass", "seconds": 7.3}, timeout_s=200)


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
    assert not judge.complaints_of(subject, eager, eager, "eager")
    assert judge.complaints_of(subject, eager, [eager[0] + 1e-4], "eager")
