"""Entries of the store, and the manifest that proves one to be complete and the right one.

The manifest holds the entry's own key: an entry under another's name is damage like any other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfuse.cache.folders import check_own
from perfuse.errors import MALFORMED, CacheDamaged
from perfuse.system import READ, opened, read_all, system
from perfuse.version import VERSION

MANIFEST = "manifest.json"
FORMAT = 2
KEY = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,199}")
NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.+-]{0,199}")


@dataclass(frozen=True, slots=True)
class Entry:
    """The content of one key: files, as the bytes that were checked."""

    key: str
    contents: Mapping[str, bytes]
    path: Path | None = field(default=None, compare=False)  # where it is kept, if it is

    @property
    def files(self) -> tuple[str, ...]:
        """The names of its files."""
        return tuple(self.contents)

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(len(data) for data in self.contents.values())

    def read_bytes(self, name: str) -> bytes:
        """The contents of one of its files; CacheDamaged where it has no such file."""
        if name not in self.contents:
            raise CacheDamaged(f"the entry has no file {name!r}", at=self.key)
        return self.contents[name]

    def read_text(self, name: str) -> str:
        """The text of one of its files."""
        try:
            return self.read_bytes(name).decode()
        except UnicodeDecodeError as error:
            raise CacheDamaged(f"{name} is not text: {error}", at=self.key) from error

    def read_json(self, name: str) -> Any:
        """The document in one of its files."""
        return parse_json(self.read_bytes(name), f"{self.key}/{name}")


def parse_json(data: bytes, where: str) -> Any:
    """A document; CacheDamaged where these bytes are not one."""
    try:
        return json.loads(data)
    except MALFORMED as error:
        raise CacheDamaged(f"not a document: {type(error).__name__}: {error}", at=where) from error


def is_key(value: object) -> bool:
    """Whether this can be a key: a plain name."""
    return isinstance(value, str) and KEY.fullmatch(value) is not None


def check_key(key: str) -> None:
    """ValueError unless this can be a key."""
    if not is_key(key):
        raise ValueError(f"not a key of the store: {key!r}")


def rows_of(files: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """The size and checksum of each file, as a manifest has them."""
    return {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in files.items()
    }


def manifest_of(entry: Entry, about: Mapping[str, str]) -> bytes:
    """The manifest of an entry."""
    rows = rows_of(entry.contents)
    for name in rows:
        if not NAME.fullmatch(name) or name == MANIFEST:
            raise ValueError(f"not a file name of the store: {name!r}")
    made_by = {"perfuse": VERSION, **about}
    document = {"format": FORMAT, "key": entry.key, "created_by": made_by, "files": rows}
    return json.dumps(document, indent=1).encode() + b"\n"


def read_entry(folder: int, key: str, path: Path) -> Entry:
    """The entry in an open folder; CacheDamaged if it is incomplete or another entry."""
    rows = _rows(read_own(folder, MANIFEST), key)
    return Entry(key, {name: _file(folder, name, rows[name]) for name in rows}, path)


def has_mark(folder: int, key: str) -> bool:
    """Whether a folder has our manifest for this key; others are never removed."""
    try:
        _rows(read_own(folder, MANIFEST), key)
    except (CacheDamaged, OSError):
        return False
    return True


def read_own(folder: int, name: str) -> bytes:
    """The bytes of a plain file that only this user can write; what is checked is what is read."""
    with opened(name, READ, dir_fd=folder) as fd:
        check_own(system().fstat(fd), name, is_folder=False)
        return read_all(fd)


def _file(folder: int, name: str, row: tuple[int, str]) -> bytes:
    data = read_own(folder, name)
    if (len(data), hashlib.sha256(data).hexdigest()) != row:
        raise CacheDamaged(f"{name} does not match its size and checksum")
    return data


def _rows(manifest: bytes, key: str) -> dict[str, tuple[int, str]]:
    """Size and checksum of each file; CacheDamaged where this is not the manifest of the key."""
    document = parse_json(manifest, MANIFEST)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CacheDamaged("not a manifest of this format", at=key)
    if document.get("key") != key:
        raise CacheDamaged(f"this is the entry for {document.get('key')!r}", at=key)
    rows = document.get("files")
    if not isinstance(rows, dict):
        raise CacheDamaged("the manifest lists no files", at=key)
    return {name: _row(name, row) for name, row in rows.items()}


def _row(name: str, row: object) -> tuple[int, str]:
    if isinstance(row, dict) and NAME.fullmatch(name) and os.path.basename(name) == name:
        num_bytes, sha256 = row.get("bytes"), row.get("sha256")
        if isinstance(num_bytes, int) and isinstance(sha256, str):
            return num_bytes, sha256
    raise CacheDamaged(f"the manifest has an invalid row for {name!r}")
