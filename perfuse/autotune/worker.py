"""The tuner's worker process: takes requests from a pipe, runs each, and sends the results.

It dies with its parent: the kernel kills its process group when the last writer of the lifeline,
a pipe that nothing is written to, is gone. So no candidate that hangs outlives the process that
tunes.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from perfuse.autotune import wire
from perfuse.autotune.outcome import failed

F_SETSIG = 10  # of Linux; Python's fcntl module does not name it
MOST_TEXT = 2000  # characters of an error that are sent back
BEGUN = {"begun": True}  # the first reply to a request that could be read
RUN = "from perfuse.autotune.worker import main; main()"


@dataclass(frozen=True, slots=True)
class Start:
    """Everything that a worker is given on its command line."""

    request_fd: int
    reply_fd: int
    lifeline_fd: int
    most_bytes: int  # of memory; 0: as many as there are
    path: list[str]  # sys.path of the parent

    def arguments(self) -> list[str]:
        """The command that starts the worker."""
        given = json.dumps([getattr(self, name) for name in self.__slots__])
        first = "import sys, json; sys.path[:] = json.loads(sys.argv[1])[-1]; "
        return [sys.executable, "-c", first + RUN, given]


def main() -> None:
    """Run requests until the parent closes the pipe."""
    start = Start(*json.loads(sys.argv[1]))
    die_with_parent(start.lifeline_fd)
    limit_memory(start.most_bytes)
    wire.write_message(start.reply_fd, {"ready": os.getpid()})
    while True:
        try:
            document = wire.read_message(start.request_fd)
        except wire.NoMessage:
            return
        reply = answered(partial(wire.value_of, document))
        request = reply.pop("value", None)
        # Its imports are done: the time limit of the candidate begins here.
        wire.write_message(start.reply_fd, reply or BEGUN)
        if not reply:
            wire.write_message(start.reply_fd, answered(request.answer))


def answered(function: Callable[[], Any]) -> dict[str, Any]:
    """The reply that holds the value of a function, or the exception that it raises."""
    try:
        return {"value": function()}
    except Exception as error:
        outcome = failed(error)
        detail = outcome.detail[:MOST_TEXT]
        return {"error": detail, "fate": str(outcome.fate), "is_sound": is_sound()}


def is_sound() -> bool:
    """Whether this process can run other candidates: an error of a GPU stays with the process."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def die_with_parent(lifeline_fd: int) -> None:
    """Have the kernel kill this process group when the lifeline has no writer left."""
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline_fd, F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(lifeline_fd, fcntl.F_GETFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, flags | os.O_ASYNC)


def limit_memory(most_bytes: int) -> None:
    """Limit what this process allocates.

    Not its addresses (RLIMIT_AS): CUDA reserves more of those than there is memory.
    """
    if most_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard != resource.RLIM_INFINITY:
            most_bytes = min(most_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, hard))
