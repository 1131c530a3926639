"""LLVM's assembler, which comes with Triton: does gfx942 have these instructions?"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

HEADER = ('.amdgcn_target "amdgcn-amd-amdhsa--gfx942"', ".text", "test:")


def are_assembled(lines: Sequence[str]) -> bool:
    """Whether the assembler takes all lines; if not, it prints which it refuses."""
    library = importlib.import_module("triton._C.libtriton")
    library.llvm.init_targets()
    text = "\n".join((*HEADER, *lines, "s_endpgm", ""))
    return len(library.amd.assemble_amdgcn(text, "gfx942", "")) > 0
