"""`doctor`: every probe of a machine in order, each within its time, as one report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from perfuse.diagnosis import cpu, gpu, rocm, surroundings
from perfuse.diagnosis.backends import backend_states
from perfuse.diagnosis.limits import found_within
from perfuse.diagnosis.machine import DEVICES_S, KERNEL_S, Machine
from perfuse.diagnosis.report import Check, Finding, Report
from perfuse.diagnosis.screen import CPU, CUDA, ROCM, SURROUNDINGS
from perfuse.gpu import Platform

QUICK_S = 20.0


@dataclass(frozen=True, slots=True)
class Probe:
    """One row to be filled: its probe, the time limit, and what has to work first."""

    section: str
    name: str
    look: Callable[[Machine], Finding]
    limit_s: float = QUICK_S
    is_essential: bool = False
    needs: str = ""  # a check of the same section


PROBES = (
    Probe(CPU, "Python", cpu.python, is_essential=True),
    Probe(CPU, "PyTorch", cpu.pytorch),
    Probe(CPU, "C++ compiler", cpu.cpp_compiler, is_essential=True),
    Probe(CPU, "vectors", cpu.vectors),
    Probe(CPU, "cores", cpu.cores),
    Probe(CPU, "OpenMP", cpu.openmp),
    Probe(CPU, "a small kernel", cpu.kernel, KERNEL_S, is_essential=True, needs="C++ compiler"),
    Probe(CUDA, "PyTorch", gpu.build(Platform.CUDA)),
    Probe(CUDA, "driver", gpu.driver(Platform.CUDA)),
    Probe(CUDA, "devices", gpu.devices(Platform.CUDA), 2 * DEVICES_S, needs="PyTorch"),
    Probe(CUDA, "Triton", gpu.triton),
    Probe(CUDA, "ptxas", gpu.ptxas),
    Probe(CUDA, "a small kernel", gpu.kernel(Platform.CUDA), 2 * KERNEL_S, needs="devices"),
    Probe(ROCM, "PyTorch", gpu.build(Platform.HIP)),
    Probe(ROCM, "driver", gpu.driver(Platform.HIP)),
    Probe(ROCM, "devices", gpu.devices(Platform.HIP), 2 * DEVICES_S, needs="PyTorch"),
    Probe(ROCM, "ROCm", rocm.rocm),
    Probe(ROCM, "hipcc", rocm.hipcc),
    Probe(ROCM, "CK", rocm.ck, 2 * DEVICES_S),
    Probe(ROCM, "a small kernel", gpu.kernel(Platform.HIP), 2 * KERNEL_S, needs="devices"),
    Probe(SURROUNDINGS, "settings", surroundings.settings, is_essential=True),
    Probe(SURROUNDINGS, "variables", surroundings.variables),
    Probe(SURROUNDINGS, "cache", surroundings.cache),
    Probe(SURROUNDINGS, "remote cache", surroundings.redis),
    Probe(SURROUNDINGS, "lock file", surroundings.lock_file),
)


def doctor(machine: Machine | None = None) -> Report:
    """Examine this machine: what is installed, what is missing, what each backend can do.

    Takes seconds, never hangs and never raises; a small kernel is compiled and run. `machine`
    stands in for this one in tests.
    """
    examined = Machine() if machine is None else machine
    checks: dict[tuple[str, str], Check] = {}
    for probe in PROBES:
        checks[probe.section, probe.name] = _checked(probe, examined, checks)
    rows = tuple(checks.values())
    return Report(rows, backend_states(rows))


def _checked(probe: Probe, machine: Machine, checks: dict[tuple[str, str], Check]) -> Check:
    needed = checks.get((probe.section, probe.needs))
    if needed is not None and needed.state == "problem":
        finding = Finding("problem", f"not tried: see {needed.name}")
    else:
        finding = found_within(probe.limit_s, partial(probe.look, machine))
    parts = (finding.state, finding.found, finding.advice)
    return Check(probe.section, probe.name, *parts, probe.is_essential)
