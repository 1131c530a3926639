"""Composable Kernel on a CPU: headers of our own, under the names and in the order of CK's.

The generated sources are compiled against them unchanged, and run on CPU tensors.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

from perfuse import config
from perfuse.build.ck import CK_LIBRARY, build_ck
from perfuse.codegen.ck.instance import Instance, expanded, instance_of, shipped_instances
from perfuse.codegen.ck.problem import CkOperand, CkProblem
from perfuse.codegen.ck.source import CkEpilogue, ck_source
from perfuse.codegen.host.tables import HostCallRow
from perfuse.codegen.triton.sources import HostUnit
from perfuse.context import CPU, Context
from perfuse.counters import Counters
from perfuse.runtime.host_library import HostLibrary
from perfuse.target import device_target

FOLDER = Path(__file__).parent / "stand_in"
LEFT_OUT = Path(__file__).with_name("left_out.json")
ON_CPU = {"gpu.interpret": True, "triton.arch": "gfx942", "rocm.ck_dir": str(FOLDER)}
PLAIN = CkEpilogue()
TUNED = {**ON_CPU, "max_autotune": True, "compile_threads": 2}


def context_with(**settings: Any) -> Context:
    """A context in which CPU tensors stand for those of an AMD GPU."""
    chosen = config.snapshot().with_overrides({**ON_CPU, **settings})
    return Context(device_target(chosen, CPU), chosen, Counters(), CPU)


@functools.cache
def every_instance() -> tuple[Instance, ...]:
    """The instances as the facts count them: with duplicates, and with commented-out lines."""
    document = json.loads(LEFT_OUT.read_text())
    lines = [*document["commented_out"], *document["duplicates"]]
    return (*shipped_instances(), *(e for line in lines for e in expanded(instance_of(line))))


def problem(
    m: int, n: int, k: int, layouts: str = "RCR", dtype: str = "F16", **rest: Any
) -> CkProblem:
    """A matmul of contiguous operands; layouts are three letters."""
    sizes = ((m, k), (k, n), (m, n))
    made = [
        CkOperand("Row" if letter == "R" else "Col", dtype, size[letter == "R"])
        for letter, size in zip(layouts, sizes, strict=True)
    ]
    return CkProblem(m, n, k, *made, **rest)


def library_of(
    instance: Instance, epilogue: CkEpilogue = PLAIN, *, is_batched: bool = False
) -> HostLibrary:
    """The instance compiled against the stand-in."""
    unit = HostUnit("ck0", ck_source(instance, epilogue, is_batched=is_batched))
    (entry,) = build_ck([unit], context_with())
    return HostLibrary("ck0", entry.read_bytes(CK_LIBRARY))


class _Frame:
    """Addresses of tensors, as a frame of the runtime has them."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self.pointers = [tensor.data_ptr() for tensor in tensors]


def run(
    library: HostLibrary,
    tensors: tuple[torch.Tensor, ...],
    sizes: tuple[int, ...],
    factors: tuple[float, float] = (1.0, 1.0),
) -> None:
    """One host call on tensors: A, B, what the epilogue reads, and C."""
    places = tuple(range(len(tensors)))
    row = HostCallRow("ck0", places, (0,) * len(places), sizes, factors)
    frame: Any = _Frame(tensors)
    library.run(frame, row)
