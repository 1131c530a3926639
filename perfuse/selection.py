"""Which candidates for matmuls the settings select, for all rooms."""

from __future__ import annotations

from perfuse.config import Settings

LIBRARY = "ATEN"  # the backend that is PyTorch's own libraries


def is_selecting(settings: Settings) -> bool:
    """Whether matmuls are computed by the fastest candidate of the selected backends."""
    return settings.max_autotune or settings.max_autotune_gemm


def backend_names(text: str) -> tuple[str, ...]:
    """The names of backends in a list separated by commas, in capitals."""
    return tuple(name.strip().upper() for name in text.split(",") if name.strip())


def is_library_selected(settings: Settings) -> bool:
    """Whether the library's call may be chosen for a matmul."""
    is_named = LIBRARY in backend_names(settings.max_autotune_gemm_backends)
    return is_named or not is_selecting(settings)


def is_library_allowed(settings: Settings) -> bool:
    """Whether the library call may compute a matmul, if only for lack of another candidate."""
    return is_library_selected(settings) or settings.autotune_fallback_to_aten
