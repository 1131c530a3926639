"""The store: whole entries or none, whatever happens to the disk or in other processes."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import tempfile
import time
import warnings
from contextlib import closing
from pathlib import Path

import pytest

from perfuse.cache.manifest import Entry
from perfuse.cache.root import NAME, TAG_TEXT
from perfuse.cache.store import Store
from perfuse.counters import Counters
from perfuse.errors import CacheDamaged
from perfuse.system import System, replaced
from tests.harness.processes import NOBODY, in_child

MIB = 1 << 20
KEY = "0123abcd"


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def store(tmp_path: Path, counters: Counters) -> Store:
    return Store(tmp_path / "cache", MIB, counters)


def reopened(store: Store, counters: Counters) -> Store:
    """The same folder as another process would see it."""
    return Store(folder_of(store), store.max_bytes, counters)


def folder_of(store: Store) -> Path:
    """The folder that the settings would name."""
    assert store.root is not None
    return store.root.folder


def path_of(store: Store) -> Path:
    """The folder of the store's own."""
    assert store.root is not None
    return store.root.path


def test_put_then_get(store: Store, counters: Counters) -> None:
    entry = store.put(KEY, {"a.txt": b"one", "b.txt": b"two"}, {"compiler": "g++ 12"})
    assert store.get(KEY) == entry == reopened(store, counters).get(KEY)
    assert entry.read_text("a.txt") == "one" and entry.files == ("a.txt", "b.txt")
    manifest = json.loads((place(entry) / "manifest.json").read_text())
    assert manifest["created_by"]["compiler"] == "g++ 12" and manifest["key"] == KEY


def place(entry: Entry) -> Path:
    assert entry.path is not None
    return entry.path


def test_unknown_key_is_none(store: Store, counters: Counters) -> None:
    assert store.get(KEY) is None
    assert counters["cache.damaged"] == 0


def test_root_is_private(store: Store) -> None:
    assert path_of(store).stat().st_mode & 0o777 == 0o700
    assert folder_of(store).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("key", ["", "../up", "a/b", ".hidden"])
def test_keys_stay_inside(store: Store, key: str) -> None:
    with pytest.raises(ValueError):
        store.get(key)


@pytest.mark.parametrize("name", ["../up", "a/b", "manifest.json"])
def test_names_stay_inside(store: Store, name: str) -> None:
    with pytest.raises(ValueError):
        store.put(KEY, {name: b""})


def flip(entry: Path) -> None:
    (entry / "a").write_bytes(b"XXXX")


def truncate(entry: Path) -> None:
    (entry / "a").write_bytes(b"")


def lose_file(entry: Path) -> None:
    (entry / "a").unlink()


def lose_manifest(entry: Path) -> None:
    (entry / "manifest.json").unlink()


def garble_manifest(entry: Path) -> None:
    (entry / "manifest.json").write_bytes(b"\xff{")


def rewrite(entry: Path, **changes: object) -> None:
    """Change the manifest, which stays JSON."""
    document = json.loads((entry / "manifest.json").read_text())
    (entry / "manifest.json").write_text(json.dumps({**document, **changes}))


def escape(entry: Path) -> None:
    rewrite(entry, files={"../../x": {"bytes": 4, "sha256": "0"}})


def nest(entry: Path) -> None:
    (entry / "manifest.json").write_text("[" * 100_000)


def be_a_list(entry: Path) -> None:
    (entry / "manifest.json").write_text("[1, 2]")


def list_numbers(entry: Path) -> None:
    rewrite(entry, files={"a": 3})


def list_nothing(entry: Path) -> None:
    rewrite(entry, files=None)


def be_another(entry: Path) -> None:
    rewrite(entry, key="another")


def lose_key(entry: Path) -> None:
    rewrite(entry, key=None)


def be_older(entry: Path) -> None:
    rewrite(entry, format=1)


def have_huge_number(entry: Path) -> None:
    (entry / "manifest.json").write_text('{"format": ' + "9" * 10_000 + "}")


def be_a_folder(entry: Path) -> None:
    (entry / "a").unlink()
    (entry / "a").mkdir()


def be_a_pipe(entry: Path) -> None:
    (entry / "a").unlink()
    os.mkfifo(entry / "a")


def be_a_link(entry: Path) -> None:
    (entry / "a").rename(entry / "b")
    (entry / "a").symlink_to("b")


DAMAGES = [
    flip,
    truncate,
    lose_file,
    lose_manifest,
    garble_manifest,
    escape,
    nest,
    be_a_list,
    list_numbers,
    list_nothing,
    be_another,
    lose_key,
    be_older,
    have_huge_number,
    be_a_folder,
    be_a_pipe,
    be_a_link,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_entry_is_removed_and_rebuilt(store, counters, damage) -> None:  # type: ignore[no-untyped-def]
    damage(place(store.put(KEY, {"a": b"good"})))
    later = reopened(store, counters)
    assert later.get(KEY) is None
    assert counters["cache.damaged"] + counters["cache.refused"] == 1
    assert later.put(KEY, {"a": b"good"}).read_text("a") == "good"
    assert reopened(store, counters).get(KEY) is not None


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_put_replaces_a_damaged_entry(store, counters, damage) -> None:  # type: ignore[no-untyped-def]
    damage(place(store.put(KEY, {"a": b"good"})))
    assert reopened(store, counters).put(KEY, {"a": b"good"}).read_text("a") == "good"
    assert reopened(store, counters).get(KEY) is not None


def test_exchanged_entries_are_not_taken_for_each_other(store: Store, counters: Counters) -> None:
    """Both are whole and have their checksums; only the manifest's key tells them apart."""
    one, two = (place(store.put(key, {"a": key.encode()})) for key in ("one", "two"))
    one.rename(one.parent / "three")
    two.rename(one)
    (one.parent / "three").rename(two)
    later = reopened(store, counters)
    assert later.get("one") is None and later.get("two") is None
    assert counters["cache.damaged"] == 2


def test_an_entry_that_does_not_work_is_forgotten(store: Store, counters: Counters) -> None:
    store.put(KEY, {"a": b"whole, but useless"})
    store.discard(KEY)
    assert store.get(KEY) is None and counters["cache.damaged"] == 1


def test_files_of_an_entry_that_are_not_there(store: Store) -> None:
    entry = store.put(KEY, {"a": b"\xff", "b": b"{"})
    for read in (entry.read_bytes, entry.read_text, entry.read_json):
        with pytest.raises(CacheDamaged):
            read("c")
    for read, name in ((entry.read_text, "a"), (entry.read_json, "b")):
        with pytest.raises(CacheDamaged):
            read(name)


def test_second_put_takes_the_first(store: Store) -> None:
    store.put(KEY, {"a": b"first"})
    assert store.put(KEY, {"a": b"second"}).read_text("a") == "first"
    assert list((path_of(store) / "tmp").iterdir()) == []


def race(root: str, start: float, results: multiprocessing.Queue[str]) -> None:
    store = Store(Path(root), MIB)
    time.sleep(max(0.0, start - time.time()))
    for i in range(20):
        entry = store.put(f"key{i}", {"a": f"{os.getpid()} {i}".encode() * 100})
        again = store.get(f"key{i}")
        if again is None or again.read_text("a") != entry.read_text("a"):
            results.put(f"key{i} changed")
    results.put("done")


def test_eight_processes_race(store: Store) -> None:
    spawn = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[str] = spawn.Queue()
    args = (str(folder_of(store)), time.time() + 0.3, results)
    racers = [spawn.Process(target=race, args=args) for _ in range(8)]
    for racer in racers:
        racer.start()
    said = [results.get(timeout=60) for _ in racers]
    for racer in racers:
        racer.join()
    assert said == ["done"] * 8
    assert all(store.get(f"key{i}") is not None for i in range(20))
    assert list((path_of(store) / "tmp").iterdir()) == []


def age(store: Store, key: str, by_s: float) -> None:
    when = time.time() - by_s
    os.utime(path_of(store) / "entries" / key, (when, when))


def filled(tmp_path: Path, counters: Counters) -> Store:
    writer = Store(tmp_path / "cache", 100 * MIB, counters)
    for i in range(8):
        writer.put(f"key{i}", {"a": bytes(300_000)})
        age(writer, f"key{i}", by_s=8000 - 1000 * i)
    return Store(tmp_path / "cache", MIB, counters, young_s=600)


def test_least_recently_used_go_first(tmp_path: Path, counters: Counters) -> None:
    store = filled(tmp_path, counters)
    store.get("key0")  # used just now: stays
    assert store.evict() == counters["cache.evicted"] == 5
    kept = sorted(path.name for path in (path_of(store) / "entries").iterdir())
    assert kept == ["key0", "key6", "key7"]


def test_young_entries_stay(tmp_path: Path, counters: Counters) -> None:
    store = filled(tmp_path, counters)
    for i in range(8):
        age(store, f"key{i}", by_s=10)
    assert store.evict() == 0


def test_putting_much_evicts(tmp_path: Path, counters: Counters) -> None:
    store = filled(tmp_path, counters)
    store.put("new", {"a": bytes(100_000)})
    assert counters["cache.evicted"] > 0
    assert store.get("new") is not None


def test_stale_scratch_is_removed(store: Store) -> None:
    left = path_of(store) / "tmp" / "perfuse-0123456789abcdef"
    left.mkdir(parents=True)
    os.utime(left, (0, 0))
    store.put(KEY, {"a": b""})
    assert not left.exists()


def test_what_is_not_ours_is_not_removed(tmp_path: Path, counters: Counters) -> None:
    """A folder in use by others: its tmp/, failed/ and entries/ are theirs, however old."""
    disk = tmp_path / "fast" / "disk"
    theirs = [disk / name for name in ("tmp", "failed", "entries", "tmp/x", "manifest.json/y")]
    for folder in theirs:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "precious.txt").write_text("not yours")
    store = Store(disk, 1000, counters, young_s=0)
    ours = path_of(store)
    strays = [ours / "tmp" / "stray", ours / "entries" / "stray", ours / "entries" / "folder/x"]
    for number in range(8):
        store.put(f"key{number}", {"a": bytes(300)})
        age(store, f"key{number}", by_s=8000)
    for stray in strays:
        stray.parent.mkdir(exist_ok=True)
        stray.write_text("not yours")
    before = sorted(p for p in disk.rglob("*") if not p.is_relative_to(ours))
    for path in [*before, *strays, *(ours / "entries").iterdir()]:
        os.utime(path, (0, 0))
    store.evict()
    assert counters["cache.evicted"] > 0
    store.clear()
    assert sorted(p for p in disk.rglob("*") if not p.is_relative_to(ours)) == before
    assert all(stray.read_text() == "not yours" for stray in strays)
    assert store.usages() == []


def test_a_folder_of_the_same_name_is_left_alone(tmp_path: Path, counters: Counters) -> None:
    theirs = tmp_path / NAME / "thesis.txt"
    theirs.parent.mkdir(mode=0o700)
    theirs.write_text("not yours")
    with pytest.warns(RuntimeWarning, match="not created by Perfuse"):
        store = Store(tmp_path, MIB, counters)
    assert store.put(KEY, {"a": b"good"}).read_text("a") == "good"
    assert [path.name for path in theirs.parent.iterdir()] == ["thesis.txt"]


def test_a_root_without_its_tag_is_given_one(store: Store, counters: Counters) -> None:
    store.put(KEY, {"a": b"good"})
    (path_of(store) / "CACHEDIR.TAG").write_text("Sig")
    assert reopened(store, counters).get(KEY) is not None
    assert (path_of(store) / "CACHEDIR.TAG").read_bytes() == TAG_TEXT


def test_a_cache_deleted_while_in_use_is_made_again(store: Store, counters: Counters) -> None:
    store.put(KEY, {"a": b"good"})
    shutil.rmtree(folder_of(store))
    assert store.get(KEY) is None
    store.put(KEY, {"a": b"good"})
    shutil.rmtree(path_of(store) / "tmp")
    store.put("other", {"a": b"good"})
    assert reopened(store, counters).get("other") is not None


def test_without_a_folder_entries_are_in_memory() -> None:
    store = Store(None, MIB)
    assert store.put(KEY, {"a": b"good"}) == store.get(KEY)
    assert store.evict() == 0 and store.usages() == []
    with closing(store.scratch_folders()) as folders:
        assert next(folders).is_dir()


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfuse.cache.store.MEMORY_BYTES", 100)
    store = Store(None, MIB)
    for number in range(5):
        store.put(f"key{number}", {"a": bytes(40)})
    assert [store.get(f"key{number}") is not None for number in range(5)] == [0, 0, 0, 1, 1]


def test_world_writable_root_is_refused(tmp_path: Path, counters: Counters) -> None:
    root = tmp_path / "open"
    root.mkdir()
    root.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="others can write"):
        store = Store(root, MIB, counters)
    assert store.put(KEY, {"a": b"good"}).read_text("a") == "good"
    assert list(root.iterdir()) == []


def test_foreign_root_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(tmp_path, MIB)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.warns(RuntimeWarning, match="belongs to user"):
        store = Store(tmp_path, MIB)
    assert store.root is None


def test_a_link_of_the_users_own_is_followed(tmp_path: Path, counters: Counters) -> None:
    (tmp_path / "disk" / "deep").mkdir(parents=True)
    (tmp_path / "home").symlink_to("disk/../disk")
    (tmp_path / "absolute").symlink_to(tmp_path / "home" / "deep")
    Store(tmp_path / "absolute", MIB, counters).put(KEY, {"a": b"good"})
    assert (tmp_path / "disk" / "deep" / NAME / "entries" / KEY).is_dir()


def test_a_link_to_itself(tmp_path: Path, counters: Counters) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.warns(RuntimeWarning, match="runs without its cache"):
        Store(tmp_path / "loop", MIB, counters).put(KEY, {"a": b"good"})


def test_root_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(RuntimeWarning, match="runs without its cache"):
        store = Store(tmp_path / "file" / "cache", MIB)
    assert store.put("unmakeable", {"a": b"good"}).read_text("a") == "good"


class Failing(System):
    """Fails every call of some operations in one folder's file system."""

    def __init__(self, errno: int, *names: str) -> None:
        self.errno = errno
        for name in names:
            setattr(self, name, self.fail)

    def fail(self, *args: object, **kwargs: object) -> int:
        raise OSError(self.errno, os.strerror(self.errno))


@pytest.mark.parametrize("operation", ["mkdir", "write", "rename"])
@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_disk_that_takes_nothing_warns_once(
    store: Store, counters: Counters, operation: str, number: int
) -> None:
    store.put(KEY, {"a": b"good"})
    with replaced(Failing(number, operation)):
        assert store.get(KEY) is not None  # what is there can still be read
        with pytest.warns(RuntimeWarning, match=os.strerror(number)):
            store.put("new1", {"a": b"one"})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert store.put("new2", {"a": b"two"}).read_text("a") == "two"
            assert store.get("new1") is not None and store.get(KEY) is not None
    assert counters["cache.unusable"] == 1
    kept = [path.name for path in (path_of(store) / "entries").iterdir()]
    assert kept == [KEY]  # nothing half made


def test_read_only_folder() -> None:
    def work() -> None:
        with tempfile.TemporaryDirectory() as name:
            store = Store(Path(name), MIB)
            store.put(KEY, {"a": b"good"})
            for path in Path(name).rglob("*"):
                path.chmod(0o500 if path.is_dir() else 0o400)
            with pytest.warns(RuntimeWarning, match="Permission denied"):
                assert store.put("readonly3", {"a": b"good"}).read_text("a") == "good"
            assert Store(Path(name), MIB).get(KEY) is not None
            for path in Path(name).rglob("*"):
                path.chmod(0o700)

    in_child(work, uid=NOBODY)
