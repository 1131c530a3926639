"""Autocast in PyTorch's dispatcher and autograd's engine, as far as it has no public names."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


@cache
def autocast_ops(device_type: str) -> frozenset[str]:
    """The ATen operators, without overloads, for which PyTorch has an autocast rule."""
    private: Any = torch._C
    names = private._dispatch_get_registrations_for_dispatch_key(_KEYS[device_type])
    aten = (name.removeprefix("aten::") for name in names if name.startswith("aten::"))
    return frozenset(name.partition(".")[0] for name in aten)


def is_enabling(region: torch.autocast) -> bool:
    """Whether a region switches autocast on: PyTorch may have refused its dtype."""
    return bool(region._enabled)


def is_reusable_leaf(tensor: torch.Tensor) -> bool:
    """Whether this is a parameter in memory of its own, which nothing updates unseen.

    CUDA graphs and transforms of torch.func do.
    """
    private: Any = torch._C
    is_leaf = tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
    is_seen = not private._is_cached_tensor(tensor)
    return is_leaf and is_seen and not private._are_functorch_transforms_active()


def change_mark(tensor: torch.Tensor) -> tuple[int, int]:
    """A value that differs after every change of the tensor in place, or of its memory."""
    return tensor._version, tensor.data_ptr()


def is_in_backward() -> bool:
    """Whether autograd's engine runs this thread at the moment."""
    private: Any = torch._C
    return bool(private._current_graph_task_id() != -1)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call `call` when the backward that runs at the moment is done."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)
