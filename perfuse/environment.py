"""The environment of the process: the only file that reads its variables.

Settings among them are parsed by `config.py`.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Mapping
from pathlib import Path

LOG_VARIABLE = "PERFUSE_LOG"  # read when Perfuse is imported, see logs.py


def variables() -> Mapping[str, str]:
    """All variables, as they are now."""
    return os.environ


def cache_folders() -> tuple[Path, ...]:
    """The folders that may hold the user's cache, the usual one first; variables may be unset."""
    homes = [os.environ.get("HOME", "")]
    with contextlib.suppress(KeyError):  # a user without an entry in /etc/passwd
        homes.append(pwd.getpwuid(os.geteuid()).pw_dir)
    folders = [os.environ.get("XDG_CACHE_HOME", "")]
    folders += [os.path.join(home, ".cache") for home in homes if home]
    return tuple(dict.fromkeys(Path(f) / "perfuse" for f in folders if os.path.isabs(f)))


def temporary_folders() -> tuple[Path, ...]:
    """The folders that may hold temporary files, the usual one first; the last is in memory."""
    named = [os.environ.get(name, "") for name in ("TMPDIR", "XDG_RUNTIME_DIR")]
    folders = [named[0], "/tmp", "/var/tmp", named[1], "/dev/shm"]
    return tuple(dict.fromkeys(Path(folder) for folder in folders if os.path.isabs(folder)))


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child process."""
    return {**os.environ, **changes}


def log_request() -> str:
    """The channels that PERFUSE_LOG asks for."""
    return os.environ.get(LOG_VARIABLE, "")


def is_debugging_compiles() -> bool:
    """Whether TORCH_COMPILE_DEBUG=1 asks compilers to write out their stages."""
    return os.environ.get("TORCH_COMPILE_DEBUG", "0") == "1"
