"""The backend under test: a name, `perfuse` unless TEST_BACKEND says otherwise."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch


def default_backend() -> str:
    return os.environ.get("TEST_BACKEND", "perfuse")


def compiled(
    fn: Callable[..., Any],
    backend: str | Callable[..., Any] | None = None,
    *,
    dynamic: bool | None = False,
    fullgraph: bool = False,
) -> Callable[..., Any]:
    """`fn` through `torch.compile`; the peer's random ops draw the same numbers as eager."""
    backend = backend or default_backend()
    make_known(backend)
    options: Any = {"fallback_random": True} if backend == "inductor" else None
    return torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=fullgraph, options=options)


def make_known(backend: str | Callable[..., Any]) -> None:
    """A checkout that is not installed tells PyTorch of itself when it is imported."""
    if backend == "perfuse":
        importlib.import_module("perfuse")


def eager_random(backend: str | None = None) -> AbstractContextManager[Any]:
    """Inside it, random ops of the backend are bit-equal to eager's."""
    if (backend or default_backend()) != "perfuse":
        return contextlib.nullcontext()
    config = importlib.import_module("perfuse").config
    return config.patch(fallback_random=True)  # type: ignore[no-any-return]


def worker_environment(backend: str) -> dict[str, str]:
    """The peer starts a pool of compiler processes in each worker unless told not to."""
    own = {"PERFUSE_VERIFY": "memory"} if backend == "perfuse" else {}
    peer = {"TORCHINDUCTOR_COMPILE_THREADS": "1"} if backend == "inductor" else {}
    return {"OMP_NUM_THREADS": "1", **own, **peer}


class Counting:
    """A backend that counts its graphs and hands them to another backend."""

    def __init__(self, inner: str | None = None) -> None:
        self.inner = inner or default_backend()
        make_known(self.inner)
        self.num_graphs = 0

    def __call__(self, graph: Any, example_inputs: Any) -> Any:
        self.num_graphs += 1
        if self.inner == "eager":
            return graph.forward
        return torch._dynamo.lookup_backend(self.inner)(graph, example_inputs)
