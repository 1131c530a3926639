"""How the kernels of the benchmark touch memory, read from their assembly: no GPU is needed."""

from __future__ import annotations

import re

import pytest
import torch

import perfuse
from benchmarks.gpu_cases import TARGETS

TARGET = "cuda:90"
# Of every way to cut a kernel one that has its rows, columns or conditions at odd places.
NAMES = ("rope", "cat", "pad", "dropout", "amax_quant", "sum_rows", "sum_columns_bf16",
         "ce", "argmax", "add_layer_norm", "transpose")  # fmt: skip
WIDE = r"ld\.global\S*\.(v4\.b32|v2\.b64)|cp\.async\.cg\S* \[[^\]]*\], \[[^\]]*\], (0x10|16)\b"
DIVISION = r"\b(div|rem)\.[su](32|64)"
BY_CONSTANT = r"\bmul\.hi\.[su](32|64)"


def assembly(name: str) -> list[str]:
    row = TARGETS[name]
    args = [torch.empty(a.shape, dtype=a.dtype, device="meta") for a in row.args]
    made = perfuse.codegen_for(row.function, args, target=TARGET)
    return [text for graph in made.graphs for text in graph.assembly]


@pytest.mark.parametrize("name", NAMES)
def test_reads_are_wide_and_divisions_few(name: str) -> None:
    """The kernel that moves the data reads sixteen bytes at a time, and divides once for each."""
    text = assembly(name)[0]
    num_wide = len(re.findall(WIDE, text))
    assert num_wide > 0
    assert not re.search(DIVISION, text)
    assert name == "dropout" or len(re.findall(BY_CONSTANT, text)) <= num_wide


def test_four_neighbours_share_a_call_of_the_generator() -> None:
    """Ten rounds of two products for each four of a thread's elements; some are made in halves."""
    (text,) = assembly("dropout")
    num_stored = 4 * 2 * len(re.findall(r"st\.global\S*\.v4\.b32", text))
    products = re.findall(r"\bmul\.(wide|hi|lo)\.[su](32|64)\b.*, (-?\d+);", text)
    num_products = sum(abs(int(number)) > 1 << 24 for *_, number in products)
    assert num_stored >= 8
    assert num_products <= 1.2 * 2 * 10 * num_stored / 4
