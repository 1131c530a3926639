"""Tensors and random states that a call made for compiling leaves as they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from perfuse.torch_compat.tensors import num_writes


@contextmanager
def left_as_they_were(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """A block after which these tensors, if it wrote to them, and the random state are restored."""
    before = [(tensor, tensor.detach().clone(), num_writes(tensor)) for tensor in tensors]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for tensor, value, count in before:
            if count is None or num_writes(tensor) != count:
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.copy_(value)
