"""The key of a captured graph: what Dynamo saw, before any of it is traced down to ATen.

Two captures with one key compile to one result. What a key cannot distinguish is refused: shapes
with symbols, functions that are not PyTorch's own, tensors that are more than tensors. The values
of Python numbers that Dynamo passes as symbols are part of a second key: which of the two a capture
is kept under depends on whether tracing asked for a value, which shows in the guards it set.
"""

import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from perfuse.cache import keys
from perfuse.cache.keys import identity, key_of
from perfuse.context import Context
from perfuse.graph.canonical import NotCanonical, Numbers, spell_layout, spell_node
from perfuse.torch_compat.guards import GuardMark, SymbolTable
from perfuse.torch_compat.ops import OpOverload
from perfuse.torch_compat.state import ambient_state, has_tracing_hooks
from perfuse.torch_compat.tensors import storage_id

TORCH = Path(torch.__file__).parent
OWN_MODULES = ("torch", "_operator", "operator", "builtins", "math")
OWN_OPS = ("aten", "prims")
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
FP8_LINEAR = "perfuse.precision.fp8_linear"


@dataclass(frozen=True, slots=True)
class CaptureKey:
    """The keys of a captured graph, taken before it is traced."""

    general: str  # without the values of its symbols
    by_value: str | None  # with all of them; None without symbols, or where values are unknown
    symbols: SymbolTable
    mark: GuardMark  # the guards before tracing


def capture_key(module: GraphModule, inputs: Sequence[Any], context: Context) -> CaptureKey:
    """The hashes of a captured graph, its inputs and everything else it depends on."""
    if has_tracing_hooks():
        raise NotCanonical("hooks")
    symbols = SymbolTable.of(module)
    lines = [repr(ambient_state()), _inputs_text(module, inputs), *symbols.facts()]
    numbers: Numbers = {}
    for node in module.graph.nodes:
        numbers[node] = len(numbers)
        lines.append(spell_node(node, numbers, module, _function_name))
    values = symbols.values() if symbols.symbols else None
    key = partial(key_of, keys.CAPTURE, *identity(context), *lines)
    by_value = None if values is None else key("values", *values)
    return CaptureKey(key(), by_value, symbols, symbols.mark())


def _inputs_text(module: GraphModule, inputs: Sequence[Any]) -> str:
    """The layout of each input, and which of them share memory."""
    storages: dict[int, int] = {}
    lines = []
    for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        _check_plain(node, value)
        share = storages.setdefault(storage_id(value), len(storages))
        kind = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
        lines.append(f"{kind} {spell_layout(value)} leaf={value.is_leaf:d} storage={share}")
    if len(storages) != len(inputs):
        raise NotCanonical("shared_memory")
    return "\n".join(lines)


def _check_plain(node: Node, value: Any) -> None:
    if type(value) not in PLAIN_TENSORS:
        raise NotCanonical(f"input_{type(value).__name__}")
    is_ours = value.layout is torch.strided and value.device.type in ("cpu", "cuda")
    if not is_ours or value.is_inference():
        raise NotCanonical("input_layout")
    traced = node.meta.get("example_value")
    if isinstance(traced, torch.Tensor):
        dims = (*traced.shape, *traced.stride(), traced.storage_offset())
        if any(type(n) is not int for n in dims):
            raise NotCanonical("symbolic_shape")


def _function_name(target: Any) -> str:
    """The name of what a captured graph calls: functions of PyTorch, Python and Perfuse only."""
    if isinstance(target, OpOverload):
        if target.namespace not in OWN_OPS:
            raise NotCanonical("custom_op")
        return str(target)
    if _is_fp8_linear(target):  # its code is part of every key, as all of Perfuse's
        return f"{target.__module__}.{target.__name__}"
    home = getattr(target, "__module__", None) or ""
    owner = getattr(target, "__self__", None)
    if isinstance(owner, type):  # torch._C.TensorBase.something
        home = owner.__module__
    if home.split(".")[0] not in OWN_MODULES or "functorch" in home or "_higher_order" in home:
        raise NotCanonical("function")
    if isinstance(target, types.FunctionType):
        # A wrapper may carry the name of what it wraps; its code says where it was written.
        if not Path(target.__code__.co_filename).is_relative_to(TORCH):
            raise NotCanonical("function")
        # The trace will call whatever has this name: it must be what was captured.
        if getattr(sys.modules.get(home), target.__name__, target) is not target:
            raise NotCanonical("function_replaced")
    elif not isinstance(target, types.BuiltinFunctionType | types.MethodDescriptorType | type):
        raise NotCanonical("function")
    return f"{home}.{target.__qualname__}"


def _is_fp8_linear(target: Any) -> bool:
    """Whether it is `fp8_linear`: if its module is not loaded, nothing is."""
    home = sys.modules.get(FP8_LINEAR)
    return home is not None and target is home.fp8_linear
