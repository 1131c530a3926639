"""Probes of ROCm, and of what Composable Kernel (CK) needs besides a GPU."""

from __future__ import annotations

from perfuse.diagnosis.gpu import tool
from perfuse.diagnosis.machine import Machine
from perfuse.diagnosis.report import Finding

DEFAULT = "/opt/rocm"


def rocm(machine: Machine) -> Finding:
    """The ROCm installation."""
    folder = machine.rocm_folder(machine.settings_or_defaults())
    version = machine.read(f"{folder}/.info/version").strip()
    if version:
        return Finding("ok", f"{version} in {folder}")
    if machine.exists(folder):
        return Finding("note", f"{folder}, of unknown version")
    if folder != DEFAULT:
        return Finding("problem", f"{folder} does not exist", "correct or unset $ROCM_PATH.")
    return Finding("absent", "not installed", "needed for CK: https://rocm.docs.amd.com.")


def hipcc(machine: Machine) -> Finding:
    """The compiler of CK kernels."""
    path = machine.ck_compiler(machine.settings_or_defaults())
    advice = "install it (Debian and Ubuntu: apt-get install hipcc), or put it on PATH."
    if not path:
        return Finding("absent", "not found", advice)
    return tool(machine, path, r"(?:HIP|clang) version:?\s*([\w.-]+)", "reinstall ROCm's compiler.")


def ck(machine: Machine) -> Finding:
    """The headers of Composable Kernel, which may be missing or incomplete."""
    settings = machine.settings_or_defaults()
    found = machine.ck(settings)
    if found.is_complete:
        return Finding("ok", found.told)
    # A folder that somebody named has to work; that there is none is nobody's mistake.
    return Finding(
        "problem" if found.is_named or found.is_there else "absent", found.told, found.advice
    )
