"""The wide benchmark: which rows it runs, what it keeps of them, and what it makes of that."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import wide, wide_measure, wide_report
from benchmarks.report import OURS, PEER
from benchmarks.turns import TURN, Turn
from benchmarks.wide_models import LIBRARIES, SIZES, TASKS, row_names
from tests.harness.devices import ROOT
from tests.harness.pool import Result, Task
from tests.sweep.subject import Subject, noise

ROW = "timm/net/small/forward"


def result(
    eager: float, peer: float, ours: float, *, peaks: tuple[float, float] = (1.0, 1.0)
) -> Result:
    times = {"eager": eager, PEER: peer, OURS: ours}
    return {
        "status": "pass",
        "message": "",
        "failures": {},
        "ms": {who: {"median": ms, "best": ms, "rounds": 5} for who, ms in times.items()},
        "first_s": {"eager": 0.1, PEER: 4.0, OURS: 2.0},
        "peak_mb": {"eager": 1.0, PEER: peaks[0], OURS: peaks[1]},
    }


def fabricated(**results: Result) -> list[wide_report.Row]:
    named = {f"timm/{name}/small/forward": found for name, found in results.items()}
    return wide_report.worst_first(named)


# -- rows ----------------------------------------------------------------------------------------


def test_every_architecture_has_both_sizes_and_both_tasks() -> None:
    rows = row_names()
    names = [f"{lib}/{name}" for lib, (found, _) in LIBRARIES.items() for name in found]
    assert len(names) == len(set(names)) >= 60
    assert sorted(rows) == sorted(f"{n}/{s}/{t}" for n in names for s in SIZES for t in TASKS)
    # A time limit cuts off the end of the list, and no library.
    assert {row.split("/")[0] for row in rows[:40]} == set(LIBRARIES)


def test_parts_are_all_rows_once() -> None:
    rows = [f"timm/a{i}/small/forward" for i in range(10)]
    parts = [wide.selected(rows, "", f"{k}/3") for k in (1, 2, 3)]
    assert sorted(row for found in parts for row in found) == rows
    assert wide.selected(rows, "a[12]/", "1/1") == rows[1:3]
    for part in ("0/3", "4/3", "half"):
        with pytest.raises(SystemExit, match="--part"):
            wide.selected(rows, "", part)


def test_known_rows_are_left_out_and_failed_ones_tried_again_on_request() -> None:
    known = {"a": {"status": "pass"}, "b": {"status": "crash"}, "c": {"status": "skip"}}
    assert wide.waiting(["a", "b", "c", "d"], known, retry=False) == ["d"]
    assert wide.waiting(["a", "b", "c", "d"], known, retry=True) == ["b", "d"]


class Pool:
    """Answers in place of worker processes, one for each row."""

    def __init__(self, answers: dict[str, Result]) -> None:
        self.answers, self.asked = answers, list[str]()

    def run_tasks(self, module: str, tasks: list[Task], **how: Any) -> None:
        for task in tasks:
            self.asked.append(task["row"])
            how["on_result"](task, {"seconds": 1.0, **self.answers[task["row"]]})


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found = [f"timm/{name}/small/forward" for name in ("right", "crashed", "hung", "cut", "last")]
    monkeypatch.setattr(wide, "row_names", lambda: found)
    return found


def test_a_run_goes_on_where_the_last_one_stopped(
    rows: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {
        rows[0]: result(2.0, 1.5, 1.0),
        rows[1]: {"status": "crash", "message": "SIGSEGV"},
        rows[2]: {"status": "timeout", "message": "no answer in 480 s", "seconds": 481.0},
        rows[3]: {"status": "timeout", "message": "no answer in 9 s", "seconds": 9.0},
        rows[4]: result(2.0, 1.0, 1.0),
    }
    first, second = Pool(answers), Pool(answers | {rows[3]: result(1.0, 1.0, 1.0)})
    for pool in (first, second):
        monkeypatch.setattr(wide, "run_tasks", pool.run_tasks)
        assert wide.main(["--results", str(tmp_path)]) == 0
    assert (first.asked, second.asked) == (rows, [rows[3]])  # a row that was cut off is not known
    document = json.loads((tmp_path / "results.json").read_text())
    states = {name: found["status"] for name, found in document["rows"].items()}
    assert states == dict(zip(rows, ("pass", "crash", "timeout", "pass", "pass"), strict=True))
    assert document["machine"]["torch"] == torch.__version__
    assert "crash: SIGSEGV" in (tmp_path / "table.txt").read_text()
    assert (tmp_path / "rows.csv").read_text().count("\n") == 6
    assert "<svg" in (tmp_path / "ratios.svg").read_text()
    assert wide.main(["--results", str(tmp_path), "--show", "--check"]) == 1


def test_results_of_another_machine_are_not_added_to(tmp_path: Path) -> None:
    document = wide.load(tmp_path, "cpu", "wall") | {"rows": {ROW: result(1.0, 1.0, 1.0)}}
    wide.save(tmp_path, document | {"machine": document["machine"] | {"torch": "1.0"}})
    with pytest.raises(SystemExit, match=r"another machine: torch 1\.0"):
        wide.load(tmp_path, "cpu", "wall")


# -- figures -------------------------------------------------------------------------------------


def test_targets_are_met_where_every_row_is_ahead() -> None:
    rows = fabricated(a=result(3.0, 2.0, 1.0), b=result(2.0, 1.0, 1.0))
    assert [r["over_peer"] for r in rows] == [1.0, 2.0]
    found = wide_report.targets(rows, "cpu")
    assert all(target.is_met for target in found)
    assert "1.414x" in str(found[0])
    assert "all (2): 1.414x the peer (1.414x by best rounds), 2.449x eager" in wide_report.summary(
        rows, "cpu"
    )


def test_each_target_is_missed_by_the_row_that_misses_it() -> None:
    rows = fabricated(
        slow=result(0.9, 0.8, 1.0),
        near=result(1.0, 0.95, 1.0),
        fat=result(1.0, 1.0, 1.0, peaks=(100.0, 103.0)),
        wrong=result(1.0, 1.0, 1.0) | {"status": "wrong", "message": "output 0"},
        broken={"status": "crash", "message": "SIGSEGV"},
        absent={"status": "skip", "message": "no such model"},
    )
    mean, share, least, eager, peak, right = wide_report.targets(rows, "cpu")
    assert not any(t.is_met for t in (mean, share, least, eager, peak, right))
    assert share.found == "2 of 4, 50%"
    assert least.rows == ("timm/slow/small/forward 0.80x",)
    assert eager.rows == ("timm/slow/small/forward 0.90x",)
    assert peak.rows == ("timm/fat/small/forward 1.03x",)
    assert right.rows == ("timm/broken/small/forward crash", "timm/wrong/small/forward wrong")
    assert wide_report.targets(fabricated(a=result(1.0, 1.12, 1.0)), "cpu")[0].is_met
    assert not wide_report.targets(fabricated(a=result(1.0, 1.12, 1.0)), "cuda")[0].is_met


# -- a row ---------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.norm(self.inner(x)).relu()}


def task_of(row: str) -> Task:
    backends = ["eager", OURS]
    return {
        "row": row,
        "device": "cpu",
        "budget_s": 0.01,
        "backends": backends,
        "clock": "processor",
    }


@pytest.mark.parametrize("task", TASKS)
def test_a_row_is_judged_timed_and_its_peak_taken(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    subject = Subject(Net().train(task == "train"), ((noise(4, 8),), {}), "a net")
    monkeypatch.setattr(wide_measure, "subject_of", lambda row, device: subject)
    found = wide_measure.measured(task_of(f"timm/net/small/{task}"), Turn(None))
    assert (found["status"], found["recipe"]) == ("pass", "a net"), found
    for key in ("ms", "first_s", "peak_mb"):
        assert set(found[key]) == {"eager", OURS}
    fixed = sum(t.numel() * t.element_size() for t in subject.model.state_dict().values()) / 1e6
    assert fixed < found["peak_mb"]["eager"] < fixed + 0.01
    row = wide_report.figures(f"timm/net/small/{task}", found)
    assert row["over_eager"] > 0 and row["over_peer"] is None


def test_a_wrong_result_is_a_wrong_row(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    subject = Subject(Net().eval(), ((noise(4, 8),), {}))
    monkeypatch.setattr(wide_measure, "subject_of", lambda row, device: subject)
    right = torch.compile

    def wrong(model: nn.Module, **how: Any) -> Any:
        compiled = right(model, **how)
        return lambda *args: {"y": compiled(*args)["y"] * 1.001}

    monkeypatch.setattr(torch, "compile", wrong)
    monkeypatch.setattr(wide_measure, "warm_up", lambda backends, device: None)
    found = wide_measure.measured(task_of(ROW), Turn(None))
    assert found["status"] == "wrong" and "output 0" in found["message"]


# -- turns ---------------------------------------------------------------------------------------

WORKER = """
import sys, time
from benchmarks.turns import working
with working() as turn:
    time.sleep(0.2)
    with turn.alone():
        began = time.time()
        time.sleep(0.1)
        print(began, time.time())
"""


def test_those_who_compile_together_measure_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TURN, str(tmp_path / "turn"))
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    times = sorted(
        tuple(map(float, worker.communicate(timeout=60)[0].split())) for worker in started
    )
    assert [worker.returncode for worker in started] == [0] * 4
    for (_, ended), (began, _) in itertools.pairwise(times):
        assert ended <= began
