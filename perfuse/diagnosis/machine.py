"""`Machine`: everything that probes ask of a machine; tests substitute others."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from perfuse.autotune.device_kind import library_versions
from perfuse.autotune.lock import Verdict, check_lock
from perfuse.build.ck_installation import (
    CkInstallation,
    find_ck_compiler,
    inspect_ck,
    rocm_home,
)
from perfuse.build.loader import MAPS, mapped_openmp_runtimes
from perfuse.cache.access import cache_folder
from perfuse.cache.folders import check_usable
from perfuse.cache.resp import RedisAddress, command
from perfuse.config import Settings, snapshot
from perfuse.environment import child_environment
from perfuse.errors import ConfigError, PerfuseError
from perfuse.gpu import Platform
from perfuse.system import Exited, system
from perfuse.target import Target, host_target, machine_isas

TOOL_S = 10.0  # for a compiler or an assembler to print its version
REDIS_S = 2.0
DEVICES_S = 60.0  # for a new process to import PyTorch and to start a driver
KERNEL_S = 240.0

DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")

# Drivers may hang or crash while they start, so they start in a process of their own.
LIST_DEVICES = """
import json, torch
rows = []
for k in range(torch.cuda.device_count()):
    properties = torch.cuda.get_device_properties(k)
    arch = getattr(properties, "gcnArchName", "").partition(":")[0]
    arch = arch if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    rows.append([properties.name, arch, properties.total_memory])
if not rows:
    torch.cuda.init()
print("DEVICES" + json.dumps(rows))
"""
RUN_KERNEL = """
import torch, perfuse
x = torch.ones(8, device="{device}")
print("KERNEL", perfuse.compile(lambda x: (x * 2 + 1).sum())(x).item())
"""
RIGHT = 24.0  # the result of that kernel


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU that PyTorch can use."""

    name: str
    arch: str
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.name} ({self.arch}, {self.num_bytes / 2**30:.0f} GiB)"


class Machine:
    """This machine. Methods may raise, and may hang: probes are bounded."""

    _devices: tuple[Device, ...] | None = None  # listing them takes seconds

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment variables of this process."""
        return child_environment({})

    def settings(self) -> Settings:
        """The settings as they are now; ConfigError where a variable has no valid value."""
        return snapshot()

    def settings_or_defaults(self) -> Settings:
        """The settings, or the defaults where they cannot be read, which is a row of its own."""
        try:
            return self.settings()
        except ConfigError:
            return Settings()

    def torch_version(self) -> str:
        """The version of PyTorch."""
        return str(torch.__version__)

    def libraries(self) -> Mapping[str, str]:
        """The versions of the matmul libraries that PyTorch calls on a CPU."""
        return {name: v for name, v in library_versions(Platform.CPU) if name != "torch"}

    def gpu_build(self, kind: Platform) -> str:
        """The version of CUDA or ROCm that PyTorch is built for; "" if none."""
        return str(getattr(torch.version, kind, None) or "")

    def target(self, settings: Settings) -> Target:
        """The CPU and its compiler."""
        return host_target(settings)

    def isas(self) -> tuple[str, ...]:
        """The instruction sets that the CPU has, widest first."""
        return machine_isas()

    def num_cores(self) -> int:
        """The cores that this process may use."""
        return len(os.sched_getaffinity(0))

    def openmp_runtimes(self) -> tuple[str, ...]:
        """The OpenMP runtimes that are loaded."""
        return mapped_openmp_runtimes(MAPS.read_text() if MAPS.exists() else "")

    def package(self, *names: str) -> str:
        """The version of the first of these packages that is installed; "" if none is."""
        for name in names:
            try:
                return version(name)
            except PackageNotFoundError:
                continue
        return ""

    def package_folder(self, module: str) -> Path | None:
        """The folder of an installed module, which is not imported."""
        found = find_spec(module)
        return None if found is None or found.origin is None else Path(found.origin).parent

    def read(self, path: str) -> str:
        """The text of a file; "" if it cannot be read."""
        try:
            return Path(path).read_text(errors="replace")
        except OSError:
            return ""

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder of this name."""
        return Path(path).exists()

    def run(self, words: Sequence[str], timeout_s: float) -> Exited:
        """Run a program to its end; subprocess.TimeoutExpired if that takes too long."""
        return system().spawn(words, Path("/"), self.environment, timeout_s)

    def devices(self) -> tuple[Device, ...]:
        """The GPUs that PyTorch can use; PerfuseError with PyTorch's message if there are none."""
        if self._devices is None and any(map(self.exists, DEVICE_FILES)):
            done = self.run(python_command(LIST_DEVICES), DEVICES_S)
            found = re.search(r"^DEVICES(.*)$", done.output, re.MULTILINE)
            if found is None:
                raise PerfuseError(_last_line(done.output) or f"PyTorch ended with {done.code}")
            self._devices = tuple(Device(*row) for row in json.loads(found[1]))
        return self._devices or ()

    def run_kernel(self, device: str) -> None:
        """Compile and run a small kernel in a new process; PerfuseError if that fails."""
        done = self.run(python_command(RUN_KERNEL.format(device=device)), KERNEL_S)
        found = re.search(r"^KERNEL (\S+)$", done.output, re.MULTILINE)
        if found is None:
            raise PerfuseError(_last_line(done.output) or f"the process ended with {done.code}")
        check_right(float(found[1]))

    def run_cpu_kernel(self) -> None:
        """Compile and run a small kernel on the CPU; PerfuseError if that fails."""
        compile_function = importlib.import_module("perfuse.api").compile
        check_right(compile_function(lambda x: (x * 2 + 1).sum())(torch.ones(8)).item())

    def rocm_folder(self, settings: Settings) -> str:
        """The folder of ROCm, whether it exists or not."""
        return str(rocm_home(settings))

    def ck_compiler(self, settings: Settings) -> str:
        """The compiler for CK; "" where there is none."""
        return find_ck_compiler(settings)

    def ck(self, settings: Settings) -> CkInstallation:
        """The state of the CK that the settings name, or of the one in ROCm's folder."""
        return inspect_ck(settings)

    def cache_folder(self, settings: Settings) -> Path | None:
        """The folder of the cache; None if there is none."""
        return cache_folder(settings)

    def check_cache(self, folder: Path) -> None:
        """Raise OSError or CacheUnsafe if the folder cannot hold the cache."""
        check_usable(folder)

    def free_bytes(self, folder: Path) -> int:
        """Free space on the disk of a folder."""
        return shutil.disk_usage(folder).free

    def ping(self, url: str) -> None:
        """Ask a Redis server for an answer: OSError or ValueError if there is none."""
        command(RedisAddress.parse(url), "PING", timeout_s=REDIS_S)

    def lock_verdicts(self, path: str) -> Sequence[Verdict]:
        """The entries of a lock file, and whether each fits; LockFileError if it is damaged."""
        return check_lock(path)


def python_command(program: str) -> list[str]:
    """The command of a new process that finds the same packages as this one."""
    paths = [path for path in sys.path if path]
    return [sys.executable, "-c", f"import sys\nsys.path[:] = {paths!r}\n{program}"]


def check_right(result: float) -> None:
    """Raise PerfuseError unless this is the result of the small kernel."""
    if result != RIGHT:
        raise PerfuseError(f"a small kernel computed {result:g}, not {RIGHT:g}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
