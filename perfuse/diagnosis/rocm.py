"""Probes of ROCm, and of what Composable Kernel (CK) needs besides a GPU."""

from __future__ import annotations

from perfuse.build.ck_installation import DEFAULT_HOME, CkState
from perfuse.diagnosis.gpu import tool
from perfuse.diagnosis.machine import Machine
from perfuse.diagnosis.report import Finding


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
        advice = "install hipcc (apt-get install hipcc), or set rocm.compiler."
        named = settings.rocm.compiler
        told = f"{named} was not found" if named else "not found"
        return Finding("problem" if named else "absent", told, advice)
    return tool(machine, path, r"(?:HIP|clang) version:?\s*([\w.-]+)", "reinstall ROCm's compiler.")


def ck(machine: Machine) -> Finding:
    """The headers of Composable Kernel, which may be missing or incomplete."""
    settings = machine.settings_or_defaults()
    found = machine.ck(settings)
    told = str(found).removeprefix("Composable Kernel ").removeprefix("is ")
    if found.state is CkState.COMPLETE:
        unread = f"; {found.num_unread} lines were not understood" if found.num_unread else ""
        return Finding("ok", told + unread)
    # A folder that somebody named, or that is damaged, is a mistake; that there is none is not.
    is_mistake = bool(settings.rocm.ck_dir) or found.state is CkState.INCOMPLETE
    return Finding("problem" if is_mistake else "absent", told, found.advice)
