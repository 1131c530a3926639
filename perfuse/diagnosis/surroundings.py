"""Probes of the cache, the settings, the remote cache and the lock file."""

from __future__ import annotations

from perfuse.autotune.lock import DEFAULT_PATH
from perfuse.cache.resp import RedisAddress
from perfuse.config import unknown_variables
from perfuse.diagnosis.machine import Machine
from perfuse.diagnosis.report import Finding
from perfuse.errors import LockFileError, PerfuseError

LOW_BYTES = 1 << 29  # below it, a few large models fill the disk


def settings(machine: Machine) -> Finding:
    """Whether the settings can be read: a variable with an invalid value stops every compile."""
    machine.settings()
    return Finding("ok", "valid")


def variables(machine: Machine) -> Finding:
    """Environment variables that look like settings but are not."""
    unknown = unknown_variables(machine.environment)
    if not unknown:
        return Finding("ok", "all PERFUSE_* variables are known")
    hints = [f"rename {name} to {nearest}" for name, nearest in unknown.items() if nearest]
    advice = "; ".join(hints) or "unset them"
    detail = f"unknown, ignored: {', '.join(unknown)}"
    return Finding("note", detail, f"{advice}; `perfuse config` lists the settings.")


def cache(machine: Machine) -> Finding:
    """The cache: whether it can be used, and the space that is left."""
    chosen = machine.settings_or_defaults()
    if not chosen.cache.enabled:
        return Finding("note", "switched off: every process compiles again", "set cache.enabled.")
    folder = machine.cache_folder(chosen)
    if folder is None:
        return Finding("problem", "there is no folder for it", "set PERFUSE_CACHE_DIR or HOME.")
    try:
        machine.check_cache(folder)
    except (OSError, PerfuseError) as error:
        detail = error.message if isinstance(error, PerfuseError) else error.strerror or str(error)
        advice = "set PERFUSE_CACHE_DIR to a folder that only you can write to."
        return Finding("problem", f"{folder}: {detail}", advice)
    free = machine.free_bytes(folder)
    found = f"{folder}, private and writable, {free / 2**30:.1f} GiB free"
    if free < LOW_BYTES:
        return Finding("note", found, "free some space, or set PERFUSE_CACHE_DIR to another disk.")
    return Finding("ok", found)


def redis(machine: Machine) -> Finding:
    """The remote cache, if the settings name one."""
    chosen = machine.settings_or_defaults()
    if not chosen.redis_url:
        if chosen.autotune_remote_cache:
            return Finding(
                "problem", "autotune_remote_cache is on without a server", "set redis_url."
            )
        return Finding("absent", "no server is set (redis_url)")
    try:
        address = RedisAddress.parse(chosen.redis_url)
    except ValueError as error:
        return Finding("problem", "redis_url is not valid", f"{error}.")
    try:
        machine.ping(chosen.redis_url)
    except (OSError, ValueError) as error:
        advice = "start the server, or correct redis_url (PERFUSE_REDIS_URL)."
        return Finding("problem", f"{address}: {type(error).__name__}: {error}", advice)
    if not chosen.autotune_remote_cache:
        return Finding("note", f"{address} answers, but is not used", "set autotune_remote_cache.")
    return Finding("ok", f"{address} answers")


def lock_file(machine: Machine) -> Finding:
    """The lock file that the settings name, or the one in the current folder."""
    chosen = machine.settings_or_defaults().lock_file
    path = chosen or DEFAULT_PATH
    if not machine.exists(path):
        if chosen:
            return Finding("problem", f"{path} does not exist", LockFileError.default_hint or "")
        return Finding("absent", "none")
    verdicts = machine.lock_verdicts(path)
    num_fitting = sum(verdict.fits for verdict in verdicts)
    found = f"{path}: {num_fitting} of {len(verdicts)} choices fit this machine"
    if not chosen:
        return Finding("note", f"{found}; not used", f"set PERFUSE_LOCK_FILE={path}.")
    stale = [v for v in verdicts if not v.fits and not v.is_elsewhere]
    if stale or (verdicts and not num_fitting):
        detail = f"{found}; {stale[0].problem}" if stale else found
        return Finding("note", detail, f"pin the choices again: perfuse lock write {path}.")
    return Finding("ok", found)
