"""Running the C++ compiler: sources in, one shared library out, built once per content."""

from __future__ import annotations

import errno
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from perfuse.build import LIBRARY
from perfuse.build.elf import check_library
from perfuse.cache import keys
from perfuse.cache.access import open_store
from perfuse.cache.keys import key_of
from perfuse.cache.manifest import Entry
from perfuse.codegen.cpp.unit import LONG_UNIT, WIDE_UNIT
from perfuse.config import Settings
from perfuse.context import Context
from perfuse.environment import child_environment
from perfuse.errors import CannotBuild, CompilerFailed, CompilerMissing, LibraryDamaged
from perfuse.logs import channel
from perfuse.system import read_file, system, write_file
from perfuse.target import Target

Unit = tuple[str, str]  # the name of a source without its ending, and its C++ text

EXPORT = re.compile(rb'^extern "C" [^;{(]*?(\w+)\([^;{]*\)[^;{]*\{', re.MULTILINE)
SYSTEM_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG),
    *(errno.EMFILE, errno.ENFILE, errno.EPERM),
)
# Messages of g++ and clang that mean the compiler failed, not the source.
CRASHES = (
    *("internal compiler error", "PLEASE submit a bug report", "PLEASE ATTACH"),
    *("Stack dump:", "signal terminated program", "(ended by signal"),
)
RETRY_LEVELS = ("-O1", "-O2", "-O0")
LOG = channel("compile")
HEADERS = Path(__file__).parent.parent / "codegen" / "cpp"  # what kernels may #include


def build_shared_library(units: Sequence[Unit], ctx: Context) -> Entry:
    """The entry with the library of these sources: from the store, or else compiled now."""
    command = ctx.target.compiler_command()
    store = open_store(ctx)
    key = library_key(units, ctx.target, ctx.settings)
    entry = store.get(key) if ctx.settings.cache.enabled else None
    if entry is not None and LIBRARY in entry.contents:
        ctx.counters.inc("build.cache_hit")
        return entry
    ctx.counters.inc("build.cache_miss")
    sources = {f"{name}.cpp": text.encode() for name, text in units}
    library = built_library(sources, lambda folder: CompilerRun(folder, command, ctx), ctx)
    about = {"compiler": ctx.target.compiler_version, "target": ctx.target.isa}
    return store.put(key, {**sources, LIBRARY: library}, about)


def built_library(
    sources: Mapping[str, bytes], run_in: Callable[[Path], CompilerRun], ctx: Context
) -> bytes:
    """The library, checked. If one folder fails because its disk is full, try the next."""
    store = open_store(ctx)
    failure: OSError | LibraryDamaged | CompilerFailed | None = None
    with closing(store.scratch_folders()) as folders:
        for folder in folders:
            try:
                return run_in(folder).build(sources)
            except (OSError, LibraryDamaged) as error:
                failure = error
            except CompilerFailed as error:
                if not is_trouble_of_system(error.output):
                    raise _with_source(error, store.keep_failed(sources)) from None
                failure = error
            ctx.counters.inc("build.moved_elsewhere")
    if isinstance(failure, LibraryDamaged | CompilerFailed):
        raise failure
    raise CannotBuild(f"no folder to compile in: {failure or 'none is writable'}")


def _with_source(error: CompilerFailed, kept: Path | None) -> CompilerFailed:
    """The error with the path of the source, kept for the user."""
    if kept is None:
        return CompilerFailed(error.command, f"{error.output}\n(the source could not be kept)")
    named = [word for word in error.command if word.endswith(".cpp")]
    return CompilerFailed(error.command, error.output, kept / named[0] if named else kept)


def is_trouble_of_system(output: str) -> bool:
    """Whether a compiler failed for lack of something that another folder may have."""
    return any(text in output for text in (*map(os.strerror, SYSTEM_ERRORS), "Bus error"))


def has_crashed(output: str) -> bool:
    """Whether a compiler crashed, which it may not do at another optimisation level."""
    return any(text in output for text in CRASHES) and not is_trouble_of_system(output)


def library_key(units: Sequence[Unit], target: Target, settings: Settings) -> str:
    """The key of the library that the compiler makes of these sources."""
    flags = target.cxx_flags(settings.cpu.opt_level)
    tools = (target.compiler, target.compiler_version, flags, target.arch)
    return key_of(keys.LIBRARY, tools, tuple(tuple(unit) for unit in units))


class CompilerRun:
    """The compiler at work in one folder."""

    def __init__(
        self,
        folder: Path,
        command: tuple[str, ...],
        ctx: Context,
        flags: tuple[str, ...] | None = None,
    ) -> None:
        self.folder = folder
        self.command = command
        self.ctx = ctx
        own = (*ctx.target.cxx_flags(ctx.settings.cpu.opt_level), f"-I{HEADERS}")
        self.flags = own if flags is None else flags
        # The compiler's own files go where ours do, and its messages can be recognised.
        self.environment = child_environment({"TMPDIR": str(folder), "LC_ALL": "C"})

    def build(self, sources: Mapping[str, bytes]) -> bytes:
        """A library of the sources: one run for one source, else one each and one to link."""
        for name, text in sources.items():
            write_file(self.folder / name, text)
        names = tuple(sources)
        if len(names) == 1:
            self._compile_at_levels("-shared", *self.flags, names[0], "-o", LIBRARY)
        else:
            # Threads suffice: each only waits for its compiler.
            with ThreadPoolExecutor(self.ctx.num_jobs(len(names))) as pool:
                list(pool.map(self._compile, names))
            self.run("-shared", *(_object(name) for name in names), "-o", LIBRARY)
        library = self._made(sources)
        self.ctx.counters.inc("build.kernels_compiled", len(names))
        return library

    def _made(self, sources: Mapping[str, bytes]) -> bytes:
        """The library that the compiler wrote, validated before it is used."""
        exports = EXPORT.findall(b"\n".join(sources.values()))
        try:
            library = read_file(self.folder / LIBRARY)
        except FileNotFoundError as error:
            raise LibraryDamaged("the compiler reported success but wrote no library") from error
        check_library(library, [name.decode() for name in exports])
        return library

    def run(self, *arguments: str) -> None:
        """Run the compiler once."""
        command = (*self.command, *arguments)
        timeout_s = self.ctx.settings.build.timeout_s or None
        self.ctx.counters.inc("build.compiler_runs")
        try:
            done = system().spawn(command, self.folder, self.environment, timeout_s)
        except subprocess.TimeoutExpired:
            message = f"timed out after {timeout_s} s (build.timeout_s)"
            raise CompilerFailed(command, message) from None
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EACCES, errno.ENOEXEC):
                raise CompilerMissing(f"cannot run {command[0]}: {error}") from error
            raise
        if done.code != 0:
            ended = "" if done.code > 0 else f"(ended by signal {-done.code})\n"
            raise CompilerFailed(command, ended + done.output)

    def _compile(self, source: str) -> None:
        is_lowered = source.startswith((LONG_UNIT, WIDE_UNIT))
        level = ("-O1",) if is_lowered and self.ctx.settings.cpu.opt_level > 1 else ()
        self._compile_at_levels(*self.flags, *level, "-c", source, "-o", _object(source))

    def _compile_at_levels(self, *arguments: str) -> None:
        """Run the compiler, and if it crashes, again at other optimisation levels."""
        tried = [word for word in arguments if word.startswith("-O")][-1:]
        levels = [(), *((level,) for level in RETRY_LEVELS if level not in tried)]
        for level, following in zip(levels, [*levels[1:], None], strict=True):
            try:
                self.run(*arguments, *level)
            except CompilerFailed as error:
                if following is None or not has_crashed(error.output):
                    raise
                self.ctx.counters.inc("build.compiler_crashed")
                message = "the compiler crashed and is run again with %s: %s\n%s"
                LOG.warning(message, *following, shlex.join(error.command), error.output.rstrip())
            else:
                return


def _object(source: str) -> str:
    return source.removesuffix(".cpp") + ".o"
