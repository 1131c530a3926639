"""Worker processes that may hang, crash or be killed without losing the run.

A worker reads one JSON task a line and answers with one JSON line. When it goes silent for too long
it is killed, when it dies its signal is the result, and either way a new one takes the next task.
A worker that can do no more (a GPU error stays for the life of a process) asks to be replaced.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import IO, Any

Task = dict[str, Any]
Result = dict[str, Any]
GREETING_S = 180.0  # imports are not the task's time
RETIRE = "retire"  # the key by which a result asks for a new process


@dataclass
class Worker:
    """One process running `python -m module`, restarted whenever it is gone."""

    module: str
    process: subprocess.Popen[bytes] | None = None
    pending: bytes = b""
    num_tasks: int = 0
    max_tasks: int = 150  # compiled code and caches grow: a fresh process bounds the memory
    env: dict[str, str] = field(default_factory=dict)
    errors: IO[bytes] | None = None
    deadline: float = float("inf")

    def start(self) -> subprocess.Popen[bytes]:
        if self.process is not None and self.num_tasks >= self.max_tasks:
            self.stop()
        if self.process is None or self.process.poll() is not None:
            self.pending, self.num_tasks = b"", 0
            self.errors = tempfile.TemporaryFile()  # noqa: SIM115
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                env={**os.environ, **self.env},
                start_new_session=True,
            )
            self.read_line(min(time.monotonic() + GREETING_S, self.deadline))
        return self.process

    def run(self, task: Task, timeout_s: float) -> Result:
        process = self.start()
        assert process.stdin is not None
        self.num_tasks += 1
        try:
            process.stdin.write(json.dumps(task).encode() + b"\n")
            process.stdin.flush()
            deadline = time.monotonic() + timeout_s
            line = self.read_line(deadline)
            while line and not line.startswith(b"{"):  # what a library printed, not an answer
                line = self.read_line(deadline)
        except BrokenPipeError:
            line = b""
        if line is None:
            self.stop()
            return {"status": "timeout", "message": f"no answer in {timeout_s:.0f} s"}
        if not line:
            code = process.wait()
            self.process = None
            name = signal.Signals(-code).name if code < 0 else f"exit {code}"
            return {"status": "crash", "message": f"{name}: {self.last_words()}"}
        result = dict(json.loads(line))
        if result.pop(RETIRE, False):
            self.stop()
        return result

    def last_words(self) -> str:
        """The end of what the process wrote to its stderr."""
        if self.errors is None:
            return ""
        size = self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, size - 600))
        return " ".join(self.errors.read().decode(errors="replace").split())

    def read_line(self, deadline: float) -> bytes | None:
        """One line; empty when the process is gone, None when time is up."""
        assert self.process is not None and self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        while b"\n" not in self.pending:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                return b""
            self.pending += chunk
        line, self.pending = self.pending.split(b"\n", 1)
        return line

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process = None


def run_tasks(
    module: str,
    tasks: Iterable[Task],
    *,
    jobs: int,
    timeout_s: float,
    on_result: Callable[[Task, Result], Task | None],
    env: dict[str, str] | None = None,
    time_limit_s: float = float("inf"),
) -> None:
    """Every task once, in `jobs` processes; `on_result` is called by one thread at a time.

    What it returns is a further task, where a result was only a part of the answer.
    Past the time limit no task is begun and the one under way is stopped: it is a timeout.
    """
    deadline = time.monotonic() + time_limit_s
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    lock = threading.Lock()

    def drain() -> None:
        worker = Worker(module, env=env or {}, deadline=deadline)
        try:
            while time.monotonic() < deadline:
                try:
                    task = waiting.get_nowait()
                except queue.Empty:
                    return
                began = time.monotonic()
                result = worker.run(task, min(timeout_s, max(1.0, deadline - began)))
                result["seconds"] = round(time.monotonic() - began, 3)
                with lock:
                    further = on_result(task, result)
                if further is not None:
                    waiting.put(further)
        finally:
            worker.stop()

    threads = [threading.Thread(target=drain, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def serve(handle: Callable[[Task], Result]) -> None:
    """The worker's side: answer on the real stdout, send everybody's prints elsewhere."""
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answers.write("ready\n")
    for line in sys.stdin:
        try:
            result = handle(json.loads(line))
        except Exception as error:  # a bug of the harness must show up as a row too
            result = {"status": "harness", "message": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(result) + "\n")


def end_with_parent(parent: int) -> None:
    """A run that is killed takes its workers along, busy or not."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
