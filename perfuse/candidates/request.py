"""`BenchmarkRequest`: one measurement as plain data, which another process can carry out.

A request names what to run and describes its operands; tensors do not travel. What a worker does
with it is `answer`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Run = Callable[[], Any]

_MOST_RANDOM = 1_048_573  # a prime, so that no two rows of a matrix are the same


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """A tensor by its description; the same seed gives the same numbers in every process."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"
    seed: int = 0

    @property
    def span(self) -> int:
        """The number of elements from the first to the last, gaps included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))

    def tensor(self) -> torch.Tensor:
        """The tensor, from a generator of its own on its device."""
        device = torch.device(self.device)
        how: dict[str, Any] = {
            "generator": torch.Generator(device).manual_seed(self.seed), "device": device,
        }  # fmt: skip
        if self.dtype.is_floating_point or self.dtype.is_complex:
            wide = torch.complex64 if self.dtype.is_complex else torch.float32
            # Repeated, if it is large: random numbers take longer than what is measured with them.
            some = torch.randn(min(self.span, _MOST_RANDOM), dtype=wide, **how).to(self.dtype)
            flat = some.repeat(-(-self.span // max(1, len(some))))[: self.span]
        elif self.dtype is torch.bool:
            flat = torch.randint(0, 2, (self.span,), **how).bool()
        else:
            flat = torch.randint(0, 16, (self.span,), **how).to(self.dtype)
        return flat.as_strided(self.shape, self.strides)


class BenchmarkRequest:
    """A measurement of one candidate. Subclasses implement `benchmark` or `loaded`."""

    operands: tuple[RandomTensor, ...] = ()
    repetitions: int = 5

    def benchmark(
        self, *input_tensors: torch.Tensor, output_tensor: torch.Tensor | None = None
    ) -> float:
        """The milliseconds of a run: on these tensors, or on random ones of the described form."""
        inputs = input_tensors or tuple(operand.tensor() for operand in self.operands)
        return milliseconds(self.loaded(inputs, output_tensor), self.repetitions)

    def loaded(self, inputs: tuple[torch.Tensor, ...], out: torch.Tensor | None) -> Run:
        """The candidate on these tensors, ready to run; it returns its result."""
        raise NotImplementedError(f"{type(self).__name__} has neither benchmark nor loaded")

    def answer(self) -> Any:
        """Carry out the request in a worker; plain data."""
        return self.benchmark()


def milliseconds(run: Run, repetitions: int = 5) -> float:
    """The median time of a run, after one that does not count."""
    run()
    return 1e3 * statistics.median(seconds(run) for _ in range(max(1, repetitions)))


def seconds(run: Run, clock: Callable[[], float] = time.perf_counter) -> float:
    """The time of one run, until the device is done with it."""
    start = clock()
    result = run()
    if isinstance(result, torch.Tensor) and result.is_cuda:
        torch.cuda.synchronize(result.device)
    return clock() - start
