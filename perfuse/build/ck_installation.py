"""`inspect_ck`: whether Composable Kernel is installed and complete, and what it provides."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from perfuse.codegen.ck.instance import shipped_instances, shipped_version
from perfuse.codegen.ck.parse import BATCHED, FOLDERS, INSTANCES, PLAIN, Listed, listed
from perfuse.config import Settings

DEFAULT_HOME = "/opt/rocm"
CONFIG = "ck/config.h"  # written by CK's own build, so that copies of its sources have none
_IMPL = "ck/tensor_operation/gpu/device/impl"
# The headers that generated sources include; without one of them nothing compiles.
HEADERS = (
    "ck/ck.hpp",
    "ck/stream_config.hpp",
    "ck/tensor_operation/gpu/device/tensor_layout.hpp",
    "ck/tensor_operation/gpu/device/gemm_specialization.hpp",
    "ck/tensor_operation/gpu/element/element_wise_operation.hpp",
    f"{_IMPL}/device_gemm_multiple_d_xdl_cshuffle_v3.hpp",
    f"{_IMPL}/device_batched_gemm_multiple_d_xdl_cshuffle_v3.hpp",
)


class CkState(StrEnum):
    """The state of an installation."""

    MISSING = "missing"
    INCOMPLETE = "incomplete"
    COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class CkInstallation:
    """Composable Kernel as it was found on this machine."""

    state: CkState
    folder: str = ""  # "" where none was found
    looked_in: tuple[str, ...] = ()
    missing_files: tuple[str, ...] = ()  # relative to `include`
    include_folders: tuple[str, ...] = ()
    has_config: bool = False  # else Perfuse writes a config.h of its own
    version: str = ""
    num_instances: int = 0  # plain and batched ones, its own or those of the shipped table
    has_own_instances: bool = False
    num_unread: int = 0  # lines of its lists that Perfuse cannot read
    digest: str = ""  # of its headers

    def __str__(self) -> str:
        if self.state is CkState.MISSING:
            return f"Composable Kernel is not installed (looked in {', '.join(self.looked_in)})"
        if self.state is CkState.INCOMPLETE:
            return f"Composable Kernel in {self.folder} lacks {', '.join(self.missing_files)}"
        source = "of its own" if self.has_own_instances else "from Perfuse's own table"
        found = f"Composable Kernel {self.version} in {self.folder}"
        return f"{found}: {self.num_instances} instances {source}"

    @property
    def advice(self) -> str:
        """How to get a complete installation; empty where it is one."""
        if self.state is CkState.COMPLETE:
            return ""
        return (
            "install ROCm's package composablekernel-dev, or clone ROCm/composable_kernel, "
            "and set rocm.ck_dir to the folder that contains `include`."
        )


def rocm_home(settings: Settings) -> Path:
    """The folder of ROCm, whether it exists or not."""
    return Path(settings.rocm.home or DEFAULT_HOME)


def find_ck_compiler(settings: Settings) -> str:
    """The compiler for CK's sources: hipcc, or the clang of ROCm; empty where there is none."""
    home = rocm_home(settings)
    own = [home / "bin/hipcc", home / "bin/amdclang++", home / "lib/llvm/bin/clang++"]
    places = [*map(str, own), "hipcc", "amdclang++", "clang++"]
    named = [settings.rocm.compiler] if settings.rocm.compiler else places
    return next((found for place in named if (found := shutil.which(place))), "")


def inspect_ck(settings: Settings) -> CkInstallation:
    """The state of the CK that the settings name, or of the one that comes with ROCm."""
    named = settings.rocm.ck_dir
    named = os.path.abspath(os.path.expanduser(named)) if named else ""
    folder = Path(named) if named else rocm_home(settings)
    include = folder / "include"
    looked_in = (str(include / "ck"),)
    # `os.path`, since a folder that may not be read is one without headers.
    if not os.path.isdir(include / "ck"):
        return CkInstallation(CkState.MISSING, looked_in=looked_in)
    missing = tuple(name for name in HEADERS if not os.path.isfile(include / name))
    if missing:
        return CkInstallation(CkState.INCOMPLETE, str(folder), looked_in, missing)
    try:
        return _complete(str(folder), str(rocm_home(settings)))
    except OSError as error:  # a header that may not be read, or that vanished meanwhile
        unread = f"{error.filename or include / 'ck'} (cannot be read: {error.strerror})"
        return CkInstallation(CkState.INCOMPLETE, str(folder), looked_in, (unread,))


@functools.cache
def _complete(folder_name: str, home: str) -> CkInstallation:
    """A complete installation, cached since its headers take long to read; others may get fixed."""
    folder = Path(folder_name)
    include = folder / "include"
    includes = [include, folder / "library" / "include", Path(home) / "include"]
    present = tuple(dict.fromkeys(str(path) for path in includes if path.is_dir()))
    lists = [_listed(folder_name, marker) for marker in (PLAIN, BATCHED)]
    num_own = sum(len(each.instances) for each in lists)
    num_shipped = sum(len(shipped_instances(is_batched=b)) for b in (False, True))
    return CkInstallation(
        CkState.COMPLETE,
        folder_name,
        (str(include / "ck"),),
        include_folders=present,
        has_config=any((Path(path) / CONFIG).is_file() for path in present),
        version=_version(folder),
        num_instances=num_own or num_shipped,
        has_own_instances=num_own > 0,
        num_unread=sum(len(each.unread) for each in lists),
        digest=_digest(include / "ck"),
    )


def installed_instances(installation: CkInstallation, *, is_batched: bool) -> Listed:
    """The instances that an installation lists; those of the shipped table where it lists none."""
    if installation.has_own_instances:
        found = _listed(installation.folder, BATCHED if is_batched else PLAIN)
        if found.instances:
            return found
    return Listed(shipped_instances(is_batched=is_batched))


@functools.cache
def _listed(folder: str, marker: str) -> Listed:
    root = Path(folder) / INSTANCES / FOLDERS[marker]
    files = sorted(path for path in root.rglob("*.hpp")) if root.is_dir() else []
    return listed((path.read_text(errors="replace") for path in files), marker)


def _version(folder: Path) -> str:
    """The version that CK's own build, or its sources, state; else that of the shipped table."""
    stated = folder / "include" / "ck" / "version.h"
    if stated.is_file():
        text = stated.read_text(errors="replace")
        parts = re.findall(r"CK_VERSION_(?:MAJOR|MINOR|PATCH)\s+(\d+)", text)
        if parts:
            return ".".join(parts)
    build = folder / "CMakeLists.txt"
    text = build.read_text(errors="replace") if build.is_file() else ""
    found = re.search(r"set\(version ([\d.]+)\)", text)
    return found[1] if found else f"of unknown version (table of {shipped_version()})"


def _digest(headers: Path) -> str:
    """A digest of all headers: another CK gives other machine code for the same source."""
    digest = hashlib.sha256()
    for path in sorted(headers.rglob("*")):
        if path.suffix in (".h", ".hpp") and path.is_file():
            digest.update(f"{path.relative_to(headers)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
