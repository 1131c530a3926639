"""Another user tries to have code run: one attack for every row of docs/security.md.

The attacker has a copy of the cache in which every host program and every library leaves a mark
when it is run, with checksums and keys as they should be. After each attack the victim compiles
and gets the right result, and no mark is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from perfuse.build import loader
from perfuse.cache import folders
from perfuse.cache.root import NAME
from perfuse.config import Settings
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.graph_cache import load_or_compile
from perfuse.system import System, replaced, system
from perfuse.target import find_compiler, host_target
from tests.harness.faults import Double, Fault
from tests.harness.processes import NOBODY, in_child

pytestmark = [
    pytest.mark.skipif(not find_compiler("g++"), reason="no C++ compiler"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can play two users"),
]
SECURITY = Path(__file__).parents[2] / "docs" / "security.md"
X = torch.linspace(-1, 1, 12).reshape(3, 4)
EVIL = """#include <fcntl.h>
__attribute__((constructor)) static void run() {{ creat("{mark}", 0644); }}
extern "C" void segment0(void** p, const long* s) {{ run(); }}
"""


def function(x: Tensor) -> Tensor:
    return (x * 2 + 1).relu().sum(-1)


MODULE = make_fx(lambda x: (function(x),), tracing_mode="fake")(X)


class Scene:
    """The victim's cache in a folder with parents, and the attacker's copy of it."""

    def __init__(self, top: Path, mark: Path) -> None:
        self.top = top
        self.parent = top / "parent"
        self.cache = self.parent / "cache"
        self.named = self.cache  # what the victim's settings say
        self.evil, self.mark = top / "evil", mark
        self.context = self.new_context()

    @staticmethod
    def made(top: Path, mark: Path) -> Scene:
        """One in which nothing has happened yet."""
        scene = Scene(top, mark)
        top.chmod(0o755)
        scene.cache.mkdir(parents=True)
        mark.parent.mkdir()
        mark.parent.chmod(0o777)
        scene.run()
        scene._make_evil()
        return scene

    @property
    def root(self) -> Path:
        return self.cache / NAME

    @property
    def entries(self) -> list[Path]:
        return sorted((self.root / "entries").iterdir())

    def new_context(self) -> Context:
        overrides = {"cache.dir": str(self.named), "cpu.threads": 1}
        settings = Settings().with_overrides(overrides)
        return Context(host_target(settings), settings, Counters())

    def run(self) -> Tensor:
        """The victim's process, with a compiler that answers at once."""
        loader._loaded.clear()
        is_watched = type(system()) is not System
        with nullcontext() if is_watched else replaced(Double()):
            return load_or_compile(MODULE, self.context).call([X])[0]

    def is_pwned(self) -> bool:
        return self.mark.exists()

    def _make_evil(self) -> None:
        """Whole, with right keys and checksums, and the attacker's."""
        shutil.copytree(self.root, self.evil)
        for entry in (self.evil / "entries").iterdir():
            _poison(entry, self.mark)
        for path in [self.evil, *self.evil.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
            os.chown(path, NOBODY, NOBODY)

    def let_in(self, *paths: Path) -> None:
        """The attacker may look into the folders that lead here."""
        for path in (self.parent, self.cache, self.root, self.root / "entries", *self.entries):
            if path.is_dir() and not path.stat().st_mode & stat.S_IWOTH:
                path.chmod(0o755)
        for path in paths:
            path.chmod(0o777)

    def as_attacker(self, work: Callable[[], object]) -> None:
        in_child(work, uid=NOBODY)


def _poison(entry: Path, mark: Path) -> None:
    if (entry / "library.so").exists():
        source = EVIL.format(mark=mark)
        command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(entry / "library.so")]
        subprocess.run(command, input=source.encode(), check=True)
    if (entry / "program.json").exists():
        document = json.loads((entry / "program.json").read_text())
        document["host"]["text"] = f"open({str(mark)!r}, 'w')\n" + document["host"]["text"]
        (entry / "program.json").write_text(json.dumps(document))
    manifest = json.loads((entry / "manifest.json").read_text())
    for name, row in manifest["files"].items():
        data = (entry / name).read_bytes()
        row |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (entry / "manifest.json").write_text(json.dumps(manifest))


Attack = Callable[[Scene], None]
ATTACKS: dict[str, Attack] = {}


def attack(row: str) -> Callable[[Attack], Attack]:
    """Name the row of docs/security.md that a function tries."""

    def note(function: Attack) -> Attack:
        ATTACKS[row] = function
        return function

    return note


def swap_root(scene: Scene) -> None:
    def work() -> None:
        os.rename(scene.root, scene.cache / "stolen")
        shutil.copytree(scene.evil, scene.root)

    scene.as_attacker(work)


@attack("the folder is open")
def _folder_open(scene: Scene) -> None:
    scene.let_in(scene.cache)
    swap_root(scene)


@attack("the folder was open")
def _folder_was_open(scene: Scene) -> None:
    scene.let_in(scene.cache)
    swap_root(scene)
    scene.cache.chmod(0o700)


@attack("the folder is another's")
def _folder_foreign(scene: Scene) -> None:
    scene.let_in()
    os.chown(scene.cache, NOBODY, NOBODY)
    swap_root(scene)


@attack("a parent is open")
def _parent_open(scene: Scene) -> None:
    scene.let_in(scene.parent)

    def work() -> None:
        os.rename(scene.cache, scene.parent / "stolen")
        scene.cache.mkdir(mode=0o755)
        shutil.copytree(scene.evil, scene.root)

    scene.as_attacker(work)


@attack("a parent is another's")
def _parent_foreign(scene: Scene) -> None:
    scene.let_in()
    os.chown(scene.parent, NOBODY, NOBODY)

    def work() -> None:
        os.rename(scene.cache, scene.parent / "stolen")
        scene.cache.mkdir(mode=0o755)
        shutil.copytree(scene.evil, scene.root)

    scene.as_attacker(work)


@attack("a link of another's on the way")
def _link_on_the_way(scene: Scene) -> None:
    """In a folder such as /tmp, where everybody may make links but not exchange others' files."""
    shared, trap = scene.top / "shared", scene.top / "trap"
    shared.mkdir()
    shared.chmod(0o1777)
    trap.mkdir()
    shutil.copytree(scene.evil, trap / NAME)  # the victim's by owner: copied by itself
    scene.as_attacker(lambda: os.symlink(trap, shared / "cache"))
    scene.named = shared / "cache"


@attack("the root is a link")
def _root_link(scene: Scene) -> None:
    scene.let_in(scene.cache)

    def work() -> None:
        os.rename(scene.root, scene.cache / "stolen")
        os.symlink(scene.evil, scene.root)

    scene.as_attacker(work)
    scene.cache.chmod(0o700)


@attack("the root is open")
def _root_open(scene: Scene) -> None:
    scene.let_in(scene.root)

    def work() -> None:
        os.rename(scene.root / "entries", scene.root / "tmp-stolen")
        shutil.copytree(scene.evil / "entries", scene.root / "entries")

    scene.as_attacker(work)


@attack("entries/ is open")
def _entries_open(scene: Scene) -> None:
    scene.let_in(scene.root / "entries")
    swap_entries(scene)


def swap_entries(scene: Scene) -> None:
    def work() -> None:
        for entry in scene.entries:
            os.rename(entry, entry.with_name(f"stolen-{entry.name}"))
            shutil.copytree(scene.evil / "entries" / entry.name, entry)

    scene.as_attacker(work)


@attack("entries/ was open")
def _entries_were_open(scene: Scene) -> None:
    _entries_open(scene)
    (scene.root / "entries").chmod(0o700)


@attack("entries/ is another's")
def _entries_foreign(scene: Scene) -> None:
    scene.let_in()
    os.chown(scene.root / "entries", NOBODY, NOBODY)
    swap_entries(scene)


@attack("entries/ is a link")
def _entries_link(scene: Scene) -> None:
    shutil.rmtree(scene.root / "entries")
    (scene.root / "entries").symlink_to(scene.evil / "entries")


@attack("an entry is open")
def _entry_open(scene: Scene) -> None:
    scene.let_in(*scene.entries)
    overwrite_files(scene)


def overwrite_files(scene: Scene) -> None:
    def work() -> None:
        for entry in scene.entries:
            for file in entry.iterdir():
                file.unlink()
                shutil.copy(scene.evil / "entries" / entry.name / file.name, file)

    scene.as_attacker(work)


@attack("an entry was open")
def _entry_was_open(scene: Scene) -> None:
    _entry_open(scene)
    for entry in scene.entries:
        entry.chmod(0o700)


@attack("an entry is a link")
def _entry_link(scene: Scene) -> None:
    for entry in scene.entries:
        shutil.rmtree(entry)
        entry.symlink_to(scene.evil / "entries" / entry.name)


@attack("a file is open")
def _file_open(scene: Scene) -> None:
    """Written in place: the owner is still the victim."""
    scene.let_in()
    files = [file for entry in scene.entries for file in entry.iterdir()]
    for file in files:
        file.chmod(0o666)

    def work() -> None:
        for file in files:
            file.write_bytes((scene.evil / "entries" / file.parent.name / file.name).read_bytes())

    scene.as_attacker(work)


@attack("a file is a link")
def _file_link(scene: Scene) -> None:
    for entry in scene.entries:
        for file in entry.iterdir():
            file.unlink()
            file.symlink_to(scene.evil / "entries" / entry.name / file.name)


@attack("a file is another's, by a hard link")
def _file_hard_link(scene: Scene) -> None:
    for entry in scene.entries:
        for file in entry.iterdir():
            file.unlink()
            os.link(scene.evil / "entries" / entry.name / file.name, file)


@pytest.fixture(scope="module")
def untouched() -> Iterator[Scene]:
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        yield Scene.made(top, top / "marks" / "mark")


@pytest.fixture
def scene(untouched: Scene) -> Iterator[Scene]:
    untouched.mark.unlink(missing_ok=True)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subprocess.run(["cp", "-a", f"{untouched.top}/.", folder], check=True)
        yield Scene(Path(folder), untouched.mark)


@pytest.mark.parametrize("is_open_before", [False, True], ids=["new store", "open store"])
@pytest.mark.parametrize("row", ATTACKS)
def test_nothing_of_another_user_is_executed(scene: Scene, row: str, is_open_before: bool) -> None:
    ATTACKS[row](scene)
    if not is_open_before:
        scene.context = scene.new_context()
    for _ in range(2):
        assert torch.equal(scene.run(), function(X))
        assert not scene.is_pwned()


def test_the_mark_works(scene: Scene) -> None:
    """The attacker's code does run once the victim owns it: the tests above can fail."""
    for path in [scene.evil, *scene.evil.rglob("*")]:
        os.chown(path, 0, 0)
    shutil.rmtree(scene.root)
    scene.evil.rename(scene.root)
    scene.run()
    assert scene.is_pwned()


@pytest.mark.parametrize("level", ["files", "entry", "entries", "root"])
def test_exchanged_at_any_moment(scene: Scene, level: str) -> None:
    """The attacker, by a right that was left open, strikes before any single operation."""
    with replaced(Double()) as double:
        scene.run()
    assert isinstance(double, Double)
    good = scene.top / "good"
    shutil.copytree(scene.root, good)
    strike = Fault("strike", lambda double, real, args: (double.meanwhile(), real())[1])
    for number in range(len(double.calls)):
        acting = Double(strike, number)
        acting.meanwhile = lambda: exchange(scene, level)
        with replaced(acting):
            got = scene.run()
        acting.close_libraries()
        assert torch.equal(got, function(X)) and not scene.is_pwned(), acting.calls[number]
        shutil.rmtree(scene.root, ignore_errors=True)
        shutil.copytree(good, scene.root)


def exchange(scene: Scene, level: str) -> None:
    """Done by root on the attacker's behalf: owners stay the attacker's."""
    pairs = {
        "root": [(scene.evil, scene.root)],
        "entries": [(scene.evil / "entries", scene.root / "entries")],
        "entry": [(scene.evil / "entries" / e.name, e) for e in scene.entries],
        "files": [
            (scene.evil / "entries" / e.name / f.name, f)
            for e in scene.entries
            for f in e.iterdir()
        ],
    }[level]
    for number, (source, target) in enumerate(pairs):
        aside = scene.top / f"aside-{number}"
        if source.is_dir():
            shutil.copytree(source, aside, copy_function=shutil.copy2)
            shutil.rmtree(target)
        else:
            shutil.copy2(source, aside)
        for path in [aside, *aside.rglob("*")]:
            os.chown(path, NOBODY, NOBODY)
        os.rename(aside, target)


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_temporary_folders_that_others_can_exchange_are_not_used(
    scene: Scene, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, foreign = scene.top / "shared", scene.top / "foreign"
    for path in (shared, foreign):
        path.mkdir()
    shared.chmod(mode)
    os.chown(shared, 0, NOBODY)
    os.chown(foreign, NOBODY, NOBODY)
    monkeypatch.setattr(folders, "temporary_folders", lambda: (shared, foreign))
    assert list(folders.private_folders()) == []


def test_what_is_loaded_cannot_be_changed_any_more(scene: Scene) -> None:
    """The very bytes that were checked are loaded, from memory that nobody can write."""
    seen: list[int] = []

    class Looking(System):
        def dlopen(self, path: str, mode: int = 0) -> object:  # type: ignore[override]
            if path.startswith("/proc/self/fd"):
                fd = os.open(path, os.O_RDWR)
                try:
                    os.write(fd, b"evil")
                except PermissionError:
                    seen.append(fd)
                finally:
                    os.close(fd)
            return super().dlopen(path)

    with replaced(Looking()):
        scene.run()
    assert len(seen) == 1


def test_every_row_of_the_document_is_tried() -> None:
    table = SECURITY.read_text().partition("| attack |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE)
    assert sorted(rows) == sorted(ATTACKS)
