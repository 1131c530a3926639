"""The store: built code on disk, addressed by the hash of all that went into it.

An entry is a folder of plain files with a manifest (`manifest.py`), written aside and renamed into
place, so that it exists complete or not at all. Nothing in a store is ever needed: a lost, damaged
or unwritable one makes Perfuse slower, never wrong. What another user could have written is not
read (`folders.py`), and what does not carry the mark of the store is not removed.
"""

from __future__ import annotations

import errno
import logging
import os
import time
import warnings
from collections import OrderedDict
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from perfuse.cache.folders import check_own, make_in, new_name, opened_own, private_folders
from perfuse.cache.manifest import MANIFEST, Entry, check_key, has_mark, manifest_of, read_entry
from perfuse.cache.root import ENTRIES, FAILED, LOOKED, TAKEN, TEMPORARY, Root, remove_older_than
from perfuse.counters import Counters
from perfuse.errors import CacheDamaged, CacheUnsafe
from perfuse.forking import ForkLock
from perfuse.system import FOLDER, opened, remove_tree, system, write_file

# Another process may be about to load an entry it just found: young ones are never evicted.
YOUNG_S = 600.0
STALE_S = 3600.0
FAILED_S = 86400.0
# Looking over the whole store is slow, so it is done hourly, or after putting 1/64 of its limit.
LOOK_EVERY_S = 3600.0
LOOK_FRACTION = 64
KEEP_FRACTION = 0.9
TOUCH_EVERY_S = 60.0
MEMORY_BYTES = 256 << 20  # of entries that no disk takes
TRIES = 3
# Errors that say nothing about the entry.
PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)

_log = logging.getLogger("perfuse.cache")


@dataclass(frozen=True, slots=True)
class Usage:
    """One entry as eviction sees it."""

    last_used: float
    num_bytes: int
    key: str


class Store:
    """Entries in a folder, kept below `max_bytes` by dropping the least recently used.

    Without a folder, or where it cannot be used, entries are kept in memory.
    """

    def __init__(
        self,
        folder: Path | None,
        max_bytes: int,
        counters: Counters | None = None,
        *,
        young_s: float = YOUNG_S,
    ) -> None:
        self.max_bytes = max_bytes
        self.young_s = young_s
        self._root = None if folder is None else Root(folder)
        self._is_left = False
        self._counters = counters if counters is not None else Counters()
        self._lock = ForkLock()
        self._memory: OrderedDict[str, Entry] = OrderedDict()
        self._bytes_since_look = 0
        self._has_warned = False
        if self._root is not None:
            try:
                with self._root.opened(makes=True):
                    pass
            except (OSError, CacheUnsafe) as error:
                self._leave(error)

    @property
    def root(self) -> Root | None:
        """Where entries are kept; None where that is in memory."""
        return None if self._is_left else self._root

    def get(self, key: str) -> Entry | None:
        """The entry of this key, checked; a damaged one is counted, removed, and not found."""
        check_key(key)
        with self._lock:
            kept = self._memory.get(key)
        if kept is not None or self._root is None or self._is_left:
            return kept
        try:
            with self._root.opened_entries() as entries:
                return self._read(entries, key)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._counters.inc("cache.unreadable")
            _log.info("entry %s cannot be read: %s", key, error)
            return None
        except CacheUnsafe as error:
            self._leave(error)
            return None

    def is_on_disk(self, key: str) -> bool:
        """Whether other processes find the entry of this key, rather than this one in memory."""
        check_key(key)
        with self._lock:
            return self.root is not None and key not in self._memory

    def put(
        self, key: str, files: Mapping[str, bytes], about: Mapping[str, str] | None = None
    ) -> Entry:
        """Store these files under this key; if another process was faster, take its entry."""
        check_key(key)
        path = None if self.root is None else self.root.path / ENTRIES / key
        entry = Entry(key, dict(files), path)
        manifest = manifest_of(entry, about or {})
        if self._root is not None and not self._is_left:
            try:
                return self._put(entry, manifest)
            except OSError as error:
                self._warn(error)
            except CacheUnsafe as error:
                self._leave(error)
        self._keep(entry)
        return entry

    def discard(self, key: str) -> None:
        """Forget an entry that was found not to work, here and on the disk."""
        check_key(key)
        self._counters.inc("cache.damaged")
        with self._lock:
            self._memory.pop(key, None)
        if self._root is not None and not self._is_left:
            with suppress(OSError, CacheUnsafe):
                self._remove(key)

    def scratch_folders(self) -> Generator[Path, None, None]:
        """Folders to build in, each removed when the next is requested: here, else elsewhere."""
        if self._root is not None and not self._is_left:
            name = new_name()
            try:
                with self._root.opened_parts() as (_, temporary, _):
                    system().mkdir(name, 0o700, dir_fd=temporary)
                    try:
                        yield self._root.path / TEMPORARY / name
                    finally:
                        remove_tree(name, temporary)
            except OSError as error:
                self._warn(error)
            except CacheUnsafe as error:
                self._leave(error)
        for parent in private_folders():
            path = parent / new_name()
            try:
                system().mkdir(path)
            except OSError:
                continue
            try:
                yield path
            finally:
                remove_tree(path)

    def keep_failed(self, files: Mapping[str, bytes]) -> Path | None:
        """Keep sources for a day, for the user to inspect; their path, if they could be kept."""
        name = new_name()
        try:
            if self._root is None or self._is_left:
                folder = next(private_folders()) / name
                system().mkdir(folder)
                _fill(folder, files)
                return folder
            with self._root.opened(makes=True) as root:
                make_in(root, FAILED)
                with opened_own(root, FAILED) as failed:
                    system().mkdir(name, 0o700, dir_fd=failed)
                    with opened_own(failed, name) as fd:
                        _fill(fd, files)
            return self._root.path / FAILED / name
        except (OSError, CacheUnsafe, StopIteration):
            return None

    def evict(self) -> int:
        """Evict least recently used entries while the store is too large; return their number."""
        if self._root is None or self._is_left:
            return 0
        with self._root.opened() as root:
            for name, age_s in ((TEMPORARY, STALE_S), (FAILED, FAILED_S)):
                with suppress(FileNotFoundError), opened_own(root, name) as fd:
                    remove_older_than(fd, age_s)
        usages = sorted(self.usages(), key=lambda usage: usage.last_used)
        total = sum(usage.num_bytes for usage in usages)
        if total <= self.max_bytes:
            return 0
        num_evicted = 0
        newest = time.time() - self.young_s
        for usage in usages:
            if total <= self.max_bytes * KEEP_FRACTION or usage.last_used > newest:
                break
            if self._remove_marked(usage.key):
                total -= usage.num_bytes
                num_evicted += 1
        self._counters.inc("cache.evicted", num_evicted)
        return num_evicted

    def clear(self) -> int:
        """Remove every entry; return their number."""
        with self._lock:
            self._memory.clear()
        return sum(self._remove_marked(usage.key) for usage in self.usages())

    def usages(self) -> list[Usage]:
        """Every entry on the disk, with its size; strays are left out."""
        found: list[Usage] = []
        if self._root is None or self._is_left:
            return found
        with suppress(FileNotFoundError), self._root.opened_entries() as entries:
            for key in system().listdir(entries):
                with suppress(OSError, CacheUnsafe), opened_own(entries, key) as fd:
                    names = system().listdir(fd)
                    num_bytes = sum(system().lstat(name, fd).st_size for name in names)
                    if MANIFEST in names:
                        found.append(Usage(system().fstat(fd).st_mtime, num_bytes, key))
        return found

    def _read(self, entries: int, key: str) -> Entry | None:
        assert self._root is not None
        with opened(key, FOLDER, dir_fd=entries) as fd:
            try:
                check_own(system().fstat(fd), key, is_folder=True)
            except CacheUnsafe as error:
                self._refuse(key, error, is_removed=error.is_own)
                return None
            try:
                entry = read_entry(fd, key, self._root.path / ENTRIES / key)
            except (CacheDamaged, CacheUnsafe, OSError) as error:
                self._refuse(key, error, getattr(error, "errno", None) not in PASSING)
                return None
            _touch(fd)
        return entry

    def _refuse(
        self, key: str, error: CacheDamaged | CacheUnsafe | OSError, is_removed: bool
    ) -> None:
        """Count an entry that cannot be used, and make room for one that can."""
        self._counters.inc("cache.refused" if isinstance(error, CacheUnsafe) else "cache.damaged")
        _log.info("entry %s is not used: %s", key, error)
        if is_removed:
            with suppress(OSError, CacheUnsafe):
                self._remove(key)

    def _put(self, entry: Entry, manifest: bytes) -> Entry:
        assert self._root is not None
        with self._root.opened_parts() as (root, temporary, entries):
            name = new_name()
            system().mkdir(name, 0o700, dir_fd=temporary)
            try:
                with opened_own(temporary, name) as fd:
                    _fill(fd, {**entry.contents, MANIFEST: manifest})
                entry = self._publish(entry, (name, temporary), entries)
            finally:
                remove_tree(name, temporary)
            self._bytes_since_look += entry.num_bytes
            is_due = self._is_look_due(root)
        if is_due:
            with suppress(OSError, CacheUnsafe):
                self.evict()
        return entry

    def _publish(self, entry: Entry, source: tuple[str, int], entries: int) -> Entry:
        """Rename into place. An existing entry is as good, unless it is damaged."""
        name, temporary = source
        for _ in range(TRIES):
            try:
                system().rename(name, entry.key, temporary, entries)
                return entry
            except OSError as error:
                if error.errno not in TAKEN:
                    raise
            with suppress(FileNotFoundError):
                winner = self._read(entries, entry.key)
                if winner is not None:
                    return winner
        raise OSError(errno.EEXIST, "cannot replace an unusable entry", entry.key)

    def _remove_marked(self, key: str) -> bool:
        assert self._root is not None
        try:
            with self._root.opened_entries() as entries, opened_own(entries, key) as fd:
                is_ours = has_mark(fd, key)
            return is_ours and self._remove(key)
        except (OSError, CacheUnsafe):
            return False

    def _remove(self, key: str) -> bool:
        """Remove an entry: first rename it away atomically, then delete it."""
        assert self._root is not None
        name = new_name()
        with self._root.opened_parts() as (_, temporary, entries):
            try:
                system().rename(key, name, entries, temporary)
            except OSError:
                return False
            return remove_tree(name, temporary)

    def _is_look_due(self, root: int) -> bool:
        try:
            is_recent = time.time() - system().lstat(LOOKED, root).st_mtime < LOOK_EVERY_S
        except OSError:
            is_recent = False
        if is_recent and self._bytes_since_look < self.max_bytes / LOOK_FRACTION:
            return False
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        with suppress(OSError), opened(LOOKED, flags, dir_fd=root) as fd:
            system().utime(fd)
        self._bytes_since_look = 0
        return True

    def _keep(self, entry: Entry) -> None:
        """Keep an entry that cannot be stored on disk in memory."""
        self._counters.inc("cache.in_memory")
        with self._lock:
            self._memory[entry.key] = entry
            total = sum(kept.num_bytes for kept in self._memory.values())
            while total > MEMORY_BYTES and len(self._memory) > 1:
                total -= self._memory.popitem(last=False)[1].num_bytes

    def _leave(self, error: OSError | CacheUnsafe) -> None:
        """Continue without the cache."""
        self._warn(error)
        self._is_left = True

    def _warn(self, error: OSError | CacheUnsafe) -> None:
        """Warn once about what is wrong with the cache, and count it."""
        if self._has_warned:
            return
        self._has_warned = True
        self._counters.inc("cache.unusable")
        reason = error.message if isinstance(error, CacheUnsafe) else str(error)
        where = None if self._root is None else self._root.path
        _log.info("running without the cache %s: %s", where, reason)
        warnings.warn(
            f"Perfuse runs without its cache {where}: {reason}. "
            "Set cache.dir (PERFUSE_CACHE_DIR) to a folder that only you can write to.",
            RuntimeWarning,
            stacklevel=4,
        )


def _fill(folder: int | Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        if isinstance(folder, Path):
            write_file(folder / name, data)
        else:
            write_file(name, data, folder)


def _touch(folder: int) -> None:
    with suppress(OSError):  # a read-only store is still good to read
        if time.time() - system().fstat(folder).st_mtime > TOUCH_EVERY_S:
            system().utime(folder)
