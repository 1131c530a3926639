"""`Target`: the machine that code is generated for, and the compiler flags that follow from it."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from perfuse.config import Settings
from perfuse.errors import CompilerMissing, ConfigError
from perfuse.gpu import Gpu, Platform, gpu_of_device, gpu_of_name

LANES = {"avx512": 16, "avx2": 8, "neon": 8, "scalar": 8}

AVX2_FEATURES = ("avx2", "fma", "f16c", "bmi2")
AVX512_FEATURES = ("avx512f", "avx512bw", "avx512dq", "avx512vl")

# What an ISA name guarantees, spelled out: never -march=native, so that an object built on one
# machine is right on every machine of the same ISA.
ISA_FLAGS = {
    "avx512": tuple(f"-m{feature}" for feature in AVX512_FEATURES + AVX2_FEATURES)
    + ("-mprefer-vector-width=512",),
    "avx2": tuple(f"-m{feature}" for feature in AVX2_FEATURES),
    "neon": (),
    "scalar": (),
}

# No -ffast-math: NaN, infinities and signed zeros mean what they mean in eager PyTorch. Contraction
# is off because the vector math rounds by adding and subtracting large numbers; kernels ask for
# fused multiply-add by name.
BASE_FLAGS = tuple(
    "-std=c++20 -fPIC -fno-math-errno -fno-trapping-math -ffp-contract=off "
    "-fno-exceptions -fno-rtti -fno-plt -pipe -w".split()
)

# GCC's ivopts may rewrite `a - 4*i` and `a + 4*i` to share one induction variable; the address it
# builds has the constant 0 as its base. Passes after it (pure-const, modref) take that for a null
# dereference, which never returns: whatever follows it is dead, and so are calls of the kernel.
# Seen with g++ 12.2 on `(x + x.flip(0)).sum(-1)`. This flag says that address 0 may be valid, which
# is all those passes ask. The kernels of benchmarks/kernels.py compile to the same instructions
# with it (two of 38 in another order); -fno-ivopts, the alternative, changes all of them.
GCC_FLAGS = ("-fno-delete-null-pointer-checks",)

# g++ copies what is wider than a vector (8 doubles or int64 under AVX2) in pieces of 16 bytes and
# reads them back in 32: each such load waits for two stores. With these flags, which g++ 12 was the
# first to have, it moves whole vectors.
GCC_AVX2_MOVES = ("-mmove-max=256", "-mstore-max=256")

# Unlike other compilers, zig uses every instruction of the machine it runs on by default.
# Kernels use no C++ library, and zig would first build its own, for minutes.
ZIG_FLAGS = ("-mcpu=baseline", "-nostdlib++")

# Sizes of a common server core, for machines that do not report theirs.
DEFAULT_CACHE_BYTES = {1: 32 << 10, 2: 1 << 20, 3: 16 << 20}

# The GPU whose code the interpreter runs where no setting names one.
INTERPRETED_ARCH = "sm_90"

SYSFS_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True, slots=True)
class Target:
    """A CPU with its caches and compiler, and the GPU that code is generated for, if any."""

    kind: Platform  # where kernels run
    arch: str
    isa: str
    lanes: int  # float32 values in one vector of the generated code
    num_threads: int
    l1_bytes: int
    l2_bytes: int
    l3_bytes: int
    compiler: str  # a command, shell-quoted; empty where no compiler was found
    compiler_version: str
    gpu: Gpu | None = None  # where kernels run; None runs them on the CPU
    compiler_wanted: str = ""  # the compiler that was asked for by name
    has_bf16_pairs: bool = False  # an instruction multiplies pairs of bfloat16

    def __str__(self) -> str:
        if self.gpu is not None:
            return str(self.gpu)
        return f"{self.kind} {self.arch} {self.isa}, {self.num_threads} threads"

    def compiler_command(self) -> tuple[str, ...]:
        """The command line that starts the compiler."""
        if not self.compiler:
            looked_for = self.compiler_wanted or "$CXX, g++ and clang++"
            raise CompilerMissing(f"no C++ compiler found (looked for {looked_for})")
        return tuple(shlex.split(self.compiler))

    def cxx_flags(self, opt_level: int = 3) -> tuple[str, ...]:
        """The flags that compile a kernel for this target; linking is the build's business."""
        own = ZIG_FLAGS if self.is_zig() else () if self.is_clang() else GCC_FLAGS
        moves = GCC_AVX2_MOVES if self.isa == "avx2" and self._is_gcc_since(12) else ()
        return (f"-O{opt_level}", *BASE_FLAGS, *own, *ISA_FLAGS[self.isa], *moves)

    def _is_gcc_since(self, oldest: int) -> bool:
        return not self.is_clang() and (major_version(self.compiler_version) or 0) >= oldest

    def is_clang(self) -> bool:
        """Whether the compiler is clang, under whatever name."""
        return "clang" in self.compiler_version.lower()

    def is_zig(self) -> bool:
        """Whether the compiler is zig's clang: "zig c++", or PyPI's "python -m ziglang c++"."""
        return any(Path(word).name in ("zig", "ziglang") for word in shlex.split(self.compiler))


def cpu_features(cpuinfo: str) -> frozenset[str]:
    """The feature words of the first CPU in the text of /proc/cpuinfo."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return frozenset(found.group(1).split()) if found else frozenset()


def supported_isas(arch: str, features: frozenset[str]) -> tuple[str, ...]:
    """The instruction sets this CPU can run, widest first."""
    isas: list[str] = []
    if features.issuperset(AVX2_FEATURES):
        if features.issuperset(AVX512_FEATURES):
            isas.append("avx512")
        isas.append("avx2")
    if arch in ("aarch64", "arm64"):
        isas.append("neon")
    return (*isas, "scalar")


def choose_isa(wanted: str, supported: tuple[str, ...]) -> str:
    """The ISA for the setting cpu.simd."""
    if wanted == "auto":
        return supported[0]
    if wanted not in supported:
        raise ConfigError(
            f"cpu.simd is {wanted!r}, which this CPU does not have",
            hint=f"choose one of: auto, {', '.join(supported)}.",
        )
    return wanted


def find_compiler(wanted: str) -> str:
    """The compiler's command with its full path, or nothing if there is none."""
    for candidate in (wanted,) if wanted else ("g++", "clang++"):
        words = _words(candidate)
        path = shutil.which(words[0]) if words else None
        if path is not None:
            return shlex.join([path, *words[1:]])
    return ""


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ConfigError(
            f"{command!r} is not a valid command: {error}",
            hint="check the quotes in $CXX or the setting cpu.compiler.",
        ) from error


def major_version(version: str) -> int | None:
    """The first number of a version such as "g++ (Debian 12.2.0-14) 12.2.0"."""
    numbers: list[str] = re.findall(r"(?<![\w.])(\d+)\.\d+", version)
    return int(numbers[-1]) if numbers else None


def compiler_version(command: str) -> str:
    """The first line that the compiler prints about itself."""
    if not command:
        return ""
    asked = [*shlex.split(command), "--version"]
    try:
        answer = subprocess.run(
            asked, capture_output=True, text=True, errors="replace", timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerMissing(f"cannot run {command}: {error}") from error
    return answer.stdout.partition("\n")[0].strip()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def parse_size(text: str) -> int:
    """Bytes of a size as sysfs writes it: 32K, 1024K, 16M."""
    found = re.fullmatch(r"(\d+)([KMG]?)", text.strip())
    return int(found.group(1)) << {"": 0, "K": 10, "M": 20, "G": 30}[found.group(2)] if found else 0


def cache_sizes(indices: Iterable[Path]) -> dict[int, int]:
    """Bytes of the data cache of each level."""
    sizes = dict(DEFAULT_CACHE_BYTES)
    for index in indices:
        level, size = _read(index / "level").strip(), parse_size(_read(index / "size"))
        if _read(index / "type").strip() != "Instruction" and level.isdecimal() and size:
            sizes[int(level)] = size
    return sizes


def _features() -> frozenset[str]:
    return cpu_features(_read(Path("/proc/cpuinfo")))


@cache
def _machine() -> tuple[str, tuple[str, ...], dict[int, int]]:
    arch = platform.machine() or "unknown"
    isas = supported_isas(arch, _features())
    indices = sorted(SYSFS_CACHES.glob("index*")) if SYSFS_CACHES.is_dir() else ()
    return arch, isas, cache_sizes(indices)


@cache
def cpu_model() -> str:
    """The name of this machine's CPU, as it reports it."""
    text = _read(Path("/proc/cpuinfo"))
    rows = re.findall(r"^(?:model name|CPU implementer|CPU part)\s*:\s*(.*)$", text, re.MULTILINE)
    return " ".join(dict.fromkeys(row.strip() for row in rows if row.strip())) or "unknown model"


def machine_isas() -> tuple[str, ...]:
    """The instruction sets that this machine can run, widest first."""
    return _machine()[1]


@cache
def _compiler(wanted: str) -> tuple[str, str]:
    command = find_compiler(wanted)
    return command, compiler_version(command)


@cache
def _target(simd: str, num_threads: int, compiler: str) -> Target:
    arch, isas, caches = _machine()
    isa = choose_isa(simd, isas)
    command, version = _compiler(compiler)
    return Target(
        kind=Platform.CPU,
        arch=arch,
        isa=isa,
        lanes=LANES[isa],
        num_threads=num_threads,
        l1_bytes=caches[1],
        l2_bytes=caches[2],
        l3_bytes=caches[3],
        compiler=command,
        compiler_version=version,
        compiler_wanted=compiler,
        has_bf16_pairs=isa == "avx512" and "avx512_bf16" in _features(),
    )


def host_target(settings: Settings) -> Target:
    """The machine this process runs on, under the settings."""
    num_threads = settings.cpu.threads or torch.get_num_threads() or os.cpu_count() or 1
    return _target(settings.cpu.simd, num_threads, settings.cpu.compiler)


def gpu_target(settings: Settings, gpu: Gpu) -> Target:
    """This machine with a GPU that need not be present."""
    return replace(host_target(settings), kind=gpu.kind, gpu=gpu)


def target_of(name: str, settings: Settings) -> Target:
    """The target behind "cpu", "cuda:90" (or "sm_90"), "hip:gfx942" (or "gfx942")."""
    return host_target(settings) if name == "cpu" else gpu_target(settings, gpu_of_name(name))


def device_target(settings: Settings, device: torch.device) -> Target:
    """The target of tensors on this device; triton.arch may name another GPU than the one there."""
    if settings.gpu.interpret and device.type == "cpu":
        return gpu_target(settings, gpu_of_name(settings.triton.arch or INTERPRETED_ARCH))
    if device.type != "cuda":
        return host_target(settings)
    if settings.triton.arch:
        return gpu_target(settings, gpu_of_name(settings.triton.arch))
    return gpu_target(settings, gpu_of_device(device.index or 0))
