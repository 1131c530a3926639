"""Where a test's tensors live, and whether that place still works."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

ROOT = Path(__file__).resolve().parents[2]
# What the operator database imports and a machine without network lacks:
#   pip install --target .device_deps expecttest
CARRIED = ROOT / ".device_deps"


def use_carried_packages() -> None:
    if CARRIED.is_dir() and str(CARRIED) not in sys.path:
        sys.path.append(str(CARRIED))


def gpu_device() -> str:
    """The device of the GPU tests; TEST_DEVICE=cpu runs them where there is no GPU."""
    return os.environ.get("TEST_DEVICE", "cuda")


def keep_all_bits() -> None:
    """By default some of a GPU's convolutions round float32 to 10 bits, and others do not.

    Importing the operator database locks `torch.backends.cudnn`; what is under it stays open.
    """
    torch._C._set_cudnn_allow_tf32(False)


def is_present(device: str) -> bool:
    return device != "cuda" or torch.cuda.is_available()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def is_healthy(device: str) -> bool:
    """After an assertion or a bad address in a kernel, a process can use the GPU no more."""
    try:
        synchronize(device)
    except RuntimeError:
        return False
    return True


def onto(x: Tensor, device: str) -> Tensor:
    """A copy on the device with the strides and the offset of `x`, whatever its layout."""
    if x.device.type == device:
        return x
    flat = torch.empty(0, dtype=torch.uint8).set_(x.detach().untyped_storage()).to(device)
    moved = torch.empty(0, dtype=x.dtype, device=device)
    moved.set_(flat.untyped_storage(), x.storage_offset(), x.size(), x.stride())
    return moved.requires_grad_(x.requires_grad)


def all_onto(tree: Any, device: str) -> Any:
    return pytree.tree_map(lambda x: onto(x, device) if isinstance(x, Tensor) else x, tree)
