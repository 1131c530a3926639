"""The abilities of each backend for each kind of device, from the checks that it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perfuse.diagnosis.report import BackendState, Check
from perfuse.diagnosis.screen import CPU, CUDA, ROCM

Key = tuple[str, str]  # section and name of a check
GOOD = ("ok", "note")


@dataclass(frozen=True, slots=True)
class Needs:
    """A row: what a backend needs to build code for a device, and what else to run it here."""

    backend: str
    device: str
    builds: tuple[Key, ...]
    runs: tuple[Key, ...]
    does: str
    is_cross: bool = True  # whether it can build for a device that is not present


TRITON, PTXAS = (CUDA, "Triton"), (CUDA, "ptxas")
COMPILER, KERNEL = (CPU, "C++ compiler"), (CPU, "a small kernel")
GPU = {gpu: ((gpu, "PyTorch"), (gpu, "devices")) for gpu in (CUDA, ROCM)}
GPU_KERNEL = {gpu: (*GPU[gpu], (gpu, "a small kernel")) for gpu in GPU}

CALLS, KERNELS = "PyTorch's library calls", "kernels, matmul templates"
INTERPRETER = "Triton's interpreter, for tests (gpu.interpret)"
RACED = "calls of MKL and oneDNN, raced (cpu.tune_matmuls)"
ONE = "the algorithm that the library itself chooses"

ROWS = (
    Needs("ATen", CPU, (), ((CPU, "PyTorch"),), CALLS, is_cross=False),
    Needs("ATen", CUDA, (), GPU[CUDA], CALLS, is_cross=False),
    Needs("ATen", ROCM, (), GPU[ROCM], CALLS, is_cross=False),
    Needs("vendor libraries", CPU, (), (KERNEL,), RACED, is_cross=False),
    Needs("vendor libraries", CUDA, (), GPU[CUDA], ONE, is_cross=False),
    Needs("vendor libraries", ROCM, (), GPU[ROCM], ONE, is_cross=False),
    Needs("C++ templates", CPU, (COMPILER,), (KERNEL,), KERNELS, is_cross=False),
    Needs("Triton", CPU, (TRITON,), (), INTERPRETER),
    Needs("Triton", CUDA, (TRITON, PTXAS), GPU_KERNEL[CUDA], KERNELS),
    Needs("Triton", ROCM, (TRITON,), GPU_KERNEL[ROCM], KERNELS),
    Needs("CK", ROCM, ((ROCM, "hipcc"), (ROCM, "CK")), GPU[ROCM], "matmul instances"),
)


def backend_states(checks: Sequence[Check]) -> tuple[BackendState, ...]:
    """The ability of every backend, with the first check that stands in its way."""
    found = {(check.section, check.name): check for check in checks}
    return tuple(_state(row, found) for row in ROWS)


def _state(row: Needs, checks: Mapping[Key, Check]) -> BackendState:
    missing = [checks[key] for key in row.builds if checks[key].state not in GOOD]
    if missing:
        return BackendState(row.backend, row.device, "no", _why(missing[0]), missing[0].advice)
    absent = [checks[key] for key in row.runs if checks[key].state not in GOOD]
    if not absent:
        return BackendState(row.backend, row.device, "runs", row.does)
    advice = absent[0].advice if absent[0].state == "problem" else ""
    if not row.is_cross:
        return BackendState(row.backend, row.device, "no", _why(absent[0]), advice)
    detail = f"{row.does}; {_why(absent[0])}"
    return BackendState(row.backend, row.device, "builds", detail, advice)


def _why(check: Check) -> str:
    return f"{check.name}: {check.found}"
