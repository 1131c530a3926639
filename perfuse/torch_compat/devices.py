"""GPUs, present or not."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PRIVATE: Any = torch._C  # untyped in part


# Raised by operations on fake tensors that need data; as text, the name of the operation.
NEEDS_DATA = (DynamicOutputShapeException, DataDependentOutputException)


@contextmanager
def fake_gpu() -> Iterator[FakeTensorMode]:
    """A block in which tensors are fake, and may be on a GPU that is not present."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _device_guard(), mode:
        yield mode


@contextmanager
def _device_guard() -> Iterator[None]:
    """Lets PyTorch switch to a GPU that does not exist: the switch does nothing.

    Indexing asks for the device's guard even where tensors are fake. A PyTorch that was built for
    GPUs puts an empty one in place itself; one built for CPUs has none, so the CPU's stands in.
    """
    if torch.version.cuda is not None or torch.version.hip is not None:
        yield
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before, guards[1] = guards[1], guards[0]
    try:
        yield
    finally:
        guards[1] = before


def faked_on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor like this one, on a device, under the active fake mode."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    untyped: Any = tensor  # no class is both, as far as their signatures tell
    if is_traceable_wrapper_subclass(untyped):
        names, context = untyped.__tensor_flatten__()
        inner = {name: faked_on(device, getattr(tensor, name)) for name in names}
        made: torch.Tensor = type(untyped).__tensor_unflatten__(inner, context, shape, strides)
    else:
        made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=device)
        made.requires_grad_(tensor.requires_grad)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(made, tensor.requires_grad) if is_parameter else made


def as_if_on(device: torch.device, value: Any) -> Any:
    """A traced tensor, or several, as if traced on this device."""
    if isinstance(value, list | tuple):
        return type(value)(as_if_on(device, item) for item in value)
    if not isinstance(value, FakeTensor):
        return value
    moved: Any = value.detach()
    moved.fake_device = device
    return moved


def raw_stream_getter() -> Callable[[int], int]:
    """A function: the number of a GPU -> the handle of the stream that work is now put on."""
    getter: Callable[[int], int] = _PRIVATE._cuda_getCurrentRawStream
    return getter


def current_gpu_getter() -> Callable[[], int]:
    """A function that returns the index of the current GPU."""
    getter: Callable[[], int] = _PRIVATE._cuda_getDevice
    return getter


def capture_getter() -> Callable[[], bool]:
    """A function that returns whether the current stream is being recorded as a graph."""
    getter: Callable[[], bool] | None = getattr(_PRIVATE, "_cuda_isCurrentStreamCapturing", None)
    return getter or torch.cuda.is_current_stream_capturing


def gpu_allocator() -> Callable[..., torch.Tensor]:
    """A function: shape, strides, dtype -> memory on the current GPU, contents undefined."""
    guards = _PRIVATE._dynamo.guards
    found: Callable[..., torch.Tensor] | None = getattr(guards, "_empty_strided_cuda", None)
    return found or _empty_on_gpu


def _empty_on_gpu(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")
