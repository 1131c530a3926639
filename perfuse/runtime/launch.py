"""From a bundle to the launcher that serves it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfuse.build import LIBRARY, build_shared_library, compiler
from perfuse.build.bundle import INTERPRETED, Bundle, read_bundle
from perfuse.build.store import Entry
from perfuse.codegen.host.program import HostSource
from perfuse.context import Context
from perfuse.runtime.driver import Driver, Library, open_library
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


def launcher_of(bundle: Bundle, context: Context) -> Launcher:
    """What launches these kernels on the context's device."""
    if bundle.kind == INTERPRETED:
        return Interpreter(bundle.text, bundle.kernels)
    return Driver(bundle, context.device, _library(bundle.kind, context))


def _library(kind: str, context: Context) -> Library:
    """The native launcher; one in Python where there is no compiler to build it with."""
    if not context.target.compiler:
        context.counters.inc("launcher.python")
        return PythonLibrary(kind)
    unit = ("launcher", LAUNCHER.read_text())
    return open_library(build_shared_library([unit], context).read_bytes(LIBRARY), kind)
