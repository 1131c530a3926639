"""Probes of what a GPU program needs: a device, its driver, Triton and its assembler."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

from perfuse.diagnosis.machine import TOOL_S, Machine
from perfuse.diagnosis.report import Finding
from perfuse.gpu import Platform

NAMES = {Platform.CUDA: "CUDA", Platform.HIP: "ROCm"}
DEVICE_FILE = {Platform.CUDA: "/dev/nvidiactl", Platform.HIP: "/dev/kfd"}
DRIVER_FILE = {
    Platform.CUDA: "/proc/driver/nvidia/version",
    Platform.HIP: "/sys/module/amdgpu/version",
}
INSTALL = {
    Platform.CUDA: "pip install torch, from https://download.pytorch.org/whl/cu128 or newer.",
    Platform.HIP: "pip install torch, from https://download.pytorch.org/whl/rocm6.4 or newer.",
}
TRITON_PACKAGES = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")
OLDEST_TRITON = (3, 6)
INSTALL_TRITON = "pip install 'perfuse[gpu]', or a PyTorch with CUDA or ROCm, which includes it."


def _has_device(machine: Machine, kind: Platform) -> bool:
    return machine.exists(DEVICE_FILE[kind])


def build(kind: Platform) -> Callable[[Machine], Finding]:
    """The probe of PyTorch's own support of a kind of GPU."""

    def look(machine: Machine) -> Finding:
        version = machine.gpu_build(kind)
        if version:
            return Finding("ok", f"built for {NAMES[kind]} {version}")
        detail = f"built without {NAMES[kind]}"
        if _has_device(machine, kind):
            return Finding("problem", f"{detail}, though there is a GPU", INSTALL[kind])
        return Finding("absent", detail)

    return look


def driver(kind: Platform) -> Callable[[Machine], Finding]:
    """The probe of a GPU's kernel driver."""

    def look(machine: Machine) -> Finding:
        text = machine.read(DRIVER_FILE[kind])
        found = re.search(r"\d+(?:\.\d+)+", text)
        if found is not None:
            return Finding("ok", found[0])
        if _has_device(machine, kind):
            return Finding("ok", "loaded, of unknown version")
        return Finding("absent", "not loaded")

    return look


def devices(kind: Platform) -> Callable[[Machine], Finding]:
    """The probe of the GPUs that PyTorch can use."""

    def look(machine: Machine) -> Finding:
        if not machine.gpu_build(kind):
            return Finding("absent", "none that PyTorch can use")
        found = machine.devices()
        if found:
            return Finding("ok", "; ".join(map(str, found)))
        return Finding("absent", "none (to cross-compile for one: perfuse codegen)")

    return look


def kernel(kind: Platform) -> Callable[[Machine], Finding]:
    """The probe that compiles and runs a small kernel, where there is a GPU."""

    def look(machine: Machine) -> Finding:
        if not (machine.gpu_build(kind) and _has_device(machine, kind)):
            return Finding("absent", "not tried: no device")
        machine.run_kernel("cuda")  # ROCm's devices have the same name in PyTorch
        return Finding("ok", "compiled, loaded and correct")

    return look


def triton(machine: Machine) -> Finding:
    """The compiler of GPU kernels."""
    version = machine.package(*TRITON_PACKAGES)
    is_wanted = any(_has_device(machine, kind) for kind in NAMES)
    if not version:
        return Finding("problem" if is_wanted else "absent", "not installed", INSTALL_TRITON)
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if numbers < OLDEST_TRITON:
        wanted = ".".join(map(str, OLDEST_TRITON))
        return Finding(
            "note", version, f"install the tested version: pip install 'triton=={wanted}.*'."
        )
    return Finding("ok", version)


def ptxas(machine: Machine) -> Finding:
    """The assembler of NVIDIA's GPUs: the one that a variable names, or Triton's own."""
    named = machine.environment.get("TRITON_PTXAS_PATH", "")
    folder = machine.package_folder("triton")
    shipped = "" if folder is None else str(folder / "backends" / "nvidia" / "bin" / "ptxas")
    path = named or shipped
    if not path:
        return Finding("absent", "comes with Triton, which is not installed", INSTALL_TRITON)
    if not machine.exists(path):
        advice = (
            "unset TRITON_PTXAS_PATH."
            if named
            else "reinstall Triton: pip install --force-reinstall triton."
        )
        return Finding("problem", f"{path} does not exist", advice)
    return tool(machine, path, r"release ([\d.]+)", "reinstall Triton, or unset TRITON_PTXAS_PATH.")


def tool(machine: Machine, path: str, pattern: str, advice: str) -> Finding:
    """A program, by the version it prints."""
    try:
        done = machine.run([path, "--version"], TOOL_S)
    except subprocess.TimeoutExpired:
        return Finding("problem", f"{path}: no answer within {TOOL_S:g} s", advice)
    except OSError as error:
        return Finding("problem", f"{path} cannot be run: {error.strerror or error}", advice)
    if done.code != 0:
        return Finding(
            "problem", f"{path} fails with {done.code}: {done.output.strip()[:200]}", advice
        )
    found = re.search(pattern, done.output)
    version = found[1] if found else done.output.strip().partition("\n")[0]
    return Finding("ok", f"{path} ({version})")
