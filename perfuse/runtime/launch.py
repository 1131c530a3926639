"""From a bundle to the launcher that serves it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfuse.build import LIBRARY, build_shared_library, compiler
from perfuse.build.bundle import INTERPRETED, Bundle, read_bundle
from perfuse.build.manifest import Entry
from perfuse.codegen.host.program import HostSource
from perfuse.context import Context
from perfuse.runtime.driver import Driver, open_library
from perfuse.runtime.gpu import Call, Launcher, bind_gpu
from perfuse.runtime.interpreted import Interpreter
from perfuse.runtime.python_launcher import PythonLibrary

LAUNCHER = Path(compiler.__file__).parent / "launcher.cpp"


def load_gpu(
    host: HostSource, entry: Entry, constants: Mapping[str, Any], context: Context
) -> Call:
    """The callable of a host program whose bundle is in the store."""
    bundle = read_bundle(entry.read_bytes)
    return bind_gpu(host, launcher_of(bundle, context), constants)


def launcher_of(bundle: Bundle, context: Context, built: bytes | None = None) -> Launcher:
    """What launches these kernels on the context's device; `built` is a launcher that is there."""
    if bundle.kind == INTERPRETED:
        return Interpreter(bundle.text, bundle.kernels)
    built = built or native_launcher(context)
    if built is None:
        context.counters.inc("launcher.python")
        return Driver(bundle, context.device, PythonLibrary(bundle.kind))
    return Driver(bundle, context.device, open_library(built, bundle.kind))


def native_launcher(context: Context) -> bytes | None:
    """The launcher in C++; None where there is no compiler to build it with."""
    if not context.target.compiler:
        return None
    unit = ("launcher", LAUNCHER.read_text())
    return build_shared_library([unit], context).read_bytes(LIBRARY)
