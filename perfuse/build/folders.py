"""Folders that may hold code to be run: only ones that nobody but this user can write."""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
import time
from functools import cache
from pathlib import Path


def reason_unsafe(folder: Path) -> str | None:
    """Why code must not be loaded from this folder, or None where it may be."""
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a folder"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, not to {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def reason_unusable(folder: Path) -> str | None:
    """Make the folder, private to the user; say why it cannot serve, or None where it can."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return reason_unsafe(folder)
    except OSError as error:
        return str(error)


@cache
def private_folder() -> Path:
    """A folder of this process's own, gone when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="perfuse-"))
    atexit.register(_remove_at_exit, folder, os.getpid())
    return folder


def _remove_at_exit(folder: Path, owner_pid: int) -> None:
    # A forked child inherits the exit handler, but not the right to remove its parent's folder.
    if os.getpid() == owner_pid:
        shutil.rmtree(folder, ignore_errors=True)


def remove_older_than(folder: Path, age_s: float) -> None:
    """Remove what lies in the folder since longer than `age_s`: left by processes that died."""
    try:
        children = list(folder.iterdir())
    except OSError:
        return
    for child in children:
        try:
            is_old = time.time() - child.stat().st_mtime > age_s
        except OSError:
            continue
        if is_old:
            shutil.rmtree(child, ignore_errors=True)
