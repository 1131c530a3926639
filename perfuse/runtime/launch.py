"""From a bundle to the launcher that serves it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from perfuse.build.bundle import INTERPRETED, Bundle, read_bundle
from perfuse.build.store import Entry
from perfuse.codegen.host.program import HostSource
from perfuse.context import Context
from perfuse.errors import PerfuseError
from perfuse.runtime.gpu import Call, Launcher, bind_gpu
from perfuse.runtime.interpreted import Interpreter


def load_gpu(
    host: HostSource, entry: Entry, constants: Mapping[str, Any], context: Context
) -> Call:
    """The callable of a host program whose bundle is in the store."""
    bundle = read_bundle(lambda name: entry.file(name).read_bytes())
    return bind_gpu(host, launcher_of(bundle, context), constants)


def launcher_of(bundle: Bundle, context: Context) -> Launcher:
    """What launches these kernels on the context's device."""
    if bundle.kind == INTERPRETED:
        name = f"kernels_{hashlib.sha256(bundle.text.encode()).hexdigest()[:12]}"
        return Interpreter(bundle.text, bundle.kernels, name)
    raise PerfuseError(f"no launcher for {bundle.kind} yet")
