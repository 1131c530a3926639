"""Counters of events by name: kernels built, cache hits, fallbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from perfuse import logs
from perfuse.forking import ForkLock


class Counters:
    """Thread-safe counts by dotted name; a name that was never counted is 0."""

    def __init__(self, listener: Callable[[str, int], None] | None = None) -> None:
        self._lock = ForkLock()
        self._listener = listener
        self._counts: dict[str, int] = {}

    def inc(self, name: str, n: int = 1) -> None:
        """Add `n` to the count called `name`."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + n
        if self._listener is not None:
            self._listener(name, n)

    def snapshot(self) -> dict[str, int]:
        """A copy of every count, in the order of the names."""
        with self._lock:
            return dict(sorted(self._counts.items()))

    def clear(self) -> None:
        """Forget every count."""
        with self._lock:
            self._counts.clear()

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._counts.get(name, 0)

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return name in self._counts

    def __iter__(self) -> Iterator[str]:
        return iter(self.snapshot())

    def __len__(self) -> int:
        with self._lock:
            return len(self._counts)

    def __repr__(self) -> str:
        return f"Counters({self.snapshot()!r})"

    def __str__(self) -> str:
        counts = self.snapshot()
        if not counts:
            return "(nothing counted)"
        width = max(len(name) for name in counts)
        digits = max(len(f"{n:,}") for n in counts.values())
        return "\n".join(f"{name:<{width}}  {n:>{digits},}" for name, n in counts.items())


counters = Counters(listener=logs.count)
