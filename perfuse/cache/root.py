"""The root of a store: a folder of its own in the one the settings name, known by its tag.

The folder that the settings name may hold other files. Everything in the root belongs to Perfuse,
and only what is in a tagged root is ever removed.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from perfuse.cache.folders import NAME_PREFIX, make_in, new_name, opened_folder, opened_own
from perfuse.cache.manifest import read_own
from perfuse.errors import CacheUnsafe
from perfuse.system import remove_tree, system, write_file

NAME = "perfuse-v1"
TAG = "CACHEDIR.TAG"  # https://bford.info/cachedir: backups leave such folders out
TAG_TEXT = b"""Signature: 8a477f597d28d172789f06886806bc55
# Code that Perfuse has built. Everything in this folder can be deleted at any time.
"""
ENTRIES, TEMPORARY = "entries", "tmp"
FAILED = "failed"  # sources the compiler rejected, kept for a day
LOOKED = "last-look"
TAKEN = (errno.ENOTEMPTY, errno.EEXIST)


@dataclass(frozen=True, slots=True)
class Root:
    """Opened and checked at each use, since it may have been replaced."""

    folder: Path  # the one that the settings name

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.folder / NAME

    @contextmanager
    def opened(self, *, makes: bool = False) -> Iterator[int]:
        """A block with its descriptor."""
        with opened_folder(self.folder, makes=makes) as parent:
            if makes:
                _make(parent)
            with opened_own(parent, NAME) as root:
                _check_tag(root)
                yield root

    @contextmanager
    def opened_parts(self) -> Iterator[tuple[int, int, int]]:
        """The root, the folder of temporaries and that of entries, created if missing."""
        with self.opened(makes=True) as root:
            make_in(root, TEMPORARY)
            make_in(root, ENTRIES)
            with opened_own(root, TEMPORARY) as temporary, opened_own(root, ENTRIES) as entries:
                yield root, temporary, entries

    @contextmanager
    def opened_entries(self) -> Iterator[int]:
        """A block with the folder of entries."""
        with self.opened() as root, opened_own(root, ENTRIES) as entries:
            yield entries


def _make(parent: int) -> None:
    """Make the root, with its tag from the first moment on, unless it is there."""
    with suppress(FileNotFoundError):
        system().lstat(NAME, parent)
        return
    name = f".{NAME}-{new_name()}"
    system().mkdir(name, 0o700, dir_fd=parent)
    try:
        with opened_own(parent, name) as fd:
            write_file(TAG, TAG_TEXT, fd)
        system().rename(name, NAME, parent, parent)
    except OSError as error:
        if error.errno not in TAKEN:  # another process was faster
            raise
    finally:
        remove_tree(name, parent)


def _check_tag(root: int) -> None:
    """Raise CacheUnsafe if the root is a foreign folder of the same name."""
    with suppress(FileNotFoundError, CacheUnsafe):
        if read_own(root, TAG) == TAG_TEXT:
            return
    known = {TAG, ENTRIES, TEMPORARY, FAILED, LOOKED}
    strays = {name for name in system().listdir(root) if not name.startswith(NAME_PREFIX)} - known
    if strays:
        raise CacheUnsafe(f"it was not created by Perfuse: it contains {min(strays)!r}")
    name = new_name()
    write_file(name, TAG_TEXT, root)
    system().rename(name, TAG, root, root)


def remove_older_than(folder: int, age_s: float) -> None:
    """Remove leftovers of dead processes older than `age_s`: our names, and nothing else."""
    for name in system().listdir(folder):
        with suppress(OSError):
            is_old = time.time() - system().lstat(name, folder).st_mtime > age_s
            if is_old and name.startswith(NAME_PREFIX):
                remove_tree(name, folder)
