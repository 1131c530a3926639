"""How long a GPU takes for a call: caches flushed before each run, the median of several."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from perfuse.ir.dtype import to_torch
from perfuse.ir.program import Program

_FLUSHED_BYTES = 256 << 20
_WARM_UP, _RUNS = 3, 15


@cache
def _flusher(device: torch.device) -> torch.Tensor:
    return torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=device)


def made_up_inputs(program: Program, device: torch.device) -> list[Any]:
    """Random tensors of the shapes that a program takes."""
    made: list[Any] = []
    for name in program.inputs:
        buffer = program.buffers[name]
        dtype, span = to_torch(buffer.dtype), buffer.num_elements
        assert isinstance(span, int), "sizes are known"
        flat = torch.rand(max(span, 1), device=device).to(dtype)
        made.append(torch.as_strided(flat, buffer.shape, buffer.strides))  # type: ignore[arg-type]
    return made


def seconds(call: Callable[[list[Any]], Any], inputs: list[Any], device: torch.device) -> float:
    """The median time of a call on the device."""
    flusher = _flusher(device)
    times = []
    for number in range(_WARM_UP + _RUNS):
        start, end = _event(), _event()
        flusher.zero_()
        start.record()
        call(list(inputs))
        end.record()
        if number >= _WARM_UP:
            times.append((start, end))
    torch.cuda.synchronize(device)
    return float(statistics.median(s.elapsed_time(e) for s, e in times)) / 1e3


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
