"""Plan -> Plan, with choices made by measurement: library calls, templates, tiles.

Candidates are verified and raced on this machine, in this process or in workers, and the decisions
are cached. A choice changes speed, and results only within rounding. Nothing here creates a kernel
or places memory: whether a matmul and its epilogue are one kernel is a choice among plans of
`schedule/`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfuse.autotune.faces import AlgorithmSelector as AlgorithmSelector
    from perfuse.autotune.faces import ChoiceCaller as ChoiceCaller
    from perfuse.autotune.faces import TritonTemplateCaller as TritonTemplateCaller
    from perfuse.autotune.pool import CUDA_VISIBLE_DEVICES as CUDA_VISIBLE_DEVICES
    from perfuse.autotune.pool import TuningProcessPool as TuningProcessPool
    from perfuse.candidates.request import BenchmarkRequest as BenchmarkRequest
    from perfuse.errors import NoValidChoicesError as NoValidChoicesError

# Loaded on first use: a worker imports this package, and starts without PyTorch.
LAZY = {
    "AlgorithmSelector": "perfuse.autotune.faces",
    "BenchmarkRequest": "perfuse.candidates.request",
    "CUDA_VISIBLE_DEVICES": "perfuse.autotune.pool",
    "ChoiceCaller": "perfuse.autotune.faces",
    "NoValidChoicesError": "perfuse.errors",
    "TritonTemplateCaller": "perfuse.autotune.faces",
    "TuningProcessPool": "perfuse.autotune.pool",
}


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module 'perfuse.autotune' has no attribute {name!r}")
    return getattr(importlib.import_module(LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *LAZY])
