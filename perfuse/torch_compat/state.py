"""The global switches of PyTorch that a trace or a call depends on."""

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack


def disable_dispatch_modes() -> AbstractContextManager[Any]:
    """A block in which tensors are real even while a fake or tracing mode is active around it."""
    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


def ambient_state() -> tuple[Any, ...]:
    """The global switches under which a graph is traced."""
    devices = [name for name in ("cpu", "cuda") if torch.amp.is_autocast_available(name)]
    autocast = [
        (name, torch.is_autocast_enabled(name), str(torch.get_autocast_dtype(name)))
        for name in devices
    ]
    from torch._functorch import config as functorch_config
    from torch.fx.experimental import _config as fx_config

    backends: Any = torch.backends
    cudnn, mkldnn, einsum = backends.cudnn, backends.mkldnn, backends.opt_einsum
    kernels = ("flash", "math", "mem_efficient", "cudnn")
    attention = tuple(getattr(backends.cuda, f"{name}_sdp_enabled")() for name in kernels)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple(autocast),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        getattr(torch.utils.deterministic, "fill_uninitialized_memory", None),
        str(torch.get_default_dtype()),
        str(torch.get_default_device()),
        torch.get_float32_matmul_precision(),
        attention,
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, mkldnn.enabled),
        (einsum.enabled, einsum.strategy) if einsum.is_available() else None,
        _flushes_denormals(),
        [config.get_hash().hex() for config in (functorch_config, fx_config)],
    )


def numeric_state() -> str:
    """The global switches that compiling an ATen graph reads: dtypes it fills in, how constants are
    folded, and how exact matmuls have to be."""
    precision = torch.get_float32_matmul_precision()
    return (
        f"default dtype {torch.get_default_dtype()} flushes {_flushes_denormals()} "
        f"float32 matmuls {precision}"
    )


def allows_tf32() -> bool:
    """Whether float32 matmuls on a GPU may round their operands to fewer bits."""
    return bool(torch.get_float32_matmul_precision() != "highest")


def _flushes_denormals() -> bool:
    """Whether this thread's arithmetic, and with it folded constants, loses denormal numbers."""
    return sys.float_info.min / 2 == 0.0


def is_autocast_enabled() -> bool:
    """Whether autocast is on for any kind of device."""
    return bool(torch._C._is_any_autocast_enabled())


def has_tracing_hooks() -> bool:
    """Whether something around this call would change what a trace sees or saves."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    modes = {type(mode).__name__ for mode in _get_current_dispatch_mode_stack()}
    return hooks is not None or not modes <= {"FakeTensorMode"}


def is_forward_mode() -> bool:
    """Whether tensors may carry tangents: inside a `forward_ad.dual_level()`."""
    return forward_ad._current_level >= 0


def has_tangent(values: Iterable[Any]) -> bool:
    """Whether a tensor among these carries a tangent of the current level."""
    unpack: Any = forward_ad.unpack_dual  # not annotated
    tensors = (x for x in values if isinstance(x, torch.Tensor))
    numbers = (x for x in tensors if x.is_floating_point() or x.is_complex())
    return any(unpack(x).tangent is not None for x in numbers)


def disabled_autocast() -> AbstractContextManager[Any]:
    """A block in which ATen calls run in the dtypes they are given, whatever autocast says."""
    context: AbstractContextManager[Any] = torch._C._DisableAutocast()
    return context
