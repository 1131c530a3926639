"""Selection among candidate sources: who proposes, who is refused, what is left, what is kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import perfuse
from perfuse.autotune import select
from perfuse.autotune.contest import RULES, contest_here
from perfuse.autotune.matmuls import CpuMatmul, decide, selection_of
from perfuse.autotune.outcome import Fate
from perfuse.autotune.pool import terminate_all
from perfuse.candidates.library import LibraryMatmul
from perfuse.candidates.request import BenchmarkRequest, Run
from perfuse.candidates.source import Source
from perfuse.candidates.sources import SOURCES, offers_for, selected_sources
from perfuse.context import Context
from perfuse.decision import Choice
from perfuse.errors import ConfigError, NoValidChoicesError
from perfuse.testing import fresh_cache

PROBLEM = CpuMatmul(48, 40, 32, (32, 1), (40, 1), has_bias=True)
QUICK = replace(RULES, budget_s=0.05)
LIBRARY = LibraryMatmul("aten.addmm.out", PROBLEM)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "RULES", QUICK)


def with_settings(context: Context, **changes: Any) -> Context:
    return replace(context, settings=context.settings.with_overrides(changes))


@pytest.mark.parametrize("text", ["aten,triton", "ATEN, Triton", "Triton,Aten"])
def test_backends_are_named_in_any_case(text: str) -> None:
    assert [source.name for source in selected_sources(text)] == ["ATEN", "TRITON"]


def test_an_unknown_backend_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="TRITON"):
        selected_sources("ATEN,TRITTON")
    with pytest.raises(ConfigError, match="names no backend"):
        selected_sources(" , ")


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_an_unknown_backend_fails_the_compile(target: str) -> None:
    settings = {"max_autotune": True, "max_autotune_gemm_backends": "ATEM"}
    with perfuse.config.patch(settings), pytest.raises(Exception, match="did you mean 'ATEN'"):
        perfuse.codegen_for(torch.sin, (torch.ones(3),), target=target)


@pytest.mark.parametrize("backends", ["TRITON", "aten,triton"])
@pytest.mark.parametrize("size", [2, 16])
def test_a_small_matmul_on_a_gpu_is_a_loop_where_the_library_may_be(
    size: int, backends: str
) -> None:
    """Loops stand in for its call. They are no candidate of TRITON, which has none of this size."""
    a = torch.ones(size, size)
    settings: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": backends}
    with perfuse.config.patch(settings):
        assert "aten.mm" not in str(perfuse.codegen_for(torch.mm, (a, a), target="sm_90"))
    strict = settings | {"autotune_fallback_to_aten": False}
    with perfuse.config.patch(strict):
        if "aten" in backends:
            assert "aten.mm" not in str(perfuse.codegen_for(torch.mm, (a, a), target="sm_90"))
            return
        with pytest.raises(Exception, match="NoValidChoicesError"):
            perfuse.codegen_for(torch.mm, (a, a), target="sm_90")


def test_a_backend_without_candidates_is_reported(context: Context) -> None:
    offers = offers_for(PROBLEM, context)
    assert set(offers.silent) == {"TRITON", "CPP"} and offers.silent["TRITON"] == "not on cpu"
    decision = decide(PROBLEM, context)
    assert "TRITON proposes nothing: not on cpu" in decision.reason
    assert context.counters["autotune.no_candidate.CPP"] == 2


class Toy(BenchmarkRequest):
    """A matmul of a test's own: right, or wrong in some way."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.operands = PROBLEM.operands()

    def loaded(self, inputs: tuple[torch.Tensor, ...], out: torch.Tensor | None) -> Run:
        assert out is not None
        if self.way == "raises":
            raise RuntimeError("too many registers")
        right, turn = LIBRARY.loaded(inputs, out), iter(range(1 << 30))

        def run() -> Any:
            result = right()
            number = next(turn)
            if self.way == "wrong" or (self.way == "right once" and number > 0):
                result[-1, -1] += 1
            elif self.way == "right until timed" and number > 1:
                result[0, 0] += 1
            elif self.way == "out of bounds":
                result.as_strided((1,), (1,), result.storage_offset() + result.numel()).fill_(7)
            elif self.way == "before its start":
                result.as_strided((1,), (1,), result.storage_offset() - 3).fill_(7)
            elif self.way == "writes to its inputs":
                inputs[0][0, 0] = 0.5
            elif self.way == "half the precision":
                return result.bfloat16().float()
            elif self.way == "not written":
                result[0, 3] = float("nan")
            elif self.way == "not a tensor":
                return 3
            elif self.way == "other shape":
                return result[1:]
            return result

        return run


WAYS = {
    "wrong": "its error is",
    "right once": "its error is",
    "right until timed": "its error",
    "out of bounds": "writes outside of its result",
    "before its start": "writes outside of its result",
    "writes to its inputs": "writes to its inputs",
    "half the precision": "its error is",
    "not written": "its error is nan",
    "not a tensor": "its result is a int",
    "other shape": "its result is torch.float32[47, 40]",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_candidate_never_gets_a_time(way: str, context: Context) -> None:
    made = selection_of(PROBLEM, context).contest
    measured = contest_here(made, [LIBRARY, Toy(way), Toy("right")], QUICK)
    assert measured.failures[1].fate is Fate.WRONG and WAYS[way] in measured.failures[1].detail
    assert 1 not in measured.times
    assert set(measured.times) == {0, 2}, measured.failures


class WrongRow(LibraryMatmul):
    """Wrong in a row whose exact values are not computed."""

    def loaded(self, inputs: tuple[torch.Tensor, ...], out: torch.Tensor | None) -> Run:
        right = super().loaded(inputs, out)

        def run() -> torch.Tensor:
            result = right()
            result[1, 0] += 0.01
            return result

        return run


def test_every_row_is_compared(context: Context) -> None:
    long = replace(PROBLEM, rows=700)
    made = selection_of(long, context).contest
    requests = [LibraryMatmul("aten.addmm.out", long), WrongRow("aten.addmm.out", long)]
    measured = contest_here(made, requests, QUICK)
    assert set(measured.times) == {0}
    assert "its result differs by 0.01" in measured.failures[1].detail


@dataclass(frozen=True)
class ToySource:
    """A source that proposes one choice for each way."""

    ways: tuple[str, ...]

    def row(self) -> Source:
        choices = [Choice("toy", way) for way in self.ways]
        request = lambda problem, choice, context: Toy(choice.name)  # noqa: E731
        return Source("TOY", lambda target: True, lambda *_: choices, request)


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr("perfuse.candidates.sources.SOURCES", [*SOURCES, request.param.row()])


@pytest.mark.parametrize("toys", [ToySource(("raises", "wrong"))], indirect=True)
@pytest.mark.usefixtures("toys")
def test_nothing_left_is_an_error_that_lists_every_candidate(context: Context) -> None:
    strict = with_settings(
        context, max_autotune_gemm_backends="toy,triton", autotune_fallback_to_aten=False
    )
    with pytest.raises(NoValidChoicesError) as raised:
        decide(PROBLEM, strict)
    for told in ("raises: raised: RuntimeError: too many", "wrong: wrong result", "TRITON: not on"):
        assert told in str(raised.value)
    lenient = with_settings(context, max_autotune_gemm_backends="toy")
    decision = decide(PROBLEM, lenient)
    assert decision.chosen.name == "aten.addmm.out" and "too many registers" in decision.reason


@pytest.mark.parametrize("toys", [ToySource(("wrong", "right"))], indirect=True)
@pytest.mark.usefixtures("toys")
def test_a_wrong_candidate_is_quarantined(context: Context) -> None:
    only = with_settings(context, max_autotune_gemm_backends="toy")
    first = decide(PROBLEM, only)
    assert first.chosen.name == "right" and "wrong result" in first.rivals[0].refusal
    assert only.counters["autotune.quarantined"] == 1
    both = with_settings(context, max_autotune_gemm_backends="toy,aten")
    again = decide(PROBLEM, both)
    refused = {rival.choice.name: rival.refusal for rival in again.rivals}
    assert refused["wrong"].startswith("quarantined: wrong result: its")
    assert both.counters["autotune.quarantined"] == 1, "it was not run again"


def test_the_time_for_tuning_ends(context: Context) -> None:
    clock = iter(range(100))
    made = selection_of(PROBLEM, context).contest
    measured = contest_here(
        made, [LIBRARY] * 5, QUICK, deadline=2.0, clock=lambda: float(next(clock))
    )
    assert measured.times and Fate.NOT_RUN in {o.fate for o in measured.failures.values()}


def test_workers_and_this_process_give_the_same_kind_of_decision(context: Context) -> None:
    choices = []
    for in_subproc in (False, True):
        with fresh_cache():
            settings = with_settings(context, autotune_in_subproc=in_subproc)
            decision = decide(PROBLEM, settings)
        assert all(rival.median_us for rival in decision.rivals), decision
        choices.append([rival.choice for rival in decision.rivals])
    assert choices[0] == choices[1]
    terminate_all()
