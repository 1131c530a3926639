"""Tensors as memory: bytes, layouts, storages and their references."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from perfuse.torch_compat.state import disable_dispatch_modes


def storage_id(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory."""
    return storage_handle(tensor.untyped_storage())


def storage_handle(storage: Any) -> int:
    """The handle by which PyTorch knows a storage."""
    return int(storage._cdata)


def placement(tensor: torch.Tensor) -> list[Any]:
    """Where a tensor is in its memory, and the layout of the base that autograd knows of."""
    base = tensor._base
    memory = [tensor.storage_offset(), tensor.untyped_storage().nbytes(), base is None]
    return memory if base is None else [*memory, base.storage_offset(), *base.shape, *base.stride()]


def is_view_of_another(tensor: torch.Tensor) -> bool:
    """Whether autograd treats the tensor as a view of a base."""
    return bool(tensor._is_view())


def is_batched(value: object) -> bool:
    """Whether it stands for many tensors at once, inside a `vmap` of whatever kind."""
    kinds: Any = torch._C._functorch
    tests = (kinds.is_batchedtensor, kinds.is_legacy_batchedtensor)
    return isinstance(value, torch.Tensor) and any(test(value) for test in tests)


def num_writes(tensor: torch.Tensor) -> int | None:
    """How often the tensor's memory was written to; None where PyTorch does not count."""
    return None if tensor.is_inference() else int(tensor._version)


def cpu_allocator() -> Callable[..., torch.Tensor]:
    """A function: shape, strides, dtype -> memory on the CPU, contents undefined.

    PyTorch's own for compiled code costs a third of torch.empty_strided, which parses keywords and
    dispatches.
    """
    guards = torch._C._dynamo.guards
    found: Callable[..., torch.Tensor] | None = getattr(guards, "_empty_strided_cpu", None)
    return found or _empty_on_cpu


def _empty_on_cpu(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


def is_as_stored(tensor: torch.Tensor) -> bool:
    """Whether elements are what memory holds: not their negatives or conjugates, nor no memory."""
    return not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where its memory holds something else than its elements."""
    return tensor if is_as_stored(tensor) else in_memory(tensor.resolve_conj().resolve_neg())


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of zeros that have no memory (`torch._efficientzerotensor`)."""
    return tensor.clone() if tensor._is_zerotensor() else tensor


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor, row by row."""
    with disable_dispatch_modes():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return bytes(flat.numpy())


def element_bytes(value: int | float, dtype: torch.dtype) -> bytes:
    """One element of this type, as it is stored in memory."""
    with disable_dispatch_modes():
        return raw_bytes(torch.full((1,), value, dtype=dtype))


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of such a window may share a place in memory."""
    return overlap_in_order(sorted(zip(strides, shape, strict=True)))


def overlap_in_order(dims: Iterable[tuple[Any, Any]]) -> bool:
    """The same of strides and sizes in ascending order; symbolic ones are guarded on."""
    span: Any = 1
    for stride, size in dims:
        if size > 1 and stride < span:
            return True
        span += stride * (size - 1)
    return False


def memory_format_of(x: torch.Tensor) -> torch.memory_format:
    """Channels-last if that is the only layout of `x`, otherwise contiguous."""
    from torch._prims_common import suggest_memory_format

    return suggest_memory_format(x)


def tensor_of_bytes(
    memory: bytearray, dtype: torch.dtype, layout: Sequence[Sequence[int]], offset: int, device: str
) -> torch.Tensor:
    """A tensor of this shape and these strides, real even while a fake mode is active around it.

    On the CPU it is in `memory` itself, if its strides allow.
    """
    shape, strides = tuple(layout[0]), tuple(layout[1])
    with disable_dispatch_modes():
        count = math.prod(shape)
        if count == 0:
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
        found = flat.view(shape).to(device)
        if found.stride() == strides:
            return found
        return torch.empty_strided(shape, strides, dtype=dtype, device=device).copy_(found)


def cpu_allocations(step: Callable[[], Any]) -> list[tuple[int, int]]:
    """When `step()` took (or gave back, less than zero) how many bytes from PyTorch's allocator."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    results: Any = profile.profiler.kineto_results
    memory = (event for event in results.events() if event.name() == "[memory]")
    return [(e.start_ns(), e.nbytes()) for e in memory if e.device_type().name == "CPU"]


def storage_users(storage: Any) -> int:
    """How many tensors and handles hold this memory."""
    return storage_use_counter()(storage_handle(storage))


def storage_use_counter() -> Callable[[int], int]:
    """A function: the handle of a storage (`_cdata`) -> how many tensors and handles hold it."""
    private: Any = torch._C
    counter: Callable[[int], int] = private._storage_Use_Count
    return counter


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each was written to in place; inference tensors raise, since they do not count."""
    return [tensor._version for tensor in tensors]
