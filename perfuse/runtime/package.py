"""The folder of an artefact: written whole or not at all, verified before anything in it is used.

    manifest.json      what this is, for which versions and machine, each file's size and checksum
    signature.json     optional: the Ed25519 signature of manifest.json, and the key that made it

A folder is replaced only if it is an artefact and nothing else: its manifest says so, and every
file in it is one that the manifest lists. Anything else is user data.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfuse.cache.manifest import rows_of
from perfuse.errors import ArtefactError
from perfuse.runtime.signing import Key, is_signed_by, sign
from perfuse.system import opened, read_file, sync_folder, system, write_file

KIND = "perfuse artefact"
MANIFEST, SIGNATURE = "manifest.json", "signature.json"
# Errors of systems and file systems that cannot exchange two names.
CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
OTHER_PATH = "choose a path that does not exist yet, or remove the folder yourself."
OTHER_DISK = "free some disk space, or choose a writable folder."


@dataclass(frozen=True, slots=True)
class Package:
    """A verified artefact: what its manifest says, and the bytes that were verified."""

    about: Mapping[str, Any]
    files: Mapping[str, bytes]


def write_package(
    path: Path, files: Mapping[str, bytes], about: Mapping[str, Any], sign_with: Key | None = None
) -> None:
    """Write the files beside `path`, then rename: a partial artefact is never visible."""
    manifest = manifest_bytes(files, about)
    every = {**files, MANIFEST: manifest}
    if sign_with is not None:
        public_key, signature = sign(manifest, sign_with)
        document = {"public_key": public_key.hex(), "signature": signature.hex()}
        every[SIGNATURE] = json.dumps(document).encode()
    check_replaceable(path)
    try:
        _make_parents(path)
        aside = _new_folder(path)
        try:
            for name, data in every.items():
                write_file(aside / name, data, mode=0o644, is_durable=True)
            sync_folder(aside)
            _swap(aside, path)
        finally:
            _remove(aside, every)
    except OSError as error:
        message = f"cannot write the artefact: {error}"
        raise ArtefactError(message, at=str(path), hint=OTHER_DISK) from error


def manifest_bytes(files: Mapping[str, bytes], about: Mapping[str, Any]) -> bytes:
    document = {"kind": KIND, **about, "files": rows_of(files)}
    return (json.dumps(document, indent=1) + "\n").encode()


def check_replaceable(path: Path) -> None:
    """Raise ArtefactError if `path` exists and is anything but an artefact."""
    if not os.path.lexists(path):
        _check_parent(path)
        return
    if path.is_symlink() or not path.is_dir():
        raise ArtefactError("the path is a file or symbolic link", at=str(path), hint=OTHER_PATH)
    names = sorted(os.listdir(path))
    if not names:
        return
    foreign = [name for name in names if name not in _own_names(path)]
    if foreign:
        listed = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        what = f"the folder contains files that Perfuse did not write: {listed}"
        raise ArtefactError(what, at=str(path), hint=OTHER_PATH)


def _check_parent(path: Path) -> None:
    """Raise ArtefactError if a folder cannot be created at `path`."""
    parent = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        message = f"{parent} is not a folder you can write to"
        raise ArtefactError(message, at=str(path), hint="choose another path for the artefact.")


def _own_names(path: Path) -> set[str]:
    """The names of the files of an artefact; empty if this is not one."""
    try:
        manifest = json.loads(read_file(path / MANIFEST))
        if manifest["kind"] != KIND:
            return set()
        return {MANIFEST, SIGNATURE, *map(str, manifest["files"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def _make_parents(path: Path) -> None:
    for parent in reversed(path.absolute().parents):
        if not parent.exists():
            with contextlib.suppress(FileExistsError):
                system().mkdir(parent, 0o755)


def _new_folder(path: Path) -> Path:
    """A new, empty folder beside `path`."""
    made = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    system().mkdir(made, 0o755)
    return made


def _swap(aside: Path, path: Path) -> None:
    """Put the new folder where the old one is. A failure leaves the old one there."""
    if not path.exists():
        system().rename(aside, path)
        return
    try:
        system().exchange(aside, path)
    except OSError as error:
        if error.errno not in CANNOT_EXCHANGE:
            raise
    else:
        _remove(aside, _own_names(aside))
        return
    old = _new_folder(path)
    try:
        system().rename(path, old)  # onto an empty folder, which is allowed
        try:
            system().rename(aside, path)
        except OSError:
            system().rename(old, path)
            raise
    finally:
        _remove(old, _own_names(old))


def _remove(folder: Path, names: Mapping[str, Any] | set[str]) -> None:
    """Remove these files, and the folder if that leaves it empty."""
    for name in names:
        with contextlib.suppress(OSError):
            system().unlink(folder / name)
    with contextlib.suppress(OSError):
        system().rmdir(folder)


def read_package(path: Path, trusted_keys: Sequence[Key] | None = None) -> Package:
    """The files, verified against their manifest and, if required, a trusted signature."""
    try:
        # By descriptor: an artefact that is replaced meanwhile is read whole, old or new.
        with opened(path, os.O_RDONLY | os.O_DIRECTORY) as folder:
            return _read(path, folder, trusted_keys)
    except FileNotFoundError as error:
        if os.path.lexists(path):
            raise not_an_artefact(path, error) from error
        raise ArtefactError(
            "the path does not exist", at=str(path), hint="pass the path that aot_compile returned."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise not_an_artefact(path, error) from error


def _read(path: Path, folder: int, trusted_keys: Sequence[Key] | None) -> Package:
    data = read_file(MANIFEST, folder)
    about = json.loads(data)
    if about["kind"] != KIND:
        raise ValueError(f"its manifest has kind {about['kind']!r}")
    rows = {_plain_name(name): str(row["sha256"]) for name, row in about["files"].items()}
    if trusted_keys is not None:
        _check_signature(path, folder, data, trusted_keys)
    files = {name: read_file(name, folder) for name in rows}
    for name, content in files.items():
        if hashlib.sha256(content).hexdigest() != rows[name]:
            message = f"{name} is damaged: its checksum does not match"
            raise ArtefactError(
                message, at=str(path), hint="copy the artefact again, or recompile it."
            )
    return Package(about, files)


def not_an_artefact(path: Path, error: Exception) -> ArtefactError:
    return ArtefactError(f"not a Perfuse artefact: {type(error).__name__}: {error}", at=str(path))


def _check_signature(path: Path, folder: int, manifest: bytes, trusted_keys: Sequence[Key]) -> None:
    if isinstance(trusted_keys, str | bytes):
        raise ArtefactError("trusted_keys must be a list of keys", hint="write trusted_keys=[key].")
    try:
        document = json.loads(read_file(SIGNATURE, folder))
        signature = bytes.fromhex(document["signature"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        message = "the artefact has no signature, but trusted_keys requires one"
        hint = "compile it with aot_compile(..., sign_with=key)."
        raise ArtefactError(message, at=str(path), hint=hint) from error
    if not is_signed_by(manifest, signature, trusted_keys):
        message = "none of the trusted keys signed this artefact"
        hint = "do not load it unless you know who made it; then add their key."
        raise ArtefactError(message, at=str(path), hint=hint)


def _plain_name(name: Any) -> str:
    """A file directly in the folder: a path would lead out of it."""
    reserved = ("", ".", "..", MANIFEST, SIGNATURE)
    if not isinstance(name, str) or name in reserved or set(name) & set("/\\\0"):
        raise ValueError(f"{name!r} is not a file of an artefact")
    return name
