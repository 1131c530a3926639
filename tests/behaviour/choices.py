"""Choices and requests that child processes of the tests import: as little else as possible."""

from __future__ import annotations

import os
from typing import Any

import torch

from perfuse.autotune import (
    CUDA_VISIBLE_DEVICES,
    BenchmarkRequest,
    ChoiceCaller,
    TritonTemplateCaller,
)


class AlwaysFails(ChoiceCaller):
    """A choice that cannot be run."""

    def benchmark(self, *args: torch.Tensor, out: torch.Tensor) -> float:
        raise RuntimeError("this choice always fails")


def measure(choice: Any, args: Any, out: torch.Tensor, times: torch.Tensor) -> None:
    """Measure a choice in a child process."""
    times.fill_(choice.benchmark(*args, out=out))


class DeviceRequest(BenchmarkRequest):
    """Gives a value, if the worker sees the devices that it should."""

    def __init__(self, value: float, allowed: str | None) -> None:
        self.value, self.allowed = value, allowed

    def benchmark(
        self, *input_tensors: torch.Tensor, output_tensor: torch.Tensor | None = None
    ) -> float:
        seen = os.environ.get(CUDA_VISIBLE_DEVICES)
        assert seen == self.allowed or seen in (self.allowed or "").split(",")
        return self.value


class DeviceChoice(TritonTemplateCaller):
    """A choice of nothing but a request."""

    def __init__(self, bmreq: DeviceRequest) -> None:
        self.bmreq = bmreq

    def __str__(self) -> str:
        return f"choice {self.bmreq.value}"
