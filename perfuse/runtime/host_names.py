"""Functions that every host program calls: operators by name, tensors with traced strides."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perfuse.codegen.host.source import ArenaWindow, HostSource, function_name
from perfuse.graph import aligned_matmul, chunk_ops, random_ops
from perfuse.ir.matmul import CHANGING_LINEAR, MATMULS
from perfuse.runtime.changing_linear import changing_linear
from perfuse.runtime.grouped_matmul import grouped_matmul, grouped_outer
from perfuse.runtime.size_formula import place_of
from perfuse.torch_compat.ops import bare_op, recurrent_layer, recurrent_layer_backward

# Importing them defines the custom ops that a host program may call.
assert all((aligned_matmul, chunk_ops, random_ops))

# A compiled graph: takes its arguments in a list, which it empties.
Call = Callable[[list[Any]], tuple[Any, ...]]

# The apparent location of host programs: beside Perfuse's files, which Dynamo does not trace.
HOST_FILE = str(Path(__file__).with_name("<host program>"))


def addresses(tensors: Iterable[torch.Tensor]) -> array[int]:
    """Where the elements of many tensors begin.

    An optimizer step asks for thousands: looking the method up for each, of a Parameter above
    all, would take four times as long.
    """
    return array("q", list(map(torch.Tensor.data_ptr, tensors)))


def are_misaligned(pointers: array[int], count: int) -> bool:
    """Whether any of the first `count` addresses is not a multiple of 16."""
    return bool(np.bitwise_or.reduce(np.frombuffer(pointers, np.int64, count)) & 15)


def window(memory: torch.Tensor, made: ArenaWindow) -> torch.Tensor:
    """A tensor over a piece of memory, given as bytes."""
    kind: torch.dtype = getattr(torch, made.dtype.removeprefix("torch."))
    rest = memory[made.offset :]
    whole = rest[: rest.numel() // kind.itemsize * kind.itemsize].view(kind)
    return whole.as_strided(made.shape, made.strides, whole.storage_offset())


def with_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor itself if it has the traced strides, else a copy that has.

    None stays: a call may leave out an unused result (attention its log-sums), though
    tracing reported one.
    """
    if tensor is None or tensor.stride() == strides:
        return tensor
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    if all(n == 1 or have == want for n, have, want in pairs) or tensor.numel() == 0:
        return tensor
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def new_seeds(device: torch.device, count: int) -> torch.Tensor:
    """One seed per random op, drawn from the device's generator so that manual_seed applies."""
    return torch.empty(count, dtype=torch.int64, device=device).random_()


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All memory between a tensor's first and last element, flat."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 0 if tensor.numel() == 0 else 1 + sum((n - 1) * step for n, step in steps)
    return tensor.as_strided((span,), (1,))


# PyTorch's own bindings of these take their arguments in half the time of torch.ops.
_BINDINGS: dict[str, Any] = {
    f"{row.name}.out": getattr(torch, row.name.removeprefix("aten."))
    for row in MATMULS
    if row.name.startswith("aten.")
}
_BINDINGS |= {"perfuse.grouped_matmul.out": grouped_matmul}
_BINDINGS |= {"perfuse.grouped_outer.out": grouped_outer}
_BINDINGS |= {
    "aten.mkldnn_rnn_layer.default": recurrent_layer,
    "aten.mkldnn_rnn_layer_backward.default": recurrent_layer_backward,
}
_BINDINGS |= {CHANGING_LINEAR: changing_linear}


def resolve_op(name: str) -> Any:
    """The torch op behind "aten.mm.out"."""
    if name in _BINDINGS:
        return _BINDINGS[name]
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return bare_op(found)


def run_host(host: HostSource, names: dict[str, Any], constants: Mapping[str, Any]) -> Call:
    """The function that the text of a host program defines, with these names and its ops."""
    names |= {"torch": torch, "math": math, "as_strided": torch.as_strided}
    names |= {"with_strides": with_strides, "addresses": addresses, "place_of": place_of}
    for op in host.ops:
        names[function_name(op)] = constants[op] if op.startswith("py:") else resolve_op(op)
    names |= {name: value for name, value in constants.items() if not name.startswith("py:")}
    exec(compile(host.text, HOST_FILE, "exec"), names)
    call: Call = names["call"]
    return call
