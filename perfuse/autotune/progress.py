"""A progress bar for long tuning, on a terminal only."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TextIO

SHOWN_AFTER_S = 1.0


class TuningProgress:
    """A block that shows how many candidates are done, once it takes more than a second."""

    def __init__(
        self,
        subject: str,
        total: int,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._subject, self._total, self._done = subject, total, 0
        self._file = file or sys.stderr
        self._clock, self._start = clock, clock()
        self._show: Callable[[int], object] | None = None
        self._stack = ExitStack()
        self._lock = threading.Lock()

    def __enter__(self) -> TuningProgress:
        return self

    def advance(self) -> int:
        """Count one more candidate as done, in any thread; the number of those left."""
        with self._lock:
            self._done += 1
            if self._show is None and self._is_shown():
                self._show = self._opened()
            if self._show is not None:
                self._show(self._done)
            return self._total - self._done

    def _is_shown(self) -> bool:
        return self._file.isatty() and self._clock() - self._start > SHOWN_AFTER_S

    def _opened(self) -> Callable[[int], object]:
        # Imported where it is shown: every compile imports this file, and few tune for long.
        from rich.console import Console
        from rich.progress import Progress

        bar = self._stack.enter_context(Progress(console=Console(file=self._file), transient=True))
        task = bar.add_task(f"tuning {self._subject}", total=self._total)
        return lambda done: bar.update(task, completed=done)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
