"""The store of this process: the folder that the settings name, opened once."""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from pathlib import Path

from perfuse.cache.folders import is_usable
from perfuse.cache.store import Store
from perfuse.config import Settings
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.environment import cache_folders


def open_store(ctx: Context) -> Store:
    """The store that the settings name, one per process."""
    cache = ctx.settings.cache
    return _store(cache_folder(ctx.settings), cache.max_bytes, ctx.counters)


def cache_folder(settings: Settings) -> Path | None:
    """The folder that contains the store's own; None if no folder can be used."""
    if not settings.cache.enabled:
        return None
    if settings.cache.dir:
        with suppress(OSError):  # a relative one, and the current folder is gone
            return Path(os.path.abspath(os.path.expanduser(settings.cache.dir)))
        return None
    return _usable(cache_folders())


@functools.cache
def _usable(folders: tuple[Path, ...]) -> Path | None:
    """The first that can be used; if none can, the first, so that the reason is reported."""
    usable = (folder for folder in folders if is_usable(folder))
    return next(usable, folders[0] if folders else None)


@functools.cache
def _store(folder: Path | None, max_bytes: int, counters: Counters) -> Store:
    return Store(folder, max_bytes, counters)
