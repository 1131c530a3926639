"""A progress bar for long tuning, on a terminal only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import Progress, TaskID

SHOWN_AFTER_S = 1.0


class TuningProgress:
    """A block that shows how many candidates are done, once it takes more than a second."""

    def __init__(
        self,
        subject: str,
        total: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._subject, self._total, self._done = subject, total, 0
        self._console = console or Console(file=sys.stderr)
        self._clock, self._start = clock, clock()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> TuningProgress:
        return self

    def advance(self) -> None:
        """One more candidate is done."""
        self._done += 1
        if self._bar is None and self._is_shown():
            self._bar = Progress(console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(f"tuning {self._subject}", total=self._total)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done)

    def _is_shown(self) -> bool:
        return self._console.is_terminal and self._clock() - self._start > SHOWN_AFTER_S

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
