"""Small programs with the Triton that they become; run as a module, it rewrites the sources."""

from __future__ import annotations

from pathlib import Path

import perfuse
from tests.gpu.programs import LARGE, SMALL

TARGET = "cuda:90"
NAMES = ("gelu_bias_fb", "large_softmax", "sum_columns", "large_norm_amax_quantise")
PROGRAMS = {program.name: program for program in (*SMALL, *LARGE)}


def golden_path(name: str) -> Path:
    return Path(__file__).parent / "golden" / f"{name}.txt"


def source_of(name: str) -> str:
    """The kernels of every graph, forward before backward."""
    program = PROGRAMS[name]
    made = perfuse.codegen_for(program.function, program.inputs(), target=TARGET)
    graphs = sorted(made.graphs, key=lambda graph: graph.kind, reverse=True)
    return "\n".join(f"# {graph.kind}\n{graph.kernels}" for graph in graphs)


if __name__ == "__main__":
    for each in NAMES:
        golden_path(each).write_text(source_of(each))
