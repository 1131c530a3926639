"""The store: whole entries or none, whatever happens to the disk or in other processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
import warnings
from pathlib import Path

import pytest

from perfuse.build import folders
from perfuse.build.store import Store
from perfuse.counters import Counters

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
    return Store(store.root, store.max_bytes, counters)


def test_put_then_get(store: Store, tmp_path: Path, counters: Counters) -> None:
    given = tmp_path / "given"
    given.write_bytes(b"by path")
    entry = store.put(KEY, {"a.txt": b"by bytes", "b.txt": given}, {"compiler": "g++ 12"})
    assert store.get(KEY) == entry == reopened(store, counters).get(KEY)
    assert entry.read_text("a.txt") == "by bytes"
    assert entry.file("b.txt").read_bytes() == b"by path"
    manifest = json.loads((entry.path / "manifest.json").read_text())
    assert manifest["created_by"]["compiler"] == "g++ 12"


def test_unknown_key_is_none(store: Store, counters: Counters) -> None:
    assert store.get(KEY) is None
    assert counters["cache.damaged"] == 0


def test_root_is_private(store: Store) -> None:
    assert store.root.stat().st_mode & 0o777 == 0o700


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


def escape(entry: Path) -> None:
    row = {"bytes": 4, "sha256": "0"}
    text = json.dumps({"format": 1, "files": {"../../x": row}})
    (entry / "manifest.json").write_text(text)


DAMAGES = [flip, truncate, lose_file, lose_manifest, garble_manifest, escape]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_entry_is_removed_and_rebuilt(store, counters, damage) -> None:  # type: ignore[no-untyped-def]
    damage(store.put(KEY, {"a": b"good"}).path)
    later = reopened(store, counters)
    assert later.get(KEY) is None
    assert counters["cache.damaged"] == 1
    assert later.put(KEY, {"a": b"good"}).read_text("a") == "good"


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_put_replaces_a_damaged_entry(store, counters, damage) -> None:  # type: ignore[no-untyped-def]
    damage(store.put(KEY, {"a": b"good"}).path)
    assert reopened(store, counters).put(KEY, {"a": b"good"}).read_text("a") == "good"


def test_second_put_takes_the_first(store: Store) -> None:
    store.put(KEY, {"a": b"first"})
    assert store.put(KEY, {"a": b"second"}).read_text("a") == "first"
    assert list((store.root / "tmp").iterdir()) == []


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
    args = (str(store.root), time.time() + 0.3, results)
    racers = [spawn.Process(target=race, args=args) for _ in range(8)]
    for racer in racers:
        racer.start()
    said = [results.get(timeout=60) for _ in racers]
    for racer in racers:
        racer.join()
    assert said == ["done"] * 8
    assert all(store.get(f"key{i}") is not None for i in range(20))
    assert list((store.root / "tmp").iterdir()) == []


def age(store: Store, key: str, by_s: float) -> None:
    when = time.time() - by_s
    os.utime(store.root / "entries" / key, (when, when))


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
    kept = sorted(path.name for path in (store.root / "entries").iterdir())
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
    left = store.root / "tmp" / "left"
    left.mkdir(parents=True)
    os.utime(left, (0, 0))
    store.put(KEY, {"a": b""})
    assert not left.exists()


def test_world_writable_root_is_refused(tmp_path: Path, counters: Counters) -> None:
    root = tmp_path / "open"
    root.mkdir()
    root.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="others can write"):
        store = Store(root, MIB, counters)
    assert store.put(KEY, {"a": b"good"}).read_text("a") == "good"
    assert list(root.iterdir()) == []


def test_foreign_root_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.warns(RuntimeWarning, match="belongs to user"):
        store = Store(tmp_path, MIB)
    assert store.root == folders.private_folder()


def test_root_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(RuntimeWarning, match="works without its cache"):
        store = Store(tmp_path / "file" / "cache", MIB)
    assert store.put("unmakeable", {"a": b"good"}).read_text("a") == "good"


def test_read_only_disk_warns_once_and_works(
    store: Store, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(KEY, {"a": b"good"})
    reader = reopened(store, counters)
    make = reader._new_folder
    root = reader.root

    def refuse() -> Path:
        if reader.root == root:
            raise OSError(30, "Read-only file system")
        return make()

    monkeypatch.setattr(reader, "_new_folder", refuse)
    assert reader.get(KEY) is not None  # what is there can still be read
    with pytest.warns(RuntimeWarning, match="Read-only"):
        reader.put("readonly1", {"a": b"one"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reader.put("readonly2", {"a": b"two"}).read_text("a") == "two"
        assert reader.get(KEY) is not None


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_read_only_folder(store: Store, counters: Counters) -> None:
    shutil.rmtree(store.root / "tmp", ignore_errors=True)
    store.root.chmod(0o500)
    with pytest.warns(RuntimeWarning):
        assert store.put("readonly3", {"a": b"good"}).read_text("a") == "good"


def test_full_disk_leaves_nothing_half_made(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.is_relative_to(store.root):
            write(path, data[: len(data) // 2])
            if store.root != folders.private_folder():
                raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    root = store.root
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert store.put("full", {"a": b"good"}).read_text("a") == "good"
    assert list((root / "entries").iterdir()) == []
