"""Perfuse: an independent tensor compiler for PyTorch.

`torch.compile(model, backend="perfuse")` or `perfuse.compile(model)`. Importing this package is
cheap: what needs PyTorch's compiler front end is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from perfuse import config as config
from perfuse import logs
from perfuse.capture.register import register
from perfuse.counters import counters as counters
from perfuse.environment import log_request
from perfuse.errors import ArtefactError as ArtefactError
from perfuse.errors import BudgetWarning as BudgetWarning
from perfuse.errors import CacheDamaged as CacheDamaged
from perfuse.errors import CkWarning as CkWarning
from perfuse.errors import CompileFailed as CompileFailed
from perfuse.errors import CompilerFailed as CompilerFailed
from perfuse.errors import CompilerMissing as CompilerMissing
from perfuse.errors import ConfigError as ConfigError
from perfuse.errors import ConfigWarning as ConfigWarning
from perfuse.errors import Fp8StateWarning as Fp8StateWarning
from perfuse.errors import Fp8Unavailable as Fp8Unavailable
from perfuse.errors import LockFileError as LockFileError
from perfuse.errors import LockFileWarning as LockFileWarning
from perfuse.errors import MemoryFault as MemoryFault
from perfuse.errors import OverBudget as OverBudget
from perfuse.errors import PerfuseError as PerfuseError
from perfuse.errors import RefusedOp as RefusedOp
from perfuse.errors import RemoteCacheWarning as RemoteCacheWarning
from perfuse.errors import SpecError as SpecError
from perfuse.errors import UnknownOption as UnknownOption
from perfuse.errors import UnsupportedCast as UnsupportedCast
from perfuse.errors import UnsupportedOp as UnsupportedOp
from perfuse.errors import UnsupportedPython as UnsupportedPython
from perfuse.errors import VersionWarning as VersionWarning
from perfuse.supported import warn_unsupported_torch
from perfuse.version import VERSION

if TYPE_CHECKING:
    from perfuse import precision as precision
    from perfuse import testing as testing
    from perfuse.api import aot_compile as aot_compile
    from perfuse.api import aot_load as aot_load
    from perfuse.api import check_lock as check_lock
    from perfuse.api import codegen_for as codegen_for
    from perfuse.api import compile as compile
    from perfuse.api import explain as explain
    from perfuse.api import load as load
    from perfuse.api import memory_efficient_fusion as memory_efficient_fusion
    from perfuse.api import release_memory as release_memory
    from perfuse.api import write_lock as write_lock
    from perfuse.diagnosis.examine import doctor as doctor
    from perfuse.graph.cse import fx_graph_cse as fx_graph_cse
    from perfuse.precision.autocast import autocast as autocast

LAZY = {
    "aot_compile": ("perfuse.capture.aot", "aot_compile"),
    "aot_load": ("perfuse.runtime.artefact", "load"),
    "autocast": ("perfuse.precision.autocast", "autocast"),
    "check_lock": ("perfuse.autotune.lock", "check_lock"),
    "codegen_for": ("perfuse.capture.cross_compile", "codegen_for"),
    "compile": ("perfuse.api", "compile"),
    "doctor": ("perfuse.diagnosis.examine", "doctor"),
    "explain": ("perfuse.report.explain", "explain"),
    "fx_graph_cse": ("perfuse.graph.cse", "fx_graph_cse"),
    "load": ("perfuse.runtime.artefact", "load"),
    "memory_efficient_fusion": ("perfuse.api", "memory_efficient_fusion"),
    "release_memory": ("perfuse.runtime.pool", "release_memory"),
    "write_lock": ("perfuse.autotune.lock", "write_lock"),
}
MODULES = ("precision", "testing")

__version__ = VERSION

logs.set_up(log_request())
warn_unsupported_torch()
register()


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return importlib.import_module(f"perfuse.{name}")
    if name in LAZY:
        module, attribute = LAZY[name]
        return getattr(importlib.import_module(module), attribute)
    raise AttributeError(f"module 'perfuse' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *LAZY, *MODULES])
