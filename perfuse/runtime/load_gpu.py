"""From a bundle to the launcher that serves it."""

from __future__ import annotations

from perfuse.build.bundle import INTERPRETED, Bundle
from perfuse.context import Context
from perfuse.runtime.bind_gpu import Launcher
from perfuse.runtime.driver import Driver, open_library
from perfuse.runtime.interpreted import Interpreter
from perfuse.runtime.python_launcher import PythonLibrary


def launcher_of(bundle: Bundle, context: Context, library: bytes | None) -> Launcher:
    """The launcher of these kernels on the context's device: the library, if one was built."""
    if bundle.kind == INTERPRETED:
        return Interpreter(bundle.text, bundle.kernels)
    if library is None:
        context.counters.inc("launcher.python")
        return Driver(bundle, context.device, PythonLibrary(bundle.kind))
    return Driver(bundle, context.device, open_library(library, bundle.kind))
