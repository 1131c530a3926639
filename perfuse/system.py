"""The operating system as the store, the compiler and artefacts use it, one method per operation.

Whatever reads or writes a file, loads a library or starts a process goes through `system()`, so
that a test can substitute a double that fails, shortens, delays or reorders any single operation.
Below it are the few functions that combine several operations.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
# Non-blocking, so that a FIFO in a file's place is refused instead of waited for.
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW

MFD_EXEC = 0x10  # Linux 6.3: ask for memory that may hold code, where the default is changed
F_ADD_SEALS = 1033
SEALS = 0x1 | 0x2 | 0x4 | 0x8  # no more seals, no shrinking, no growing, no writing
CHUNK = 1 << 22
AT_FDCWD, RENAME_EXCHANGE = -100, 2

Name = str | Path
Parent = int | None  # the descriptor of the folder that a name is in


@dataclass(frozen=True, slots=True)
class Exited:
    """How a process ended: its code (negative: the signal), and all it wrote."""

    code: int
    output: str


class System:
    """The real system. Every method is one operation, and raises OSError if it fails."""

    def open(self, path: Name, flags: int, mode: int = 0o600, dir_fd: Parent = None) -> int:
        """A descriptor of a file or a folder, not inherited by other programs."""
        return os.open(path, flags, mode, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def read(self, fd: int, num_bytes: int) -> bytes:
        """At most `num_bytes`; none at the end."""
        return os.read(fd, num_bytes)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        """Write a part of `data`, from its start; how many bytes."""
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        """Return when the file is on the disk."""
        os.fsync(fd)

    def fstat(self, fd: int) -> os.stat_result:
        """The status of an open descriptor."""
        return os.fstat(fd)

    def lstat(self, path: Name, dir_fd: Parent = None) -> os.stat_result:
        """The status of a name, without following links."""
        return os.stat(path, dir_fd=dir_fd, follow_symlinks=False)

    def readlink(self, path: Name, dir_fd: Parent = None) -> str:
        """Where a link leads."""
        return os.readlink(os.fspath(path), dir_fd=dir_fd)

    def listdir(self, fd: int) -> list[str]:
        return os.listdir(fd)

    def mkdir(self, path: Name, mode: int = 0o700, dir_fd: Parent = None) -> None:
        os.mkdir(path, mode, dir_fd=dir_fd)

    def rename(
        self, source: Name, target: Name, source_fd: Parent = None, target_fd: Parent = None
    ) -> None:
        """Give a file or folder another name, in one step."""
        os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)

    def exchange(self, one: Name, other: Name) -> None:
        """Exchange two names atomically, if the system can: at no moment is one missing."""
        call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if call is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        names = os.fsencode(one), os.fsencode(other)
        if call(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(one), None, str(other))

    def unlink(self, path: Name, dir_fd: Parent = None) -> None:
        os.unlink(path, dir_fd=dir_fd)

    def rmdir(self, path: Name, dir_fd: Parent = None) -> None:
        os.rmdir(path, dir_fd=dir_fd)

    def utime(self, fd: int) -> None:
        """Mark as used now."""
        os.utime(fd)

    def memfd(self, name: str) -> int:
        """A file in memory that has no path, and can be sealed."""
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            return os.memfd_create(name, flags | MFD_EXEC)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel that does not know the flag
                raise
            return os.memfd_create(name, flags)

    def seal(self, fd: int) -> None:
        """Seal a file in memory against all changes, by this process too."""
        fcntl.fcntl(fd, F_ADD_SEALS, SEALS)

    def dlopen(self, path: str, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
        return ctypes.CDLL(path, mode=mode)

    def spawn(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        timeout_s: float | None,
    ) -> Exited:
        """Run a program to its end; subprocess.TimeoutExpired if that takes too long."""
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        return Exited(done.returncode, done.stdout)


_active: list[System] = [System()]


def system() -> System:
    """The system in use: the real one, or a test's double."""
    return _active[-1]


@contextmanager
def replaced(double: System) -> Iterator[System]:
    """A block in which `double` stands in for the system, for all threads."""
    _active.append(double)
    try:
        yield double
    finally:
        _active.remove(double)


@contextmanager
def opened(path: Name, flags: int, mode: int = 0o600, dir_fd: Parent = None) -> Iterator[int]:
    """A block with a descriptor."""
    fd = system().open(path, flags, mode, dir_fd)
    try:
        yield fd
    finally:
        with suppress(OSError):  # it is given back all the same
            system().close(fd)


def read_all(fd: int) -> bytes:
    """Everything from here to the end."""
    chunks = []
    while chunk := system().read(fd, CHUNK):
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def write_all(fd: int, data: bytes) -> None:
    """Write everything, even if the system takes only a little at a time."""
    rest = memoryview(data)
    while rest:
        count = system().write(fd, rest)
        if count <= 0:
            raise OSError(errno.EIO, "no bytes were written")
        rest = rest[count:]


def read_file(path: Name, dir_fd: Parent = None) -> bytes:
    """The bytes of a regular file that is not a link."""
    with opened(path, READ, dir_fd=dir_fd) as fd:
        if not stat.S_ISREG(system().fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return read_all(fd)


def write_file(
    path: Name, data: bytes, dir_fd: Parent = None, *, mode: int = 0o600, is_durable: bool = False
) -> None:
    """Write a new file; `is_durable` waits until it is on the disk."""
    with opened(path, CREATE, mode, dir_fd) as fd:
        write_all(fd, data)
        if is_durable:
            system().fsync(fd)


def sync_folder(path: Name) -> None:
    """Return when the names in a folder are on the disk."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        system().fsync(fd)


def remove_tree(path: Name, dir_fd: Parent = None) -> bool:
    """Remove a file, or a folder with all in it; links are removed, not followed. False: failed."""
    try:
        if not stat.S_ISDIR(system().lstat(path, dir_fd).st_mode):
            system().unlink(path, dir_fd)
            return True
        with opened(path, FOLDER, dir_fd=dir_fd) as fd:
            num_left = sum(not remove_tree(name, fd) for name in system().listdir(fd))
        if num_left == 0:
            system().rmdir(path, dir_fd)
        return num_left == 0
    except OSError:
        return False
