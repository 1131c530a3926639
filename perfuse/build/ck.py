"""`build_ck`: sources of Composable Kernel -> libraries, by hipcc or clang, with limits.

One compile takes about a minute and a gigabyte, so results are cached, failures too. Where programs
are interpreted on the CPU, the host's compiler takes its place: then CK's folder must contain
headers that compile there.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from perfuse.build import UNIT_LIBRARY
from perfuse.build.ck_installation import (
    CONFIG,
    CkInstallation,
    CkState,
    find_ck_compiler,
    inspect_ck,
    rocm_home,
)
from perfuse.build.compiler import CompilerRun, built_library
from perfuse.cache import keys
from perfuse.cache.access import open_store
from perfuse.cache.keys import key_of
from perfuse.cache.manifest import Entry
from perfuse.codegen.ck.problem import ck_arch
from perfuse.codegen.triton.sources import HostUnit
from perfuse.context import Context
from perfuse.errors import CkUnavailable, CompilerFailed
from perfuse.system import system, write_file
from perfuse.target import compiler_version

FAILURE, SOURCE_FILE = "failure.txt", "ck.cpp"
# What CK's own build would write for the types that its instances have.
CONFIG_TEXT = """// Written by Perfuse, since this copy of Composable Kernel has no config.h.
#pragma once

#define CK_ENABLE_INT8
#define CK_ENABLE_FP8
#define CK_ENABLE_BF8
#define CK_ENABLE_FP16
#define CK_ENABLE_BF16
#define CK_ENABLE_FP32
#define CK_ENABLE_FP64
#define CK_USE_XDL
#define CK_USE_GFX94
"""
# A shell sets the limits of processor time and memory, which the compiler's own processes inherit:
# hipcc starts several, and they would outlive it. A limit of 0 is none.
_LIMITS = '[ "$0" = 0 ] || ulimit -t "$0"; [ "$1" = 0 ] || ulimit -v "$1"; shift; exec "$@"'
# Failures that another run may not have, or another installation of ROCm.
_PASSING = ("internal compiler error", "out of memory", "annot allocate", "No such", "not found")
COMPILER_ADVICE = "install hipcc (apt-get install hipcc), or set rocm.compiler."
_DIAGNOSIS = re.compile(r":\d+: (fatal )?error: ")


def ck_compiler(context: Context) -> str:
    """The command that compiles CK for a context; empty where there is none."""
    if context.is_interpreted:
        return context.target.compiler
    return find_ck_compiler(context.settings)


def why_no_ck(context: Context) -> str:
    """Why CK cannot be compiled here; empty where it can."""
    found = inspect_ck(context.settings)
    if found.state is not CkState.COMPLETE:
        return str(found)
    if ck_compiler(context):
        return ""
    wanted = (
        context.settings.rocm.compiler or f"hipcc and clang++, in {rocm_home(context.settings)}"
    )
    return f"no compiler for Composable Kernel (looked for {wanted})"


def advice_for_ck(context: Context) -> str:
    """How to have a CK that can be compiled, where there is none."""
    return inspect_ck(context.settings).advice or COMPILER_ADVICE


def build_ck(unit: HostUnit, context: Context) -> Entry:
    """The entry of a unit's library: from the store, or else compiled."""
    reason = why_no_ck(context)
    if reason:
        raise CkUnavailable(reason, hint=advice_for_ck(context))
    installation, store = inspect_ck(context.settings), open_store(context)
    command, flags = _command(context), _flags(installation, context)
    key = key_of(keys.CK, _version(command[0]), flags, installation.digest, unit.text)
    entry = store.get(key) if context.settings.cache.enabled else None
    if entry is not None and FAILURE in entry.contents:
        raise CompilerFailed(command, entry.read_text(FAILURE))
    if entry is not None and UNIT_LIBRARY in entry.contents:
        context.counters.inc("build.cache_hit")
        return entry
    context.counters.inc("build.cache_miss")
    sources = {SOURCE_FILE: unit.text.encode()}
    about = {"compiler": _version(command[0]), "target": ck_arch(context)}
    try:
        library = built_library(sources, functools.partial(_run, context=context), context)
    except CompilerFailed as error:
        if _is_lasting(error.output):
            store.put(key, {**sources, FAILURE: error.output.encode()}, about)
        raise
    return store.put(key, {**sources, UNIT_LIBRARY: library}, about)


def _is_lasting(output: str) -> bool:
    """Whether the compiler rejected the source; not where it lacked time, memory or a file."""
    is_rejected = _DIAGNOSIS.search(output) is not None
    return is_rejected and not any(text in output for text in _PASSING)


@functools.cache
def _version(compiler: str) -> str:
    return compiler_version(compiler)


def _command(context: Context) -> tuple[str, ...]:
    if context.is_interpreted:
        return context.target.compiler_command()
    return (ck_compiler(context),)


def _flags(installation: CkInstallation, context: Context) -> tuple[str, ...]:
    """The flags of a compile; paths are those of the installation, not of this run."""
    includes = tuple(f"-I{folder}" for folder in installation.include_folders)
    if context.is_interpreted:
        level = min(context.settings.cpu.opt_level, 2)
        own = ("-fexceptions", "-frtti", "-ftree-vectorize")
        return (*context.target.cxx_flags(level), *own, *includes)
    kind = () if Path(ck_compiler(context)).name == "hipcc" else ("-x", "hip")
    # Without a folder of ROCm, as in distributions that have it in /usr, the compiler looks for it.
    home = rocm_home(context.settings)
    where = (f"--rocm-path={home}",) if home.is_dir() else ()
    arch = f"--offload-arch={ck_arch(context)}"
    return (*kind, "-std=c++20", "-O3", "-fPIC", "-w", arch, *where, *includes)


def _run(folder: Path, context: Context) -> CompilerRun:
    """The compiler in a folder, with our own config.h if CK has none, and a memory limit."""
    installation = inspect_ck(context.settings)
    flags = _flags(installation, context)
    if not installation.has_config:
        own = folder / "include"
        for made in (own, (own / CONFIG).parent):
            system().mkdir(made)
        write_file(own / CONFIG, CONFIG_TEXT.encode())
        flags = (*flags, f"-I{own}")
    most = (context.settings.build.timeout_s, context.settings.rocm.compile_bytes // 1024)
    limited = ("/bin/sh", "-c", _LIMITS, *map(str, most))
    return CompilerRun(folder, (*limited, *_command(context)), context, flags)
