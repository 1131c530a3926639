"""What every host program calls: operators by name, and tensors laid out as they were traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

# Where the text of host programs seems to be: beside our own files, which Dynamo does not trace.
HOST_FILE = str(Path(__file__).with_name("<host program>"))


def with_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor itself if it lies as it was traced, else a copy that does."""
    if tensor.stride() == strides:
        return tensor
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    if all(n == 1 or have == want for n, have, want in pairs) or tensor.numel() == 0:
        return tensor
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def resolve_op(name: str) -> Any:
    """The torch op behind "aten.mm.out"."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found
