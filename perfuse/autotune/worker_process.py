"""`WorkerProcess`: one worker as its parent sees it: started, asked with a time limit, killed.

A worker is its own process group, so that whatever a candidate forks is killed with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from perfuse.autotune import wire
from perfuse.autotune.outcome import Fate, Outcome
from perfuse.autotune.worker import BEGUN, Start

START_SECONDS = 120.0  # for starting, and for importing what a request needs
_EXIT_SECONDS = 2.0


class WorkerProcess:
    """A worker process that answers one request at a time."""

    def __init__(
        self,
        environment: Mapping[str, str],
        most_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._owner = os.getpid()
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        request_fd, self._requests = os.pipe()
        self._replies, reply_fd = os.pipe()
        lifeline_fd, self._lifeline = os.pipe()
        given = (request_fd, reply_fd, lifeline_fd)
        start = Start(*given, most_bytes, list(sys.path))
        try:
            self._process = subprocess.Popen(
                start.arguments(),
                env=dict(environment),
                pass_fds=given,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                start_new_session=True,
            )
        except BaseException:
            wire.close_quietly(self._requests, self._replies, self._lifeline)
            raise
        finally:
            wire.close_quietly(*given)
        self._is_ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Return when the worker takes requests; wire.NoMessage if it does not start."""
        if not self._is_ready:
            wire.read_message(self._replies, self._clock() + START_SECONDS)
            self._is_ready = True

    def ask(self, request: Any, timeout_s: float) -> Outcome:
        """Have a request answered. The worker may be unusable afterwards: see `is_usable`."""
        try:
            document = wire.document_of(request)
        except TypeError as error:
            return Outcome(Fate.NOT_RUN, detail=str(error))
        try:
            self.wait_until_ready()
            start = self._clock() + START_SECONDS
            wire.write_message(self._requests, document, start)
            reply = wire.read_message(self._replies, start)
            if reply == BEGUN:
                reply = wire.read_message(self._replies, self._clock() + timeout_s)
        except wire.TimedOut:
            self.kill()
            return Outcome(Fate.HUNG, detail=f"no answer within {timeout_s:g} s")
        except wire.NoMessage as error:
            return self._ended(error)
        return self._outcome(reply)

    @property
    def is_usable(self) -> bool:
        return self._process.returncode is None

    def _outcome(self, reply: Any) -> Outcome:
        is_reply = isinstance(reply, dict) and ("value" in reply or reply.get("fate") in list(Fate))
        if not is_reply:
            self.kill()
            return Outcome(Fate.MALFORMED, detail=f"{reply!r} is not a reply")
        if "value" in reply:
            return Outcome(Fate.MEASURED, reply["value"])
        fate = Fate(reply["fate"])
        if fate is not Fate.RAISED or not reply.get("is_sound"):
            self.kill()  # its memory may be damaged, or its GPU's state: others get a new worker
        return Outcome(fate, detail=str(reply.get("error", "")))

    def _ended(self, error: wire.NoMessage) -> Outcome:
        """The outcome of a request whose worker ended by itself, or stopped making sense."""
        has_exited, last = self._has_exited(_EXIT_SECONDS if "gone" in str(error) else 0.0), ""
        if has_exited:
            last = self._last_line()
        self.kill()
        code = self._process.returncode
        if not has_exited:
            return Outcome(Fate.MALFORMED, detail=str(error))
        end = _signal_name(-code) if code < 0 else f"exit status {code}"
        return Outcome(Fate.CRASHED, detail=f"{end}: {last}" if last else end)

    def _has_exited(self, wait_s: float) -> bool:
        """Whether the worker ends by itself. It is not reaped: see `kill`."""
        deadline, flags = self._clock() + wait_s, os.WEXITED | os.WNOHANG | os.WNOWAIT
        while os.waitid(os.P_PID, self.pid, flags) is None:
            if self._clock() >= deadline:
                return False
            time.sleep(0.005)
        return True

    def _last_line(self) -> str:
        """The last line that the worker wrote to stderr: a library's last words."""
        with contextlib.suppress(OSError, ValueError):
            size = self._stderr.seek(0, os.SEEK_END)
            self._stderr.seek(max(0, size - 4096))
            lines = self._stderr.read().decode(errors="replace").strip().splitlines()
            return lines[-1].strip() if lines else ""
        return ""

    def kill(self) -> None:
        """End the worker and everything it started, and reap it."""
        if os.getpid() != self._owner:
            self.forget()
            return
        self.interrupt()
        self._process.wait()
        self.forget()

    def interrupt(self) -> None:
        """Kill the worker and everything it started; a pending request then fails."""
        if self._process.returncode is None and os.getpid() == self._owner:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # Before it is reaped: until then nobody else can have the number of its group.
                os.killpg(self._process.pid, signal.SIGKILL)

    def forget(self) -> None:
        """Close this process's ends of the pipes; in a forked child the parent's stay open."""
        wire.close_quietly(*{self._requests, self._replies, self._lifeline} - {-1})
        self._requests = self._replies = self._lifeline = -1
        self._stderr.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
