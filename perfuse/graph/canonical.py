"""Graphs as canonical text: equal text means equal code, in this process or in the next one.

What text cannot identify (a user's function, a generator, a foreign tensor type) raises
`NotCanonical` with the reason, and is then compiled without a cache.
"""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from perfuse.graph.facts import DONATED, RECOMPUTED, ROUNDED, attribute_of
from perfuse.torch_compat.guards import graph_assumptions
from perfuse.torch_compat.ops import OpOverload
from perfuse.torch_compat.sizes import sym_expression, symbol_facts
from perfuse.torch_compat.state import numeric_state
from perfuse.torch_compat.tensors import raw_bytes

MAX_CONSTANT_BYTES = 64 << 20
SPELLED_BY_REPR = (type(None), bool, int, str, complex, type(...))
SPELLED_BY_STR = (torch.dtype, torch.device, torch.layout, torch.memory_format)
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

Numbers = dict[Node, int]


class NotCanonical(Exception):
    """The graph cannot be identified by text. The reason is one word, for a counter."""


def aten_text(module: GraphModule) -> str:
    """The text of a functional ATen graph: operators, arguments, and each value's layout."""
    numbers: Numbers = {}
    lines = []
    for node in module.graph.nodes:
        numbers[node] = len(numbers)
        value = spell_value(node.meta.get("val"))
        lines.append(f"{spell_node(node, numbers, module, aten_target)} : {value}")
    values = [node.meta.get("val") for node in module.graph.nodes]
    return "\n".join([*lines, *symbol_facts(values), *graph_assumptions(values), numeric_state()])


# Marks of a call that change what is generated for it.
_MARKS = {RECOMPUTED: "recomputed", ROUNDED: "rounded"}


def spell_node(
    node: Node, numbers: Numbers, module: GraphModule, target_of: Callable[[Any], str]
) -> str:
    """One node: what it does, and to which earlier nodes."""
    if node.op == "placeholder":
        return "given up" if node.meta.get(DONATED) else "input"
    if node.op == "get_attr":
        return f"constant {spell_constant(attribute_of(module, str(node.target)))}"
    if node.op == "call_function":
        name = target_of(node.target)
    elif node.op in ("call_method", "output"):
        name = f"{node.op} {node.target}"
    else:
        raise NotCanonical(node.op)
    marks = [word for mark, word in _MARKS.items() if node.meta.get(mark)]
    name = " ".join([*marks, name])
    return f"{name} {spell(node.args, numbers)} {spell(node.kwargs, numbers)}"


def aten_target(target: Any) -> str:
    """The name of what an ATen graph calls."""
    if isinstance(target, OpOverload):
        return str(target)
    if getattr(target, "__module__", "") in ("_operator", "math", "builtins", "torch"):
        return f"{target.__module__}.{target.__name__}"
    raise NotCanonical("python_call")


def spell(value: Any, numbers: Numbers) -> str:
    """An argument as text that distinguishes types."""
    kind = type(value)
    if kind is Node:
        return f"%{numbers[value]}"
    if kind in SPELLED_BY_REPR:
        return repr(value)
    if kind is slice:
        return f"slice{spell((value.start, value.stop, value.step), numbers)}"
    if kind is float:
        return float.hex(value)
    if kind in SPELLED_BY_STR:
        return str(value)
    if isinstance(value, SYMBOLIC):
        return f"sym({sym_expression(value)})"
    if isinstance(value, tuple | list):
        opening, closing = "()" if isinstance(value, tuple) else "[]"
        return opening + ",".join(spell(item, numbers) for item in value) + closing
    if isinstance(value, dict):
        pairs = (f"{spell(k, numbers)}:{spell(v, numbers)}" for k, v in value.items())
        return "{" + ",".join(pairs) + "}"
    raise NotCanonical(f"argument_{kind.__name__}")


def spell_value(value: Any) -> str:
    """The layout of a traced value: a tensor, a size, a plain value, or several of these."""
    if isinstance(value, torch.Tensor):
        return spell_layout(value)
    if isinstance(value, tuple | list):
        return "(" + ",".join(spell_value(item) for item in value) + ")"
    return spell(value, {})


def spell_layout(tensor: torch.Tensor) -> str:
    """Everything about a tensor but its contents."""
    if tensor.layout is not torch.strided:
        return f"{tensor.dtype} {_dims(tensor.shape)} {tensor.layout}"
    flags = f"{tensor.requires_grad:d}{tensor.is_conj():d}{tensor.is_neg():d}"
    place = f"{_dims(tensor.stride())}+{spell(tensor.storage_offset(), {})}"
    return f"{tensor.dtype} {_dims(tensor.shape)} {place} {tensor.device} {flags}"


def _dims(sizes: Iterable[Any]) -> str:
    return "[" + ",".join(str(n) if type(n) is int else spell(n, {}) for n in sizes) + "]"


def spell_constant(value: Any) -> str:
    """A tensor that the graph holds, contents included."""
    if not is_storable(value):
        raise NotCanonical(f"constant_{type(value).__name__}")
    return f"{spell_layout(value)} {hashlib.sha256(raw_bytes(value)).hexdigest()}"


def is_storable(value: Any) -> bool:
    """Whether this constant can be kept as plain bytes."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and value.device.type in ("cpu", "cuda")
        and not value.is_conj()
        and not value.is_neg()
        and value.numel() * value.element_size() <= MAX_CONSTANT_BYTES
    )
