"""Everything there is to see on a GPU machine, in one command and a bounded time.

    python tools/gpu_check.py --results $OUT                        all sections, 560 s
    python tools/gpu_check.py smoke=90 behaviours=90 host kernels=300 --results $OUT
    python tools/gpu_check.py smoke --device cpu --backend aot_eager    where there is no GPU

Sections run one after the other, each in a process of its own that is ended when its time is over;
one that fails does not stop the next. All that is printed is kept in DIR/log.txt, the figures as
JSON beside it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
PYTEST = "-m pytest -q -p no:cacheprovider -m gpu --tb=line --show-capture=no -ra"
START_S = 15.0  # what a section's imports may take of its time
GRACE_S = 8.0  # between asking a section to end in time and ending it


@dataclass(frozen=True, slots=True)
class Section:
    """`command` has {jobs}, {limit}, {out}, {device} and {backend} filled in."""

    name: str
    seconds: float
    command: str


BENCH = "-m benchmarks.gpu --quick --device {device} --backend {backend} --time-limit {limit}"
OPDB = "-m tests.opdb.run --quiet --device {device} --jobs {jobs} --time-limit {limit}"
SECTIONS = (
    Section("smoke", 120, "-m tests.gpu.smoke --device {device} --backend {backend} --jobs {jobs} "
            "--time-limit {limit} --json {out}/smoke.json"),
    Section("behaviours", 120, f"{PYTEST} tests/gpu/test_behaviours.py"),
    Section("host", 60, f"{BENCH} --host --results {{out}}/host"),
    Section("kernels", 300, f"{BENCH} --kernels --results {{out}}/kernels"),
    Section("models", 300, f"{BENCH} --models --together --results {{out}}/models"),
    Section("zoo", 240, f"{PYTEST} tests/gpu/test_models.py --gpu-jobs {{jobs}} "
            "--gpu-time-limit {limit}"),
    Section("random", 200, "-m tests.random_programs.run --count 400 --no-shrink --quiet "
            "--device {device} --backend {backend} --jobs {jobs} --time-limit {limit} "
            "--json {out}/random.json"),
    Section("opdb", 420, f"{OPDB} --backend {{backend}} --json {{out}}/opdb.json"),
    Section("opdb-peer", 420, f"{OPDB} --backend inductor --json {{out}}/opdb-peer.json"),
    Section("pytest", 540, f"{PYTEST} tests/gpu --gpu-jobs {{jobs}} --gpu-time-limit {{limit}}"),
)  # fmt: skip
BY_NAME = {section.name: section for section in SECTIONS}
USUAL = ("smoke", "behaviours", "host", "kernels")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", default=list(USUAL), help=" ".join(BY_NAME))
    parser.add_argument("--results", type=Path, default=Path(os.environ.get("OUT", "gpu-results")))
    parser.add_argument("--time-limit", type=float, default=560.0, help="seconds in all")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="perfuse")
    parser.add_argument("--more", default="", help="added to every section's command")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    deadline = time.monotonic() + arguments.time_limit
    arguments.results.mkdir(parents=True, exist_ok=True)
    ends = {}
    with (arguments.results / "log.txt").open("a") as log:
        say(log, machine())
        for text in arguments.sections:
            name, _, seconds = text.partition("=")
            section = BY_NAME[name]
            limit = min(float(seconds or section.seconds), deadline - time.monotonic() - GRACE_S)
            ends[name] = run(section, limit, arguments, log) if limit > 5 else "no time left"
        say(log, "gpu_check: " + ", ".join(f"{name} {end}" for name, end in ends.items()))
    return int(any(not end.startswith("ok") for end in ends.values()))


def run(section: Section, limit_s: float, arguments: argparse.Namespace, log: IO[str]) -> str:
    """The section's command, its output shown and kept as it comes; how it ended."""
    filled = section.command.format(
        jobs=arguments.jobs,
        limit=round(max(limit_s - START_S, 5.0)),
        out=arguments.results.resolve(),
        device=arguments.device,
        backend=arguments.backend,
    )
    command = [sys.executable, *filled.split(), *arguments.more.split()]
    say(log, f"\n=== {section.name}, {limit_s:.0f} s")
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    watchdog = threading.Timer(limit_s + GRACE_S, end, (process,))
    watchdog.start()
    assert process.stdout is not None
    for line in process.stdout:
        if is_worth_showing(line):
            say(log, line.rstrip()[:400])
    code = process.wait()
    watchdog.cancel()
    return f"{'ok' if code == 0 else f'exit {code}'} after {time.monotonic() - began:.0f} s"


def environment(arguments: argparse.Namespace) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
        "TEST_DEVICE": arguments.device,
        "TEST_BACKEND": arguments.backend,
        "TORCHDYNAMO_VERBOSE": "0",
    }


def end(process: subprocess.Popen[str]) -> None:
    """The section and all it started, by its own process group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def is_worth_showing(line: str) -> bool:
    """Skips and warnings would push the failures out of what is kept of a long output."""
    return bool(line.strip()) and not line.startswith(("SKIPPED", "DEBUG", "  warnings.warn"))


def machine() -> str:
    queries: Sequence[list[str]] = (
        ["nvidia-smi", "--query-gpu=name,driver_version,memory.used", "--format=csv,noheader"],
        [
            sys.executable,
            "-c",
            "import torch, sys; print(torch.__version__, sys.version.split()[0])",
        ],
    )
    return " | ".join(filter(None, map(first_line, queries)))


def first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().partition("\n")[0]


def say(log: IO[str], text: str) -> None:
    print(text, flush=True)
    print(text, file=log, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
