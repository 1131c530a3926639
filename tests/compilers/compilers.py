"""The compilers of this machine, and how kernels are built with each: levels, ISAs, sanitizers."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass

from perfuse.target import machine_isas

NAMES = ("g++-11", "g++-12", "g++", "clang++-14", "clang++-16", "clang++-19", "clang++-22")
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all -g1"


@dataclass(frozen=True, slots=True)
class Build:
    """One way to build kernels."""

    compiler: str  # a command, with arguments
    opt_level: int
    isa: str
    preload: str = ""  # the runtime that a sanitized library needs in the process from the start

    def __str__(self) -> str:
        return f"{self.compiler.split('/')[-1]} -O{self.opt_level} {self.isa}"

    def environment(self) -> dict[str, str]:
        """The environment in which a process builds its kernels this way."""
        found = {
            "PERFUSE_CPU_COMPILER": self.compiler,
            "PERFUSE_CPU_OPT_LEVEL": str(self.opt_level),
            "PERFUSE_CPU_SIMD": self.isa,
        }
        if self.preload:
            # The interpreter and PyTorch leak on purpose; only errors in kernels are looked for.
            found |= {"LD_PRELOAD": self.preload, "ASAN_OPTIONS": "detect_leaks=0"}
        return found


def zig_command() -> str:
    """PyPI's clang, or nothing where it is not installed."""
    if importlib.util.find_spec("ziglang") is None:
        return ""
    return shlex.join([sys.executable, "-m", "ziglang", "c++"])


def found_compilers() -> list[str]:
    """Those of the list that are here; `g++` stands for itself where it has no version."""
    here = [name for name in NAMES if shutil.which(name)]
    versioned = any(name.startswith("g++-") for name in here)
    here = [name for name in here if name != "g++" or not versioned]
    return [*here, zig_command()] if zig_command() else here


def builds(compilers: list[str]) -> list[Build]:
    """Every compiler at every level for every vector ISA that this CPU has."""
    isas = [isa for isa in machine_isas() if isa in ("avx2", "avx512", "neon")] or ["scalar"]
    return [Build(c, level, isa) for c in compilers for level in (1, 2, 3) for isa in isas]


def sanitized() -> list[Build]:
    """g++ with AddressSanitizer and UndefinedBehaviorSanitizer."""
    compiler = next((c for c in found_compilers() if c.startswith("g++")), "")
    if not compiler:
        return []
    name = [compiler, "-print-file-name=libasan.so"]
    runtime = subprocess.run(name, capture_output=True, text=True, check=True).stdout.strip()
    return [Build(f"{compiler} {SANITIZERS}", 1, machine_isas()[0], runtime)]
