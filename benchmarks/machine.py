"""The versions and the machine of a measurement, kept with every result."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch


def describe() -> dict[str, str]:
    return {
        "host": platform.node(),
        "cpu": cpu_name(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "gpu": gpu_name(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "transformers": version("transformers"),
        "timm": version("timm"),
        "diffusers": version("diffusers"),
        "perfuse": version("perfuse"),
        "commit": output("git", "rev-parse", "--short", "HEAD"),
        "compiler": output(os.environ.get("CXX", "g++"), "--version").partition("\n")[0],
        "load": " ".join(f"{x:.2f}" for x in os.getloadavg()),
    }


def busy_seconds() -> tuple[float, float]:
    """Processor time that the whole machine has spent, and this process; zeros where unknown."""
    path = Path("/proc/stat")
    if not path.exists():
        return 0.0, 0.0
    user, nice, system, _, _, irq, softirq, *_ = map(int, path.read_text().split()[1:11])
    own = os.times()
    total = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    return total, own.user + own.system


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return "none"
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
