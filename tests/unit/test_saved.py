"""Saved programs: what is written is read back, and anything else is damaged."""

from __future__ import annotations

import pytest
import torch

from perfuse.codegen.host.source import ArenaWindow, HostSource
from perfuse.errors import CacheDamaged
from perfuse.runtime.bind_cpu import bind
from perfuse.runtime.saved import (
    PROGRAM,
    SavedProgram,
    files_of,
    pack_tensors,
    read_program,
    unpack_tensors,
)

TEXT = """def call(args):
  i0, = args
  args.clear()
  return (op_aten_add_Tensor(i0, c0), )
"""
HOST = HostSource(
    text=TEXT,
    num_pointers=1,
    num_sizes=1,
    arena_bytes=0,
    windows=(ArenaWindow(0, "torch.float32", (2, 3), (3, 1)),),
    fixed_pointers=((1, 64),),
    constants=("c0",),
    num_inputs=1,
    segments=(),
    ops=("aten.add.Tensor",),
)


def test_round_trip() -> None:
    saved = SavedProgram(HOST, (), {"c0": torch.arange(3.0)}, {"schedule.kernels": 0}, "plan")
    read = read_program(files_of(saved).__getitem__)
    assert (read.host, read.built, read.counts, read.plan) == (HOST, (), saved.counts, "plan")
    arguments = [torch.ones(3)]
    (result,) = bind(read.host, None, read.constants)(arguments)
    assert torch.equal(result, torch.tensor([1.0, 2.0, 3.0]))
    assert not arguments


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"host": {}}', b"\xff"])
def test_what_is_no_program_is_damaged(data: bytes) -> None:
    files = {**files_of(SavedProgram(HOST, (), {}, {})), PROGRAM: data}
    with pytest.raises(CacheDamaged):
        read_program(files.__getitem__)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).view(2, 3).t(),
        torch.randn(3, 2).to(torch.bfloat16),
        torch.randn(4).to(torch.float8_e4m3fn),
        torch.tensor(True),
        torch.empty(0, 3),
        torch.randn(2, 2, dtype=torch.complex64),
    ],
    ids=lambda t: f"{t.dtype}{list(t.shape)}",
)
def test_tensors_come_back_as_they_were(tensor: torch.Tensor) -> None:
    rows, data = pack_tensors({"first": torch.ones(1, dtype=torch.uint8), "t": tensor})
    found = unpack_tensors(rows, data)["t"]
    assert (found.dtype, found.shape, found.stride()) == (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
    )
    assert bytes(found.contiguous().view(-1).view(torch.uint8)) == bytes(
        tensor.contiguous().view(-1).view(torch.uint8)
    )
