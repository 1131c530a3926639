"""`perfuse doctor` on machines of every kind: nothing installed, half installed, everything."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import perfuse
from perfuse import config
from perfuse.autotune.lock import ELSEWHERE, Verdict
from perfuse.build.ck_installation import HEADERS
from perfuse.cache.lock_file import Pinned
from perfuse.cli import app
from perfuse.config import Settings, from_environment
from perfuse.decision import Choice
from perfuse.diagnosis import machine as machine_module
from perfuse.diagnosis.cpu import cpp_compiler
from perfuse.diagnosis.examine import PROBES, doctor
from perfuse.diagnosis.limits import found_within
from perfuse.diagnosis.machine import LIST_DEVICES, Device, Machine
from perfuse.diagnosis.report import Finding, Report
from perfuse.errors import CacheUnsafe, PerfuseError
from perfuse.gpu import Platform
from perfuse.system import Exited
from perfuse.target import Target

GPP = "g++ (Debian 12.2.0-14) 12.2.0"
H200 = Device("NVIDIA H200", "sm_90", 139 << 30)
MI300 = Device("AMD Instinct MI300X", "gfx942", 192 << 30)


@dataclass
class Simulated(Machine):
    """A machine made of tables: by default a CPU with g++, and nothing else."""

    compiler: str = "/usr/bin/g++"
    compiler_version: str = GPP
    torch: str = "2.13.0"
    isa: str = "avx2"
    variables: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    builds: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    programs: Mapping[str, Exited | Exception] = field(default_factory=dict)
    gpus: Sequence[Device] | Exception = ()
    hip_compiler: str = ""
    free: int = 1 << 40
    cache_trouble: Exception | None = None
    server_trouble: Exception | None = None
    verdicts: Sequence[Verdict] = ()
    runtimes: tuple[str, ...] = ("/torch/lib/libgomp.so.1",)

    @property
    def environment(self) -> Mapping[str, str]:
        return self.variables

    def settings(self) -> Settings:
        return from_environment(self.variables).with_overrides(self.changes)

    def torch_version(self) -> str:
        return self.torch

    def libraries(self) -> Mapping[str, str]:
        return {"mkl": "2024.2"}

    def gpu_build(self, kind: Platform) -> str:
        return self.builds.get(kind, "")

    def target(self, settings: Settings) -> Target:
        sizes = (1 << 15, 1 << 20, 1 << 24)
        wanted = settings.cpu.compiler
        named = (self.compiler, self.compiler_version)
        return Target(
            Platform.CPU, "x86_64", self.isa, 8, 2, *sizes, *named, compiler_wanted=wanted
        )

    def isas(self) -> tuple[str, ...]:
        return ("avx2", "scalar")

    def num_cores(self) -> int:
        return 2

    def openmp_runtimes(self) -> tuple[str, ...]:
        return self.runtimes

    def package(self, *names: str) -> str:
        return next((self.packages[name] for name in names if name in self.packages), "")

    def package_folder(self, module: str) -> Path | None:
        return Path("/site") / module if module in self.packages else None

    def read(self, path: str) -> str:
        return self.files.get(path, "")

    def exists(self, path: str) -> bool:
        return path in self.files or path in self.programs

    def run(self, words: Sequence[str], timeout_s: float) -> Exited:
        said = self.programs[words[0]]
        if isinstance(said, Exception):
            raise said
        return said

    def devices(self) -> tuple[Device, ...]:
        if isinstance(self.gpus, Exception):
            raise self.gpus
        return tuple(self.gpus)

    def run_kernel(self, device: str) -> None:
        assert not isinstance(self.gpus, Exception) and self.gpus and device == "cuda"

    def run_cpu_kernel(self) -> None:
        assert self.compiler

    def ck_compiler(self, settings: Settings) -> str:
        return self.hip_compiler

    def cache_folder(self, settings: Settings) -> Path | None:
        return Path("/home/me/.cache/perfuse")

    def check_cache(self, folder: Path) -> None:
        if self.cache_trouble is not None:
            raise self.cache_trouble

    def free_bytes(self, folder: Path) -> int:
        return self.free

    def ping(self, url: str) -> None:
        if self.server_trouble is not None:
            raise self.server_trouble

    def lock_verdicts(self, path: str) -> Sequence[Verdict]:
        return self.verdicts


PTXAS = "/site/triton/backends/nvidia/bin/ptxas"
CUDA_MACHINE = Simulated(
    builds={"cuda": "12.8"},
    packages={"triton": "3.6.0"},
    files={"/dev/nvidiactl": "", "/proc/driver/nvidia/version": "NVRM version: 570.86.15  Tue"},
    programs={PTXAS: Exited(0, "Cuda compilation tools, release 12.8, V12.8.61")},
    gpus=[H200],
)


def complete_ck(folder: Path) -> str:
    """A folder with every header of CK, all empty."""
    for name in HEADERS:
        (folder / "include" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "include" / name).touch()
    return str(folder)


def rocm_machine(ck_folder: str) -> Simulated:
    hipcc = "/opt/rocm/bin/hipcc"
    return Simulated(
        builds={"hip": "6.4"},
        packages={"pytorch-triton-rocm": "3.6.0", "triton": "3.6.0"},
        files={"/dev/kfd": "", "/opt/rocm/.info/version": "6.4.1-83\n"},
        programs={
            hipcc: Exited(0, "HIP version: 6.4.43483-a187df25c\nAMD clang version 19.0.0\n"),
            PTXAS: CUDA_MACHINE.programs[PTXAS],
        },
        gpus=[MI300],
        hip_compiler=hipcc,
        changes={"rocm.ck_dir": ck_folder},
    )


def abilities(report: Report) -> dict[tuple[str, str], str]:
    return {(row.backend, row.device): row.ability for row in report.backends}


def test_a_machine_with_nothing() -> None:
    report = doctor(Simulated(compiler="", compiler_version=""))
    assert not report.is_usable
    compiler = report.check("C++ compiler")
    assert compiler.state == "problem" and "looked for $CXX, g++ and clang++" in compiler.found
    assert "apt-get install g++" in compiler.advice
    assert report.check("a small kernel", "CPU").found == "not tried: see C++ compiler"
    assert report.check("Triton").state == "absent"
    assert "pip install 'perfuse[gpu]'" in report.check("Triton").advice
    assert {k for k, v in abilities(report).items() if v != "no"} == {("ATen", "CPU")}
    assert "apt-get install g++" in report.backend("C++ templates", "CPU").advice
    assert "cannot compile for this CPU" in str(report)


def test_a_cpu_is_all_it_takes() -> None:
    report = doctor(Simulated())
    assert report.is_usable and not report.problems
    runs = {key for key, ability in abilities(report).items() if ability == "runs"}
    assert runs == {(name, "CPU") for name in ("ATen", "vendor libraries", "C++ templates")}
    assert "Perfuse works on this machine." in str(report)
    assert "worked around" in report.check("C++ compiler").found


def test_a_broken_ck_folder(tmp_path: Path) -> None:
    folder = complete_ck(tmp_path)
    missing = next(name for name in HEADERS if "batched" in name)
    (tmp_path / "include" / missing).unlink()
    report = doctor(rocm_machine(folder))
    found = report.check("CK")
    assert found.state == "problem" and missing in found.found and folder in found.found
    assert "rocm.ck_dir" in found.advice
    ck = report.backend("CK", "ROCm")
    assert ck.ability == "no" and missing in ck.found and ck.advice == found.advice
    assert report.is_usable and report.problems == (found,)
    assert report.backend("Triton", "ROCm").ability == "runs"


def test_a_ck_folder_that_is_not_there(tmp_path: Path) -> None:
    named = doctor(rocm_machine(str(tmp_path / "nowhere")))
    assert named.check("CK").state == "problem" and "nowhere" in named.check("CK").found
    assert doctor(Simulated(changes={"rocm.home": str(tmp_path)})).check("CK").state == "absent"


def test_a_gpu_that_ck_is_not_for(tmp_path: Path) -> None:
    radeon = Device("AMD Radeon RX 7900", "gfx1100", 24 << 30)
    machine = rocm_machine(complete_ck(tmp_path))
    report = doctor(replace(machine, gpus=[radeon]))
    assert not report.problems and "CK does not support gfx1100" in report.check("CK").found
    assert report.backend("CK", "ROCm").ability == "no"
    assert report.backend("Triton", "ROCm").ability == "runs"
    assert doctor(replace(machine, gpus=[radeon, MI300])).check("CK").state == "ok"
    named = doctor(replace(machine, changes={**machine.changes, "rocm.arch": "gfx94"})).check("CK")
    assert named.state == "problem" and "gfx94, only gfx908" in named.found
    assert "rocm.arch" in named.advice


def test_a_clang_without_rocm_is_not_enough() -> None:
    report = doctor(Simulated(hip_compiler="/usr/bin/clang++", changes={"rocm.ck_dir": "/ck"}))
    found = report.check("hipcc")
    assert found.state == "absent" and "without ROCm" in found.found and "hipcc" in found.advice
    assert report.backend("CK", "ROCm").ability == "no"


def test_everything_on_cuda() -> None:
    report = doctor(CUDA_MACHINE)
    assert report.is_usable and not report.problems
    assert "H200 (sm_90, 139 GiB)" in report.check("devices", "CUDA").found
    assert report.check("driver", "CUDA").found == "570.86.15"
    assert report.check("ptxas").found == f"{PTXAS} (12.8)"
    found = abilities(report)
    assert found["Triton", "CUDA"] == found["ATen", "CUDA"] == "runs"
    assert found["Triton", "ROCm"] == "builds" and found["CK", "ROCm"] == "no"


def test_everything_on_rocm(tmp_path: Path) -> None:
    report = doctor(rocm_machine(complete_ck(tmp_path)))
    assert report.is_usable and not report.problems
    assert "gfx942" in report.check("devices", "ROCm").found
    assert report.check("ROCm").found == "6.4.1-83 in /opt/rocm"
    assert "6.4.43483-a187df25c" in report.check("hipcc").found
    assert "instances" in report.check("CK").found
    found = abilities(report)
    assert {found[name, "ROCm"] for name in ("ATen", "Triton", "CK")} == {"runs"}
    assert found["Triton", "CUDA"] == "builds"


TIMEOUT = subprocess.TimeoutExpired("ptxas", 10)
GPU_TROUBLES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "a GPU, but PyTorch without CUDA": ({"builds": {}}, "PyTorch", "though", "pip install"),
    "a GPU, but no Triton": ({"packages": {}}, "Triton", "not installed", "pip install"),
    "an old driver": (
        {"gpus": PerfuseError("RuntimeError: The NVIDIA driver on your system is too old")},
        *("devices", "driver on your system is too old", ""),
    ),
    "an assembler that hangs": ({"programs": {PTXAS: TIMEOUT}}, "ptxas", "within 10 s", "Triton"),
    "an assembler that fails": (
        {"programs": {PTXAS: Exited(127, "libc.so.6: GLIBC_2.38 not found")}},
        *("ptxas", "GLIBC_2.38", "reinstall Triton"),
    ),
    "no assembler": ({"programs": {}}, "ptxas", "does not exist", "--force-reinstall"),
    "another assembler": (
        {"variables": {"TRITON_PTXAS_PATH": "/no/ptxas"}},
        *("ptxas", "/no/ptxas does not exist", "unset TRITON_PTXAS_PATH"),
    ),
}


@pytest.mark.parametrize("trouble", GPU_TROUBLES)
def test_a_gpu_that_cannot_be_used(trouble: str) -> None:
    changes, name, told, advice = GPU_TROUBLES[trouble]
    report = doctor(replace(CUDA_MACHINE, **changes))
    section = "CUDA" if name == "PyTorch" else None
    found = report.check(name, section)
    assert found.state == "problem" and told in found.found and advice in found.advice
    assert report.backend("Triton", "CUDA").ability != "runs"
    assert report.is_usable, "the CPU works all the same"


def pinned(problem: str = "") -> Verdict:
    return Verdict(Pinned("matmul", "mm", "cpu", (), (), Choice("library", "mm")), problem)


LOCK = {"files": {"perfuse.lock": ""}, "changes": {"lock_file": "perfuse.lock"}}
SURROUNDINGS: dict[str, tuple[dict[str, Any], str, str, str, str]] = {
    "a misspelled variable": (
        {"variables": {"PERFUSE_CPU_SMD": "avx2"}},
        *("variables", "note", "PERFUSE_CPU_SMD", "rename PERFUSE_CPU_SMD to PERFUSE_CPU_SIMD"),
    ),
    "an invalid value": (
        {"variables": {"PERFUSE_CPU_THREADS": "many"}},
        *("settings", "problem", "PERFUSE_CPU_THREADS", "int"),
    ),
    "a read-only cache": (
        {"cache_trouble": PermissionError(13, "Permission denied")},
        *("cache", "problem", "Permission denied", "PERFUSE_CACHE_DIR"),
    ),
    "a cache of another user": (
        {"cache_trouble": CacheUnsafe("it belongs to user 7")},
        *("cache", "problem", "user 7", "PERFUSE_CACHE_DIR"),
    ),
    "a full disk": ({"free": 1 << 20}, "cache", "note", "0.0 GiB", "free some space"),
    "a server that is down": (
        {
            "changes": {"redis_url": "redis://me:secret@there:6379", "autotune_remote_cache": True},
            "server_trouble": ConnectionRefusedError(111, "Connection refused"),
        },
        *("remote cache", "problem", "there:6379", "start the server"),
    ),
    "a server that is not used": (
        {"changes": {"redis_url": "redis://there"}},
        *("remote cache", "note", "answers", "autotune_remote_cache"),
    ),
    "an address that is none": (
        {"changes": {"redis_url": "there:6379"}},
        *("remote cache", "problem", "not valid", "redis://"),
    ),
    "a lock file that is missing": (
        {"changes": {"lock_file": "perfuse.lock"}},
        *("lock file", "problem", "does not exist", "perfuse lock write"),
    ),
    "a lock file that nobody reads": (
        {"files": {"perfuse.lock": ""}, "verdicts": [pinned()]},
        *("lock file", "note", "1 of 1 choices fit", "PERFUSE_LOCK_FILE=perfuse.lock"),
    ),
    "a lock file of other versions": (
        {**LOCK, "verdicts": [pinned("for torch 2.11.0, not 2.13.0")]},
        *("lock file", "note", "for torch 2.11.0", "perfuse lock write"),
    ),
    "a lock file of two machines": (
        {**LOCK, "verdicts": [pinned(), pinned(ELSEWHERE)]},
        *("lock file", "ok", "1 of 2 choices fit", ""),
    ),
    "two OpenMP runtimes": (
        {"runtimes": ("/a/libgomp.so.1", "/b/libiomp5.so")},
        *("OpenMP", "problem", "libiomp5", "LD_PRELOAD"),
    ),
    "an untested PyTorch": ({"torch": "2.9.1"}, "PyTorch", "note", "2.9.1", "pip install"),
    "narrow vectors": ({"isa": "scalar"}, "vectors", "note", "this CPU has avx2", "cpu.simd"),
}


@pytest.mark.filterwarnings("ignore::perfuse.ConfigWarning")
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_surroundings(surroundings: str) -> None:
    changes, name, state, told, advice = SURROUNDINGS[surroundings]
    report = doctor(replace(Simulated(), **changes))
    found = report.check(name)
    assert (found.state, told in found.found, advice in found.advice) == (state, True, True), found
    assert report.is_usable == (surroundings != "an invalid value")
    assert "secret" not in str(report)


@pytest.mark.parametrize(
    ("version", "state", "told"),
    [
        (GPP, "ok", "known bugs"),
        ("g++ (GCC) 13.2.1 20240316 (Red Hat 13.2.1-7)", "ok", "13.2.1"),
        ("Debian clang version 14.0.6", "ok", "14.0.6"),
        ("g++ (GCC) 9.4.0", "problem", "C++20"),
        ("clang version 7.0.1", "problem", "C++20"),
        ("odd++", "ok", "odd++"),
    ],
)
def test_compilers_by_what_they_say(version: str, state: str, told: str) -> None:
    found = cpp_compiler(Simulated(compiler_version=version))
    assert found.state == state and told in found.found
    assert ("known bugs" in found.found) == (version == GPP)


class Broken(Machine):
    """A machine of which nothing can be known."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is broken")


def test_doctor_never_raises() -> None:
    report = doctor(Broken())
    assert not report.is_usable and len(report.checks) == len(PROBES)
    assert "RuntimeError: settings is broken" in report.check("settings").found
    assert {row.ability for row in report.backends} == {"no"}


def test_a_probe_that_hangs_is_cut_short() -> None:
    never, start = threading.Event(), time.monotonic()

    def look() -> Finding:
        never.wait(60)
        return Finding("ok", "")

    found = found_within(0.05, look)
    assert time.monotonic() - start < 30
    assert found.state == "problem" and found.found == "no answer within 0.05 s"
    never.set()
    assert all(probe.limit_s < 600 for probe in PROBES)


def test_devices_are_listed_by_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    told = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=139 << 30)
    cuda = SimpleNamespace(device_count=lambda: 1, get_device_properties=lambda k: told)
    fake = SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=None))
    said = io.StringIO()
    with monkeypatch.context() as patch, redirect_stdout(said):
        patch.setitem(sys.modules, "torch", fake)
        exec(LIST_DEVICES, {})
    for output in (said.getvalue(), "Traceback ...\nRuntimeError: no driver\n"):
        monkeypatch.setattr(Machine, "exists", lambda self, path: True)
        monkeypatch.setattr(Machine, "run", lambda self, words, s, out=output: Exited(0, out))
        if "DEVICES" in output:
            assert Machine().devices() == (H200,)
        else:
            with pytest.raises(PerfuseError, match="no driver"):
                Machine().devices()


def test_a_kernel_that_is_wrong_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "run", lambda self, words, s: Exited(0, "KERNEL 7.0\n"))
    with pytest.raises(PerfuseError, match="computed 7, not 24"):
        Machine().run_kernel("cuda")
    machine_module.check_right(24.0)


def run(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["doctor", *words])
    assert done.exit_code == code, done.output
    return done.output


def test_this_machine_by_command_and_from_python() -> None:
    with perfuse.testing.fresh_cache():
        document = json.loads(run("--json"))
        report = perfuse.doctor()
    rows = {(row["section"], row["name"]): row for row in document["checks"]}
    assert document["is_usable"] and rows["CPU", "a small kernel"]["state"] == "ok"
    assert report.to_json() == {**document, "checks": report.to_json()["checks"]}
    assert report.is_usable and report.check("C++ compiler").found in str(report)


def test_the_command_fails_where_no_code_can_run() -> None:
    with config.patch({"cpu.compiler": "/no/such/g++"}):
        told = run(code=1)
    assert "/no/such/g++" in told and "apt-get install g++" in " ".join(told.split())
