"""How long a GPU takes for a run, with its caches flushed before."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_FLUSHED_BYTES = 256 << 20


@cache
def _flusher(device: torch.device, num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def event_timer(
    device: torch.device, flushed_bytes: int | None = None
) -> Callable[[Callable[[], Any]], Callable[[], float]]:
    """Runs once with cold caches; the seconds that the GPU took, when asked."""
    flusher = _flusher(device, flushed_bytes or _FLUSHED_BYTES)

    def timed(run: Callable[[], Any]) -> Callable[[], float]:
        start, end = _event(), _event()
        flusher.zero_()
        start.record()
        run()
        end.record()

        def read() -> float:
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

        return read

    return timed


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
