"""Folders that may hold executable code: only those that no other user can write to.

A folder is reached from `/` one name at a time, each opened in the descriptor of the one before
and checked there, so that what was checked is what is used, whatever is renamed meanwhile.
"""

from __future__ import annotations

import atexit
import errno
import os
import secrets
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from perfuse.environment import temporary_folders
from perfuse.errors import CacheUnsafe
from perfuse.system import FOLDER, opened, remove_tree, system, write_file

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
MOST_LINKS = 40
NAME_PREFIX = "perfuse-"  # of every temporary folder
PROBE_BYTES = 1 << 16


def new_name() -> str:
    """A name for a temporary folder that nobody can predict."""
    return f"{NAME_PREFIX}{secrets.token_hex(8)}"


def check_own(status: os.stat_result, where: str, *, is_folder: bool) -> None:
    """Raise CacheUnsafe unless this is a folder (or file) that only this user can write to."""
    if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(status.st_mode):
        raise CacheUnsafe(f"it is not a {'folder' if is_folder else 'regular file'}", at=where)
    if status.st_uid != os.geteuid():
        raise CacheUnsafe(
            f"it belongs to user {status.st_uid}, not to {os.geteuid()}", at=where, is_own=False
        )
    if status.st_mode & OTHERS_WRITE:
        mode = stat.S_IMODE(status.st_mode)
        raise CacheUnsafe(f"others can write to it (mode {mode:o})", at=where)


def _check_parent(status: os.stat_result, where: str) -> None:
    """Raise CacheUnsafe if another user could replace what is in this folder."""
    if not _is_trusted(status.st_uid):
        raise CacheUnsafe(
            f"its parent folder belongs to user {status.st_uid}", at=where, is_own=False
        )
    writers = status.st_mode & OTHERS_WRITE
    # If every user has a group of the same number, nobody else is in that group.
    if writers == stat.S_IWGRP and status.st_gid == os.getegid() == os.geteuid():
        return
    if writers and not status.st_mode & stat.S_ISVTX:
        mode = stat.S_IMODE(status.st_mode)
        raise CacheUnsafe(f"others can write to its parent folder (mode {mode:o})", at=where)


def _is_trusted(uid: int) -> bool:
    return uid in (0, os.geteuid()) or uid == _unmapped_uid()


@cache
def _unmapped_uid() -> int:
    """The number by which a user namespace shows root and others it does not know; else -1."""
    with suppress(OSError, ValueError):
        if Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
            return int(Path("/proc/sys/kernel/overflowuid").read_text())
    return -1


@contextmanager
def opened_folder(path: Path, *, makes: bool = False) -> Iterator[int]:
    """A context with a descriptor of a folder in which nobody else can replace anything."""
    walk = _Walk(path, makes)
    try:
        walk.run()
        yield walk.fd
    finally:
        walk.close()


class _Walk:
    """The way from `/` to a folder. Links are followed where they are root's or this user's."""

    def __init__(self, path: Path, makes: bool) -> None:
        self.path = path
        self.makes = makes
        self.names = deque(path.parts[1:])
        self.num_links = 0
        self.fd = system().open("/", FOLDER)

    def run(self) -> None:
        """Take every step."""
        while self.names:
            _check_parent(system().fstat(self.fd), str(self.path))
            name = self.names.popleft()
            try:
                self._enter(self._opened(name))
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                self._follow(name, error)
        _check_parent(system().fstat(self.fd), str(self.path))

    def close(self) -> None:
        """Give the descriptor back."""
        with suppress(OSError):
            system().close(self.fd)

    def _enter(self, fd: int) -> None:
        self.close()
        self.fd = fd

    def _opened(self, name: str) -> int:
        try:
            return system().open(name, FOLDER, dir_fd=self.fd)
        except FileNotFoundError:
            if not self.makes:
                raise
        with suppress(FileExistsError):  # another process was faster
            system().mkdir(name, 0o700, dir_fd=self.fd)
        return system().open(name, FOLDER, dir_fd=self.fd)

    def _follow(self, name: str, error: OSError) -> None:
        status = system().lstat(name, dir_fd=self.fd)
        self.num_links += 1
        if not stat.S_ISLNK(status.st_mode) or self.num_links > MOST_LINKS:
            raise OSError(error.errno, error.strerror, str(self.path))
        if not _is_trusted(status.st_uid):
            message = f"the symbolic link {name!r} belongs to user {status.st_uid}"
            raise CacheUnsafe(message, at=str(self.path), is_own=False)
        target = Path(system().readlink(name, dir_fd=self.fd))
        if target.is_absolute():
            self._enter(system().open("/", FOLDER))
        self.names.extendleft(part for part in reversed(target.parts) if part != target.anchor)


def check_usable(path: Path) -> None:
    """Raise OSError or CacheUnsafe if this folder, created if needed, cannot hold a store."""
    with opened_folder(path, makes=True) as fd:
        name = new_name()
        system().mkdir(name, 0o700, dir_fd=fd)
        system().rmdir(name, dir_fd=fd)


def is_usable(path: Path) -> bool:
    """Whether a store can be kept in this folder."""
    try:
        check_usable(path)
    except (OSError, CacheUnsafe):
        return False
    return True


def make_in(parent: int, name: str) -> None:
    """Create a folder that only this user can write to, unless it exists."""
    with suppress(FileExistsError):
        system().mkdir(name, 0o700, dir_fd=parent)


@contextmanager
def opened_own(parent: int, name: str) -> Iterator[int]:
    """A block with a descriptor of a folder that only this user can write; never a link."""
    with opened(name, FOLDER, dir_fd=parent) as fd:
        check_own(system().fstat(fd), name, is_folder=True)
        yield fd


def private_folders() -> Iterator[Path]:
    """Folders of this process, removed when it ends, in every place that can hold some data."""
    for place in temporary_folders():
        with suppress(OSError, CacheUnsafe):
            yield _private(place, os.getpid())


@cache
def _private(place: Path, pid: int) -> Path:
    """A new private folder in this place; OSError where it cannot be made or written."""
    path = place / new_name()
    with opened_folder(place) as parent:
        system().mkdir(path.name, 0o700, dir_fd=parent)
    try:
        write_file(path / "probe", bytes(PROBE_BYTES))
        system().unlink(path / "probe")
    except OSError:
        remove_tree(path)
        raise
    atexit.register(_remove_at_exit, path, pid)
    return path


def _remove_at_exit(folder: Path, owner_pid: int) -> None:
    # A forked child inherits the exit handler, but not the right to remove its parent's folder.
    if os.getpid() == owner_pid:
        remove_tree(folder)
