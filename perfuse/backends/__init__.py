"""Plan -> sources -> built entries and a host program -> a callable, for one kind of device.

A backend is four functions and a row of `BACKENDS`; only this room maps targets to backends.
Nothing here decides what is fused, where memory is, or which implementation is fastest.
"""

from perfuse.backends.backend import Backend, Sources
from perfuse.backends.cpu import CPU_BACKEND
from perfuse.backends.gpu import GPU_BACKEND
from perfuse.target import Target

# The first that serves a target is taken, so special cases come first.
BACKENDS: list[Backend] = [GPU_BACKEND, CPU_BACKEND]


def backend_of(target: Target) -> Backend:
    """The backend that generates code for a target."""
    return next(backend for backend in BACKENDS if backend.serves(target))


__all__ = ["BACKENDS", "Backend", "Sources", "backend_of"]
