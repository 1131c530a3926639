"""Matmul candidates with a fault each; workers import this file."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import torch

from perfuse.candidates.library import CpuMatmul
from perfuse.candidates.request import BenchmarkRequest, Run


class FaultyMatmul(BenchmarkRequest):
    """Computes a matmul, or does harm, as its fault says."""

    def __init__(self, fault: str, problem: CpuMatmul, path: str) -> None:
        self.fault, self.path = fault, path
        self.operands = problem.operands()

    def loaded(self, inputs: tuple[torch.Tensor, ...], out: torch.Tensor | None) -> Run:
        assert out is not None
        do_harm = getattr(self, "_" + self.fault.replace(" ", "_"))
        turns = iter(range(1 << 30))

        def run() -> Any:
            torch.mm(*inputs, out=out)
            told = do_harm(out, next(turns))
            return out if told is None else told

        return run

    def _segfaults(self, out: torch.Tensor, turn: int) -> None:
        ctypes.memset(8, 1, 64)

    def _hangs(self, out: torch.Tensor, turn: int) -> None:
        while True:
            pass

    def _forks_and_hangs(self, out: torch.Tensor, turn: int) -> None:
        child = os.fork()
        if child:
            with open(self.path, "w") as file:
                file.write(str(child))
        time.sleep(1000)

    def _allocates_without_end(self, out: torch.Tensor, turn: int) -> None:
        held = []
        while True:
            held.append(torch.empty(1 << 26))

    def _raises(self, out: torch.Tensor, turn: int) -> None:
        raise RuntimeError("too many registers")

    def _writes_out_of_bounds(self, out: torch.Tensor, turn: int) -> None:
        ctypes.memset(out.data_ptr() + 4 * out.numel() + 64, 0, 16)

    def _is_fast_and_wrong(self, out: torch.Tensor, turn: int) -> None:
        out.zero_()

    def _is_right_only_the_first_time(self, out: torch.Tensor, turn: int) -> None:
        if turn > 0:
            out[0, 0] += 1

    def _is_right_until_it_is_timed(self, out: torch.Tensor, turn: int) -> None:
        if turn > 1:
            out[-1, -1] += 1

    def _raises_while_it_is_timed(self, out: torch.Tensor, turn: int) -> None:
        if turn > 3:
            raise RuntimeError("a late error")

    def _returns_text(self, out: torch.Tensor, turn: int) -> str:
        return "done"
