"""Plan -> sources -> built entries and a host program -> a callable, for one kind of device.

A backend is four functions and a row of `BACKENDS`; only this room maps targets to backends.
Nothing here decides what is fused, where memory is, or which implementation is fastest.
"""

from perfuse.backends.backend import Backend, Sources
from perfuse.deferred import deferred
from perfuse.target import Target

# Loading is separate from generating and building: cached programs need nothing else.
CPU_BACKEND = Backend(
    "cpu",
    lambda target: target.gpu is None,
    generate=deferred("perfuse.codegen.cpp.unit:generate_sources"),
    build=deferred("perfuse.backends.cpu:build"),
    host=deferred("perfuse.backends.cpu:host"),
    load=deferred("perfuse.backends.cpu_load:load"),
)
GPU_BACKEND = Backend(
    "gpu",
    lambda target: target.gpu is not None,
    generate=deferred("perfuse.backends.gpu:generate"),
    build=deferred("perfuse.backends.gpu:build"),
    host=deferred("perfuse.backends.gpu:host"),
    load=deferred("perfuse.backends.gpu_load:load"),
    retile=deferred("perfuse.codegen.triton.unit:retiled"),
)

# The first that serves a target is taken, so special cases come first.
BACKENDS: list[Backend] = [GPU_BACKEND, CPU_BACKEND]


def backend_of(target: Target) -> Backend:
    """The backend that generates code for a target."""
    return next(backend for backend in BACKENDS if backend.serves(target))


__all__ = ["BACKENDS", "CPU_BACKEND", "GPU_BACKEND", "Backend", "Sources", "backend_of"]
