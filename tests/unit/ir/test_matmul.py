"""The table of matmuls: its rows agree with PyTorch's schemas, and calls are rebuilt from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from perfuse.decision import library
from perfuse.graph.aligned_matmul import aligned_matmul
from perfuse.ir.dtype import DType
from perfuse.ir.matmul import LINEAR, MATMULS, MatmulOp, Operands, matmul_op
from perfuse.ir.program import Matmul, View

assert aligned_matmul  # importing it defines the op
SPELLINGS = {"a": ("self", "mat1", "batch1", "mat", "a"), "b": ("mat2", "batch2", "vec", "b")}


def overload(row: MatmulOp) -> Any:
    space, name = row.name.split(".")
    return getattr(getattr(torch.ops, space), name).default


@pytest.mark.parametrize("row", MATMULS, ids=lambda row: row.name)
def test_positions_are_those_of_the_schema(row: MatmulOp) -> None:
    given = overload(row)._schema.arguments
    tensors = [a.name for a in given if str(a.type) == "Tensor"]
    assert tensors[row.a] in SPELLINGS["a"] and tensors[row.b] in SPELLINGS["b"]
    assert (row.bias is None) == (len(tensors) == 2)
    assert row.arguments(row.operands(tensors)) == tuple(tensors)
    assert matmul_op(overload(row)) is matmul_op(f"{row.name}.out") is row


@pytest.mark.parametrize("other", ["aten.mm.dtype", "aten.addbmm.default", "aten.add.Tensor", "mm"])
def test_other_ops_have_no_row(other: str) -> None:
    assert matmul_op(other) is None


def test_the_choice_decides_the_call() -> None:
    a, b, bias = View("a", (4, 8), (8, 1)), View("b", (8, 6), (6, 1)), View("c", (6,), (1,))
    node = Matmul(Operands(a, b, bias), "o", library("aten.addmm.out"), DType.F32, "", beta=2)
    assert (node.args, node.kwargs, node.into_out) == ((bias, a, b), (("beta", 2),), True)
    assert node.reads() == ("c", "a", "b") and node.makes() == ["o"]
    linear = Matmul(Operands(a, b, bias), "o", library(LINEAR), DType.F32, "")
    assert linear.args[:3] == (a, View("b", (6, 8), (1, 6)), bias) and not linear.into_out
