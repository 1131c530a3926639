"""Running the C++ compiler: sources in, one shared library out, built once per content."""

from __future__ import annotations

import functools
import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from perfuse.build.folders import private_folder
from perfuse.build.store import FAILED, Store
from perfuse.config import Settings
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.errors import CompilerFailed, CompilerMissing
from perfuse.target import Target
from perfuse.version import VERSION

Unit = tuple[str, str]  # the name of a source without its ending, and its C++ text

LIBRARY = "library.so"
HEADERS = Path(__file__).parent.parent / "codegen" / "cpp"  # what kernels may #include


def build_shared_library(units: Sequence[Unit], ctx: Context) -> Path:
    """The shared library of these sources: from the store, or else compiled now."""
    command = ctx.target.compiler_command()
    store = open_store(ctx)
    key = library_key(units, ctx.target, ctx.settings)
    entry = store.get(key) if ctx.settings.cache.enabled else None
    if entry is not None:
        ctx.counters.inc("build.cache_hit")
        return entry.file(LIBRARY)
    ctx.counters.inc("build.cache_miss")
    with store.scratch() as folder:
        run = _Run(folder, command, ctx)
        sources = [_write(folder, unit) for unit in units]
        run.build(sources)
        files = [*sources, LIBRARY]
        about = {"compiler": ctx.target.compiler_version, "target": ctx.target.isa}
        return store.put(key, {name: folder / name for name in files}, about).file(LIBRARY)


def library_key(units: Sequence[Unit], target: Target, settings: Settings) -> str:
    """The hash of all that decides what the compiler will make."""
    flags = target.cxx_flags(settings.cpu.opt_level)
    tools = (VERSION, target.compiler, target.compiler_version, flags, target.arch)
    text = repr((tools, header_digest(HEADERS), tuple(tuple(unit) for unit in units)))
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def header_digest(folder: Path) -> str:
    """The hash of every header that a source could include."""
    digest = hashlib.sha256()
    for header in sorted(folder.glob("*.h")):
        data = header.read_bytes()
        digest.update(f"{header.name} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def open_store(ctx: Context) -> Store:
    """The store that the settings name, one per process."""
    cache = ctx.settings.cache
    if not cache.enabled:
        return _store(private_folder(), cache.max_bytes, ctx.counters)
    root = Path(cache.dir).expanduser() if cache.dir else Path.home() / ".cache" / "perfuse"
    return _store(root.absolute(), cache.max_bytes, ctx.counters)


@functools.cache
def _store(root: Path, max_bytes: int, counters: Counters) -> Store:
    return Store(root, max_bytes, counters)


def _write(folder: Path, unit: Unit) -> str:
    name, text = unit
    (folder / f"{name}.cpp").write_text(text)
    return f"{name}.cpp"


class _Run:
    """The compiler at work in one folder."""

    def __init__(self, folder: Path, command: tuple[str, ...], ctx: Context) -> None:
        self.folder = folder
        self.command = command
        self.ctx = ctx
        self.flags = (*ctx.target.cxx_flags(ctx.settings.cpu.opt_level), f"-I{HEADERS}")

    def build(self, sources: Sequence[str]) -> None:
        """Make LIBRARY of the sources: one run for one source, else one each and one to link."""
        if len(sources) == 1:
            self.run("-shared", *self.flags, sources[0], "-o", LIBRARY)
        else:
            # Threads suffice: each only waits for its compiler.
            with ThreadPoolExecutor(self.ctx.num_jobs(len(sources))) as pool:
                list(pool.map(self._compile, sources))
            self.run("-shared", *(_object(name) for name in sources), "-o", LIBRARY)
        self.ctx.counters.inc("build.kernels_compiled", len(sources))

    def run(self, *arguments: str) -> None:
        """Run the compiler once."""
        command = (*self.command, *arguments)
        timeout_s = self.ctx.settings.build.timeout_s or None
        self.ctx.counters.inc("build.compiler_runs")
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                timeout=timeout_s,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise self._failure(
                command, f"given up after {timeout_s} s (build.timeout_s)"
            ) from None
        except OSError as error:
            raise CompilerMissing(f"cannot run {command[0]}: {error}") from error
        if done.returncode != 0:
            raise self._failure(command, done.stdout)

    def _compile(self, source: str) -> None:
        self.run(*self.flags, "-c", source, "-o", _object(source))

    def _failure(self, command: tuple[str, ...], output: str) -> CompilerFailed:
        """The error, with the sources kept where the user can look at them."""
        kept = self.folder.parent.parent / FAILED / self.folder.name
        try:
            shutil.copytree(self.folder, kept, dirs_exist_ok=True)
        except OSError as error:
            return CompilerFailed(command, f"{output}\n(the source could not be kept: {error})")
        named = [kept / word for word in command if word.endswith(".cpp")]
        return CompilerFailed(command, output, named[0] if named else kept)


def _object(source: str) -> str:
    return source.removesuffix(".cpp") + ".o"
