"""`RedisRemoteCacheBackend`: documents on a Redis server, by name."""

import json
from typing import Any, Protocol

from perfuse import config
from perfuse.cache.resp import RedisAddress, command
from perfuse.errors import MALFORMED

TIMEOUT_S = 0.5
MOST_BYTES = 1 << 18  # of one document: a decision is a few kilobytes
LIFETIME_S = 180 * 86400  # after which the server drops what was not written again


class RemoteCacheBackend(Protocol):
    """A server of small documents; any exception means that it cannot be used."""

    def __init__(self, key: str, is_autotune: bool = False) -> None: ...

    def get(self, filename: str) -> dict[str, Any] | None:
        """The document of this name; None if there is none."""

    def put(self, filename: str, data: dict[str, Any]) -> None:
        """Keep a document under this name, in place of an earlier one."""


class RedisRemoteCacheBackend:
    """The server that the setting `redis_url` names. Every call is one bounded exchange with it.

    `key` is the first part of every name. OSError: the server cannot be used; ValueError: this
    document cannot.
    """

    def __init__(self, key: str, is_autotune: bool = False) -> None:
        self.address = RedisAddress.parse(config.snapshot().redis_url)
        self.prefix = f"{key}:autotune:" if is_autotune else f"{key}:"

    def get(self, filename: str) -> dict[str, Any] | None:
        """The document of this name; None if there is none."""
        name = self.prefix + filename
        found = command(self.address, "GET", name, timeout_s=TIMEOUT_S, most_bytes=MOST_BYTES)
        if found is None:
            return None
        try:
            document = json.loads(found) if isinstance(found, bytes) else None
        except MALFORMED as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if not isinstance(document, dict):
            raise ValueError("not a document")
        return document

    def put(self, filename: str, data: dict[str, Any]) -> None:
        """Keep a document under this name, in place of an earlier one."""
        text = json.dumps(data, sort_keys=True)
        if len(text) > MOST_BYTES:
            raise ValueError(f"a document of {len(text)} bytes, more than {MOST_BYTES}")
        name, lifetime = self.prefix + filename, str(LIFETIME_S)
        command(self.address, "SET", name, text, "EX", lifetime, timeout_s=TIMEOUT_S)
