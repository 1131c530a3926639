"""Programs are immutable, whichever stage makes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perfuse.ir.dtype import DType
from perfuse.ir.program import Buffer, BufferKind, Program

BUFFER = Buffer("b0", DType.F32, (4,), (1,), BufferKind.TEMP)


@pytest.mark.parametrize("table", ["buffers", "constants", "hints"])
def test_tables_cannot_be_changed(table: str) -> None:
    program = Program((), {"b0": BUFFER}, (), ())
    for made in (program, replace(program, **{table: {}})):
        found: Any = getattr(made, table)
        with pytest.raises(TypeError):
            found["b1"] = BUFFER
