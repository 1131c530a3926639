"""A client of Redis servers, as small as the cache needs: one command on one connection.

The whole exchange has one deadline and a limit on what is read, so that neither a server that
answers slowly nor one that answers too much can hold up a compile.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

DEFAULT_PORT = 6379
MOST_LINE_BYTES = 4096  # of a reply, besides values
# Errors of one key. After any other the next command would fail too.
OF_ONE_KEY = ("WRONGTYPE",)

Reply = bytes | int | str | None
Argument = str | bytes


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where a server is, and who we are there."""

    host: str
    port: int = DEFAULT_PORT
    database: int = 0
    user: str = ""
    password: str = field(default="", repr=False)
    is_encrypted: bool = False

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"  # never the password: this is shown in warnings

    @staticmethod
    def parse(url: str) -> RedisAddress:
        """The address in redis://[user:password@]host[:port][/database]; rediss:// encrypts."""
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss") or not parts.hostname:
            raise ValueError("expected redis://[user:password@]host[:port][/database]")
        return RedisAddress(
            parts.hostname,
            parts.port or DEFAULT_PORT,
            int(parts.path.strip("/") or 0),
            unquote(parts.username or ""),
            unquote(parts.password or ""),
            parts.scheme == "rediss",
        )


def command(
    address: RedisAddress, *words: Argument, timeout_s: float, most_bytes: int = 1 << 20
) -> Reply:
    """The server's reply to one command: OSError if there is none, ValueError if it is unusable."""
    deadline = time.monotonic() + timeout_s
    commands = [*_introduction(address), words]
    with _connected(address, deadline) as connection:
        connection.sendall(b"".join(map(encoded, commands)))
        reader = _Reader(connection, deadline, most_bytes)
        replies = [reader.reply() for _ in commands]
    return replies[-1]


def encoded(words: tuple[Argument, ...]) -> bytes:
    """A command as it is sent: an array of strings, each with its length."""
    data = [word.encode() if isinstance(word, str) else word for word in words]
    return b"*%d\r\n" % len(data) + b"".join(b"$%d\r\n%s\r\n" % (len(d), d) for d in data)


def _introduction(address: RedisAddress) -> Iterator[tuple[Argument, ...]]:
    if address.password:
        user = (address.user,) if address.user else ()
        yield ("AUTH", *user, address.password)
    if address.database:
        yield ("SELECT", str(address.database))


@contextmanager
def _connected(address: RedisAddress, deadline: float) -> Iterator[socket.socket]:
    with socket.create_connection((address.host, address.port), _left(deadline)) as plain:
        if not address.is_encrypted:
            plain.settimeout(_left(deadline))
            yield plain
            return
        encryption = ssl.create_default_context()
        with encryption.wrap_socket(plain, server_hostname=address.host) as encrypted:
            encrypted.settimeout(_left(deadline))
            yield encrypted


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the server answers too slowly")
    return left


class _Reader:
    """Replies from a connection, read up to a deadline and a size."""

    def __init__(self, connection: socket.socket, deadline: float, most_bytes: int) -> None:
        self._connection = connection
        self._deadline = deadline
        self._most_bytes = most_bytes
        self._data = b""

    def reply(self) -> Reply:
        """The next reply; an error of the server is raised."""
        line = self._line()
        kind, rest = line[:1], line[1:].decode(errors="replace")
        if kind == b"+":
            return rest
        if kind == b":":
            return self._number(rest)
        if kind == b"$":
            return self._value(self._number(rest))
        if kind == b"-":
            is_of_one_key = rest.partition(" ")[0] in OF_ONE_KEY
            raise ValueError(rest) if is_of_one_key else ConnectionError(rest)
        raise ConnectionError(f"not a Redis server: it answered {line!r:.80}")

    def _number(self, text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise ConnectionError(f"not a Redis server: {text!r:.80} is not a number") from None

    def _value(self, num_bytes: int) -> bytes | None:
        if num_bytes < 0:
            return None
        if num_bytes > self._most_bytes:
            raise ValueError(f"a value of {num_bytes} bytes, more than {self._most_bytes}")
        while len(self._data) < num_bytes + 2:
            self._receive()
        value, self._data = self._data[:num_bytes], self._data[num_bytes + 2 :]
        return value

    def _line(self) -> bytes:
        while b"\r\n" not in self._data:
            if len(self._data) > MOST_LINE_BYTES:
                raise ConnectionError("not a Redis server: its answer does not end")
            self._receive()
        line, _, self._data = self._data.partition(b"\r\n")
        return line

    def _receive(self) -> None:
        self._connection.settimeout(_left(self._deadline))
        data = self._connection.recv(1 << 16)
        if not data:
            raise ConnectionError("the server closed the connection")
        self._data += data
