"""Small programs with the Triton that they become; run as a module, it rewrites the sources."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

import perfuse
from perfuse.codegen.triton.templates.template import PERSISTENT, PING_PONG, POINTERS, Template
from tests.gpu.programs import LARGE, SMALL
from tests.triton.contractions import Problem, sources_of

TARGET = "cuda:90"
NAMES = (
    "gelu_bias_fb",
    "large_softmax",
    "sum_columns",
    "large_norm_amax_quantise",
    "contraction_pointers",
    "contraction_persistent",
    "contraction_ping_pong",
)
CONTRACTION = Problem(
    "silu of a linear layer, and a residual",
    lambda a, w, bias, r: F.silu(F.linear(a, w, bias)) + r,
    tuple(
        torch.zeros(s, dtype=torch.bfloat16) for s in ((512, 320), (384, 320), (384,), (512, 384))
    ),
)
# Contractions, with a residual so that the epilogue reads memory: a template each.
TEMPLATES = {
    "contraction_pointers": Template(POINTERS, 128, 64, 32, 4, 3, splits=2),
    "contraction_persistent": Template(PERSISTENT, 128, 256, 64, 8, 4, programs=132, parts=2),
    "contraction_ping_pong": Template(PING_PONG, 128, 128, 64, 4, 5, programs=132),
}
PROGRAMS = {program.name: program for program in (*SMALL, *LARGE)}


def golden_path(name: str) -> Path:
    return Path(__file__).parent / "golden" / f"{name}.txt"


def source_of(name: str) -> str:
    """The kernels of every graph, forward before backward."""
    if name in TEMPLATES:
        return sources_of(CONTRACTION, TEMPLATES[name], "sm_90").text
    program = PROGRAMS[name]
    made = perfuse.codegen_for(program.function, program.inputs(), target=TARGET)
    graphs = sorted(made.graphs, key=lambda graph: graph.kind, reverse=True)
    return "\n".join(f"# {graph.kind}\n{graph.kernels}" for graph in graphs)


if __name__ == "__main__":
    for each in NAMES:
        golden_path(each).write_text(source_of(each))
