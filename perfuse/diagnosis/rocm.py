"""Probes of ROCm, and of what Composable Kernel (CK) needs besides a GPU."""

from __future__ import annotations

from pathlib import PurePath

from perfuse.build.ck import COMPILER_ADVICE
from perfuse.build.ck_installation import DEFAULT_HOME, CkState
from perfuse.codegen.ck.legality import why_no_device
from perfuse.codegen.ck.problem import arch_of_name
from perfuse.diagnosis.gpu import tool
from perfuse.diagnosis.machine import Machine
from perfuse.diagnosis.report import Finding
from perfuse.errors import PerfuseError
from perfuse.gpu import Platform


def rocm(machine: Machine) -> Finding:
    """The ROCm installation."""
    folder = machine.rocm_folder(machine.settings_or_defaults())
    version = machine.read(f"{folder}/.info/version").strip()
    if version:
        return Finding("ok", f"{version} in {folder}")
    if machine.exists(folder):
        return Finding("note", f"{folder}, of unknown version")
    if folder != DEFAULT_HOME:
        return Finding(
            "problem",
            f"{folder} does not exist",
            "correct $ROCM_HOME, $ROCM_PATH or the setting rocm.home.",
        )
    return Finding("absent", "not installed", "needed for CK: https://rocm.docs.amd.com.")


def hipcc(machine: Machine) -> Finding:
    """The compiler of CK kernels."""
    settings = machine.settings_or_defaults()
    path = machine.ck_compiler(settings)
    if not path:
        named = settings.rocm.compiler
        detail = f"{named} was not found" if named else "not found"
        return Finding("problem" if named else "absent", detail, COMPILER_ADVICE)
    is_plain = PurePath(path).name == "clang++" and not settings.rocm.compiler
    if is_plain and not machine.exists(machine.rocm_folder(settings)):
        return Finding("absent", f"only {path}, without ROCm's headers", COMPILER_ADVICE)
    return tool(machine, path, r"(?:HIP|clang) version:?\s*([\w.-]+)", "reinstall ROCm's compiler.")


def _refused_devices(machine: Machine) -> list[str]:
    """Why CK supports none of the GPUs present; empty if it does, or there are none."""
    if not machine.gpu_build(Platform.HIP):
        return []
    try:
        refusals = [why_no_device(device.arch) for device in machine.devices()]
    except PerfuseError:  # the row of the devices reports it
        return []
    return refusals if all(refusals) else []


def ck(machine: Machine) -> Finding:
    """The headers of Composable Kernel, which may be missing or incomplete."""
    settings = machine.settings_or_defaults()
    why = why_no_device(arch_of_name(settings.rocm.arch)) if settings.rocm.arch else ""
    if why:
        return Finding(
            "problem", f"rocm.arch: {why}", "correct the setting rocm.arch, or unset it."
        )
    found = machine.ck(settings)
    detail = str(found).removeprefix("Composable Kernel ").removeprefix("is ")
    if found.state is CkState.COMPLETE:
        refused = [] if settings.rocm.arch else _refused_devices(machine)
        if refused:
            return Finding("absent", f"{detail}; {refused[0]}", "matmuls are ATen's and Triton's.")
        unread = f"; {found.num_unread} lines could not be parsed" if found.num_unread else ""
        return Finding("ok", detail + unread)
    # A folder that somebody named, or that is damaged, is a mistake; that there is none is not.
    is_mistake = bool(settings.rocm.ck_dir) or found.state is CkState.INCOMPLETE
    return Finding("problem" if is_mistake else "absent", detail, found.advice)
