"""Rules of PyTorch's dispatcher that are replaced while graphs are traced."""

from __future__ import annotations

import torch

from perfuse.torch_compat.autograd import _RESAMPLING, _whole_resampling


def rules() -> dict[str, list[str]]:
    packets = [getattr(torch.ops.aten, name) for name in _RESAMPLING]
    ops = [op for packet in packets for op in (packet.default, packet.vec)]
    return {str(op): sorted(map(str, op.py_kernels)) for op in ops}


def test_the_last_of_several_tracers_restores_them() -> None:
    """Threads that trace at once leave in any order."""
    before = rules()
    first, second = _whole_resampling(), _whole_resampling()
    first.__enter__()
    second.__enter__()
    during = rules()
    first.__exit__(None, None, None)
    assert rules() == during != before
    second.__exit__(None, None, None)
    assert rules() == before
