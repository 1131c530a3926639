"""Casts of weights that a region has made, so that each weight is cast once per step.

A cast is found again while its weight is unchanged. One that is part of an autograd graph is found
by the thread that made it, one without a graph by every thread: autograd may run a backward in
another thread. The thread that made a cast keeps it alive until `release`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from perfuse.forking import ForkLock
from perfuse.torch_compat.autocast import at_end_of_backward, change_mark, is_reusable_leaf

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)

# The dtype, the thread of the autograd graph that a cast belongs to (None for no graph), and
# whether it was made in inference mode: such tensors cannot be used outside of it.
Kind = tuple[torch.dtype, int | None, bool]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Cast:
    """A weight in a lower precision, and what the weight was then."""

    tensor: Tensor
    mark: tuple[int, int]
    has_graph: bool


CastsByWeight = MutableMapping[Tensor, dict[Kind, weakref.ref[Cast]]]


class HeldCasts(threading.local):
    """The casts that one thread keeps alive."""

    def __init__(self) -> None:
        self.casts: dict[tuple[int, Kind], Cast] = {}  # by the identity of the weight


class CastCache:
    """All casts of a process, by weight."""

    def __init__(self) -> None:
        self._lock = ForkLock()
        self._found: CastsByWeight = WeakTensorKeyDictionary()
        self._held = HeldCasts()

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in a lower precision: made now, or before if it did not change since."""
        has_graph, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        own: Kind = (dtype, threading.get_ident(), False)
        kinds = [own] if has_graph else [(dtype, None, is_inference), own]
        mark = change_mark(weight)
        with self._lock:
            known = self._found.setdefault(weight, {})
            for kind in kinds:
                cast = known[kind]() if kind in known else None
                if cast is not None and cast.mark == mark:
                    return cast.tensor
        made = Cast(weight.to(dtype), mark, has_graph)
        with self._lock:
            known[kinds[0]] = weakref.ref(made)
        self._held.casts[id(weight), kinds[0]] = made
        return made.tensor

    def release(self, keeps_for_backward: bool = False) -> None:
        """Forget the casts of this thread.

        With `keeps_for_backward`, those without a graph stay: a custom autograd function made them
        in its forward, and may want them in its backward. Autograd keeps what it needs itself.
        """
        casts = self._held.casts
        for key in [k for k, cast in casts.items() if cast.has_graph or not keeps_for_backward]:
            del casts[key]

    def release_after_backward(self) -> None:
        """Forget the casts of this thread when the backward that runs at the moment is done."""
        at_end_of_backward(self._held.casts.clear)

    def num_held(self) -> int:
        """The number of casts that this thread keeps alive."""
        return len(self._held.casts)


def is_cacheable(value: object, device_type: str) -> bool:
    """Whether a cast of this argument may be kept: a float32 parameter on this device."""
    return (
        type(value) in PLAIN_TENSORS
        and isinstance(value, Tensor)
        and value.dtype == torch.float32
        and value.device.type == device_type
        and is_reusable_leaf(value)
    )


CASTS = CastCache()
