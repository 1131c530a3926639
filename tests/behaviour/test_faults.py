"""Every operation on the system goes wrong once, in every way: in a compile, a load, an artefact.

After each, the result is right or the error is Perfuse's own and gives advice; the next process,
on what the first has left behind, is right; and nothing that is not Perfuse's has changed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import perfuse
from perfuse.build import loader
from perfuse.cache import folders
from perfuse.config import Settings
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.errors import PerfuseError
from perfuse.graph_cache import load_or_compile
from perfuse.runtime.package import read_package, write_package
from perfuse.system import System, replaced
from perfuse.target import find_compiler, host_target
from tests.behaviour.scripts import finish, start
from tests.harness.faults import FAILING, FAULTS, Double, Fault, Killed

pytestmark = pytest.mark.skipif(not find_compiler(""), reason="no C++ compiler")

X = torch.linspace(-1, 1, 12).reshape(3, 4)
# By hand: every point is followed by a true process, not only one in so many.
PROCESS_EVERY = int(os.environ.get("PROCESS_EVERY", "400"))


def function(x: Tensor) -> Tensor:
    return (x * 2 + 1).relu().sum(-1)


class Place:
    """A folder with a cache, an artefact and files of others, and what is done there."""

    def __init__(self, root: Path, module: GraphModule) -> None:
        self.cache, self.artefact = root / "cache", root / "artefact"
        self.whole = root / "whole"  # an artefact that nothing happens to
        self.module = module
        self.others = [self.cache / "tmp" / "theirs", self.cache / "theirs", root / "theirs"]
        for path in self.others:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("not yours")
        self.stamps = self.stamps_of_others()

    def stamps_of_others(self) -> list[tuple[int, int]]:
        return [(path.stat().st_mtime_ns, path.stat().st_ino) for path in self.others]

    def compiled(self) -> Tensor:
        """As a new process does it: no store is open, no library loaded."""
        overrides = {"cache.dir": str(self.cache), "cpu.threads": 1, "cpu.opt_level": 1}
        settings = Settings().with_overrides(overrides)
        context = Context(host_target(settings), settings, Counters())
        loader._loaded.clear()
        made = load_or_compile(self.module, context)
        return made.call([X])[0]

    def empty(self) -> None:
        """Remove what was cached."""
        for path in self.cache.glob("*perfuse-v1*"):
            shutil.rmtree(path)

    def restore(self) -> None:
        """Put the artefact back as it was."""
        for path in self.whole.parent.glob("*artefact*"):
            shutil.rmtree(path)
        shutil.copytree(self.whole, self.artefact)

    def loaded_artefact(self) -> Tensor:
        loader._loaded.clear()
        got: Tensor = perfuse.load(self.artefact)(X)
        return got

    def rewritten_artefact(self) -> Tensor:
        """Written in place of the one that is there, then loaded."""
        with replaced(System()):
            package = read_package(self.whole)
        about = {k: v for k, v in package.about.items() if k not in ("kind", "files")}
        write_package(self.artefact, package.files, about)
        return self.loaded_artefact()


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    # Not pytest's own folder: each of its many levels would be looked at, and fail, again.
    # In memory where that is possible: there, an fsync costs nothing.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield prepared(Path(folder))


def prepared(folder: Path) -> Place:
    module = make_fx(lambda x: (function(x),), tracing_mode="fake")(X)
    place = Place(folder, module)
    with perfuse.config.patch({"cache.dir": str(place.cache)}):
        perfuse.aot_compile(function, (X,), place.whole)
    place.restore()
    with replaced(Double()):
        place.empty()
        assert torch.equal(place.compiled(), function(X))
        assert torch.equal(place.loaded_artefact(), function(X))
    return place


# What is done, and what is there before.
PROGRAMS: dict[str, tuple[Callable[[Place], Tensor], Callable[[Place], object]]] = {
    "compile": (Place.compiled, Place.empty),
    "load": (Place.compiled, lambda place: None),
    "write artefact": (Place.rewritten_artefact, Place.restore),
    "load artefact": (Place.loaded_artefact, Place.restore),
}


# What the next process does: an artefact may be damaged now, and is written again.
NEXT: dict[str, tuple[Callable[[Place], Tensor], ...]] = {
    "compile": (Place.compiled,),
    "load": (Place.compiled,),
    "write artefact": (Place.loaded_artefact, Place.rewritten_artefact),
    "load artefact": (Place.loaded_artefact,),
}


class Tally:
    """An attempt and its outcome."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.foreign: list[str] = []

    def judge(self, point: str, run: Callable[[], Tensor]) -> None:
        """A right result, or an error of Perfuse's own that gives advice."""
        try:
            got = run()
        except PerfuseError as error:
            self.counts["own errors"] += 1
            if error.hint is None:
                self.foreign.append(f"{point}: no advice: {error}")
        except Killed:
            self.counts["killed"] += 1
        except Exception as error:
            self.foreign.append(f"{point}: {type(error).__name__}: {error}")
        else:
            self.counts["right results"] += 1
            if not torch.equal(got, function(X)):
                self.wrong.append(point)


def points(
    program: Callable[[Place], Tensor], place: Place, num_errors: int
) -> Iterator[tuple[int, Fault, str]]:
    """Every operation of a program with every fault; of the errors, so many in turn."""
    with replaced(Double()) as double:
        program(place)
    assert isinstance(double, Double)
    double.close_libraries()
    for number, name in enumerate(double.calls):
        errors = [FAILING[(number + k) % len(FAILING)] for k in range(num_errors)]
        for fault in (*errors, *FAULTS):
            if name in fault.only:
                yield number, fault, f"{name} #{number}: {fault.name}"


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(
    "num_errors", [1, pytest.param(len(FAILING), marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_every_operation_fails_once(
    place: Place,
    name: str,
    num_errors: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program, prepare = PROGRAMS[name]
    private = place.cache.parent / "private"
    private.mkdir(exist_ok=True)
    monkeypatch.setattr(folders, "temporary_folders", lambda: (private,))
    tally = Tally()
    warnings.simplefilter("ignore")
    prepare(place)
    for number, fault, what in list(points(program, place, num_errors)):
        prepare(place)
        folders._private.cache_clear()
        before = set(os.listdir("/proc/self/fd"))
        double, after = Double(fault, number), Double()
        with replaced(after):
            double.meanwhile = lambda: program(place)
            with replaced(double):
                tally.judge(f"{name}, {what}", lambda: program(place))
            for again in NEXT[name]:
                tally.judge(f"{name}, after {what}", partial(again, place))
        for made in (double, after):
            made.close_libraries()
        tally.counts["points"] += 1
        left_open = set(os.listdir("/proc/self/fd")) - before
        if fault.name != "killed" and len(left_open) > 1:  # one is that of the listing itself
            tally.foreign.append(f"{name}, {what}: descriptors left open")
        for fd in left_open:
            with suppress(OSError):
                os.close(int(fd))
        if tally.counts["points"] % PROCESS_EVERY == 0:
            tally.judge(f"{name}, process after {what}", lambda: in_a_true_process(place))
    touched = place.stamps_of_others() != place.stamps
    with capsys.disabled():
        told = ", ".join(f"{n} {what}" for what, n in tally.counts.items())
        print(
            f"\n{name}: {told}; {len(tally.wrong)} wrong results, "
            f"{len(tally.foreign)} foreign exceptions, {int(touched)} files of others touched"
        )
    assert not tally.wrong and not tally.foreign and not touched, tally.wrong + tally.foreign
    assert tally.counts["points"] > 100


SCRIPT = """
import json
import sys
import torch
import perfuse

x = torch.linspace(-1, 1, 12).reshape(3, 4)
f = torch.compile(lambda x: (x * 2 + 1).relu().sum(-1), backend="perfuse")
print(json.dumps({"values": f(x).tolist()}))
"""


def in_a_true_process(place: Place) -> Tensor:
    return torch.tensor(finish(start(SCRIPT, place.cache))["values"])
