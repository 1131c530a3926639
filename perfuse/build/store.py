"""The store: built code on disk, addressed by the hash of all that went into it.

An entry is a folder of plain files with a `manifest.json` that tells their sizes and checksums. It
is built aside and renamed into place, so that it is there whole or not at all. Nothing in a store
is ever needed: a lost, damaged or unwritable one makes Perfuse slower, never wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from perfuse.build.folders import private_folder, reason_unusable, remove_older_than
from perfuse.counters import Counters
from perfuse.errors import CacheDamaged, PerfuseError
from perfuse.version import VERSION

MANIFEST = "manifest.json"
FAILED = "failed"  # beside the entries: sources the compiler refused, kept for a day
FORMAT = 1
KEY = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,199}")
NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.+-]{0,199}")

# Another process may be about to load what it was just given: young entries are never evicted.
YOUNG_S = 600.0
STALE_S = 3600.0
FAILED_S = 86400.0
# Looking over the whole store is slow, so it is done hourly, or after putting 1/64 of its limit.
LOOK_EVERY_S = 3600.0
LOOK_FRACTION = 64
KEEP_FRACTION = 0.9
TOUCH_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Entry:
    """What one key holds: a folder of files."""

    key: str
    path: Path
    files: tuple[str, ...]

    def file(self, name: str) -> Path:
        """The path of one of its files."""
        if name not in self.files:
            raise KeyError(name)
        return self.path / name

    def read_bytes(self, name: str) -> bytes:
        """The contents of one of its files."""
        return self.file(name).read_bytes()

    def read_text(self, name: str) -> str:
        """The text of one of its files."""
        return self.read_bytes(name).decode()


@dataclass(frozen=True, slots=True)
class _Usage:
    """One entry as eviction sees it."""

    last_used: float
    num_bytes: int
    path: Path


class Store:
    """Entries under `root`, kept below `max_bytes` by dropping the least recently used."""

    def __init__(
        self,
        root: Path,
        max_bytes: int,
        counters: Counters | None = None,
        *,
        young_s: float = YOUNG_S,
    ) -> None:
        self.max_bytes = max_bytes
        self.young_s = young_s
        self._counters = counters if counters is not None else Counters()
        self._lock = Lock()
        self._verified: set[Path] = set()
        self._bytes_since_look = 0
        self._read_only: Path | None = None  # a safe root that can be read but not written
        reason = reason_unusable(root)
        self.root = root if reason is None else self._leave(root, reason)

    def get(self, key: str) -> Entry | None:
        """The entry of this key, checked; a damaged one is counted, removed, and not found."""
        path = self._path(key)
        if not path.is_dir() and self._read_only is not None:
            path = self._read_only / path.relative_to(self.root)
        if not path.is_dir():
            return None
        try:
            entry = self._checked(key, path)
        except (CacheDamaged, OSError, ValueError):
            self._counters.inc("cache.damaged")
            self._discard(path)
            return None
        self._touch(path)
        return entry

    def put(
        self, key: str, files: Mapping[str, bytes | Path], about: Mapping[str, str] | None = None
    ) -> Entry:
        """Store these files under this key; where another was faster, take what it stored."""
        path = self._path(key)
        try:
            return self._put(key, path, files, about or {})
        except OSError as error:
            if self.root == private_folder():
                raise PerfuseError(f"cannot store built code: {error}", at=str(path)) from error
            self._stop_writing(error)
            return self._put(key, self._path(key), files, about or {})

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder to build in, removed afterwards."""
        try:
            folder = self._new_folder()
        except OSError as error:
            if self.root == private_folder():
                raise PerfuseError(f"cannot build: {error}", at=str(self.root)) from error
            self._stop_writing(error)
            folder = self._new_folder()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def evict(self) -> int:
        """Drop least recently used entries while the store is too large; how many went."""
        remove_older_than(self.root / "tmp", STALE_S)
        remove_older_than(self.root / FAILED, FAILED_S)
        usages = sorted(self._usages(), key=lambda usage: usage.last_used)
        total = sum(usage.num_bytes for usage in usages)
        if total <= self.max_bytes:
            return 0
        num_evicted = 0
        newest = time.time() - self.young_s
        for usage in usages:
            if total <= self.max_bytes * KEEP_FRACTION or usage.last_used > newest:
                break
            if usage.path not in self._verified:  # those, this process is using
                self._discard(usage.path)
                total -= usage.num_bytes
                num_evicted += 1
        self._counters.inc("cache.evicted", num_evicted)
        return num_evicted

    def _path(self, key: str) -> Path:
        if not KEY.fullmatch(key):
            raise ValueError(f"not a key of the store: {key!r}")
        return self.root / "entries" / key

    def _leave(self, root: Path, reason: str) -> Path:
        """Go on without the cache: with a folder of this process's own."""
        warnings.warn(
            f"Perfuse works without its cache {root}: {reason}. "
            "Set cache.dir (PERFUSE_CACHE_DIR) to a folder that only you can write.",
            RuntimeWarning,
            stacklevel=3,
        )
        self._counters.inc("cache.unusable")
        return private_folder()

    def _stop_writing(self, error: OSError) -> None:
        root = self.root
        self.root = self._leave(root, str(error))
        self._read_only = root

    def _new_folder(self) -> Path:
        parent = self.root / "tmp"
        parent.mkdir(mode=0o700, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=parent))

    def _put(
        self, key: str, path: Path, files: Mapping[str, bytes | Path], about: Mapping[str, str]
    ) -> Entry:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        folder = self._new_folder()
        try:
            self._bytes_since_look += _fill(folder, files, about)
            entry = self._publish(key, folder, path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if self._is_look_due():
            self.evict()
        return entry

    def _publish(self, key: str, folder: Path, path: Path) -> Entry:
        """Rename into place. What stands there already is as good, unless it is damaged."""
        for _ in range(3):
            try:
                os.rename(folder, path)
            except OSError:
                if not path.is_dir():
                    raise
                winner = self.get(key)
                if winner is not None:
                    return winner
            else:
                return self._checked(key, path)
        raise OSError(f"cannot replace the damaged entry {path}")

    def _checked(self, key: str, path: Path) -> Entry:
        """The entry, its sizes compared; its checksums too when this process first meets it."""
        files = _read_manifest(path)
        for name, (num_bytes, sha256) in files.items():
            found = (path / name).stat().st_size
            if found != num_bytes:
                raise CacheDamaged(f"{name} has {found} bytes, not {num_bytes}", at=str(path))
            if path not in self._verified and _sha256(path / name) != sha256:
                raise CacheDamaged(f"{name} does not have its checksum", at=str(path))
        with self._lock:
            self._verified.add(path)
        return Entry(key, path, tuple(files))

    def _discard(self, path: Path) -> None:
        """Remove an entry: first out of sight in one step, then from the disk."""
        with self._lock:
            self._verified.discard(path)
        try:
            folder = self._new_folder()
            os.rename(path, folder / "entry")
        except OSError:
            return
        shutil.rmtree(folder, ignore_errors=True)

    def _touch(self, path: Path) -> None:
        try:
            if time.time() - path.stat().st_mtime > TOUCH_EVERY_S:
                os.utime(path)
        except OSError:
            return  # a read-only store is still good to read

    def _is_look_due(self) -> bool:
        mark = self.root / "last-look"
        try:
            is_recent = time.time() - mark.stat().st_mtime < LOOK_EVERY_S
        except OSError:
            is_recent = False
        if is_recent and self._bytes_since_look < self.max_bytes / LOOK_FRACTION:
            return False
        mark.touch(mode=0o600)
        self._bytes_since_look = 0
        return True

    def _usages(self) -> Iterator[_Usage]:
        for path in (self.root / "entries").iterdir():
            try:
                num_bytes = sum(child.stat().st_size for child in path.iterdir())
                yield _Usage(path.stat().st_mtime, num_bytes, path)
            except OSError:
                continue  # another process is removing it


def _fill(folder: Path, files: Mapping[str, bytes | Path], about: Mapping[str, str]) -> int:
    """Write the files and their manifest; how many bytes they are."""
    rows: dict[str, dict[str, Any]] = {}
    for name, content in files.items():
        if not NAME.fullmatch(name) or name == MANIFEST:
            raise ValueError(f"not a file name of the store: {name!r}")
        data = content if isinstance(content, bytes) else content.read_bytes()
        (folder / name).write_bytes(data)
        rows[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest = {"format": FORMAT, "created_by": {"perfuse": VERSION, **about}, "files": rows}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return sum(row["bytes"] for row in rows.values())


def _read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Size and checksum of each file; CacheDamaged where the manifest is not one."""
    manifest = json.loads((path / MANIFEST).read_bytes())
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CacheDamaged("not a manifest of this format", at=str(path))
    rows = manifest.get("files")
    if not isinstance(rows, dict):
        raise CacheDamaged("the manifest lists no files", at=str(path))
    return {name: _read_row(path, name, row) for name, row in rows.items()}


def _read_row(path: Path, name: str, row: object) -> tuple[int, str]:
    if isinstance(row, dict) and NAME.fullmatch(name):
        num_bytes, sha256 = row.get("bytes"), row.get("sha256")
        if isinstance(num_bytes, int) and isinstance(sha256, str):
            return num_bytes, sha256
    raise CacheDamaged(f"the manifest is wrong about {name!r}", at=str(path))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
