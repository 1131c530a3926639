"""Properties of nodes for all passes: may it be merged, dropped, recomputed; is it a view."""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch.fx import Node

from perfuse.torch_compat.ops import OpOverload, is_pointwise_function, schema_of
from perfuse.torch_compat.sizes import sym_expression

Item = TypeVar("Item")

# The mark, in `meta`, of a donated placeholder: its memory is not needed after this graph.
DONATED = "perfuse_donated"

# The mark of a recomputed call in the backward, distinct from equal ones around it:
# merged with them, their results would stay in memory until the later reader.
RECOMPUTED = "perfuse_recomputed"

# The mark of a value that is rounded to its dtype before anything reads it, as if it came from
# memory: both halves of a training step compute it, and must see the same bits.
ROUNDED = "perfuse_rounded"

# The mark of a value that the forward computes for the backward: never recomputed.
EARLY = "perfuse_early"

# The mark of a joint graph's output: how many of its values the user's function returns.
NUM_RESULTS = "perfuse_num_results"

# Another: the places of the results that eager does not save for its backward. The caller may
# change them in place.
UNREAD_RESULTS = "perfuse_unread_results"

# Views of every element of a tensor once, in another order or shape.
WHOLE_VIEWS = frozenset(
    {"view", "_unsafe_view", "t", "transpose", "permute", "squeeze", "unsqueeze"}
)

# Namespaces whose ops do what their schema says and nothing else. A custom op may count, log or
# talk to a network, so it is never merged nor dropped.
_KNOWN_NAMESPACES = frozenset({"aten", "mkldnn", "prims", "perfuse"})

# ATen ops whose schema does not show their effect. `_local_scalar_dense` makes an unbacked symbol,
# and two calls are two symbols; likewise `nonzero`, in its shape.
_EFFECTFUL_PACKETS = frozenset(
    """_assert_async _assert_scalar _assert_tensor_metadata _functional_assert_async
    _functional_assert_scalar _functional_sym_constrain_range
    _functional_sym_constrain_range_for_size _linalg_check_errors _local_scalar_dense _print item
    nonzero sym_constrain_range sym_constrain_range_for_size""".split()
)

# Python arithmetic on sizes, and getitem of a tuple of results. The in-place operators stay out.
_OPERATORS = "add sub mul floordiv truediv mod pow neg eq ne lt le gt ge and_ or_ getitem".split()
_SYM_FUNCTIONS = "sym_int sym_float sym_max sym_min sym_not sym_sum sym_ite".split()
PURE_PYTHON = frozenset(
    [getattr(operator, name) for name in _OPERATORS]
    + [getattr(torch, name) for name in _SYM_FUNCTIONS]
)


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Properties of an op, the same for every call of it."""

    packet: str  # `add` for aten.add.Tensor, "" for anything that is not an ATen or prims op
    is_known: bool  # we can name all of its effects
    is_random: bool  # two equal calls give two values
    has_effects: bool  # it may do more than compute its result


@cache
def op_facts(target: Any) -> OpFacts:
    """The facts of a call's target, looked up once: passes ask for them at every node."""
    if not isinstance(target, OpOverload):
        is_pure = target in PURE_PYTHON or is_pointwise_function(target)
        return OpFacts("", is_pure, False, not is_pure)
    is_random = torch.Tag.nondeterministic_seeded in target.tags
    if target.namespace not in _KNOWN_NAMESPACES:
        return OpFacts("", False, is_random, True)
    packet = str(schema_of(target).name).partition("::")[2]
    has_effects = packet in _EFFECTFUL_PACKETS or bool(schema_of(target).is_mutable)
    return OpFacts(packet, True, is_random, has_effects)


def packet_name(node: Node | None) -> str:
    """`add` for aten.add.Tensor, and "" for anything that is not an ATen or prims call."""
    if node is None or node.op != "call_function":
        return ""
    return op_facts(node.target).packet


def is_random(node: Node) -> bool:
    """Two equal calls give two values."""
    if node.op != "call_function" or not op_facts(node.target).is_random:
        return False
    return not _is_without_dropout(node)


def _is_without_dropout(node: Node) -> bool:
    """Attention draws random numbers for its dropout alone."""
    assert isinstance(node.target, OpOverload)
    for i, argument in enumerate(schema_of(node.target).arguments):
        if argument.name == "dropout_p":
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, 0.0)
            return isinstance(given, (int, float)) and given == 0
    return False


def is_known(node: Node) -> bool:
    """A call whose effects are known: an ATen or prims op, or size arithmetic."""
    if node.op != "call_function":
        return node.op in ("placeholder", "get_attr", "output")
    return op_facts(node.target).is_known and not _writes_to_out(node)


def has_effects(node: Node) -> bool:
    """It may do more than compute its result: such a node is never merged, moved or dropped."""
    if node.op == "call_function":
        return op_facts(node.target).has_effects or _writes_to_out(node)
    return node.op in ("call_method", "call_module")


def _writes_to_out(node: Node) -> bool:
    """`torch.cos(x, out=y)`: an op says so in its schema, a function does not."""
    return not isinstance(node.target, OpOverload) and node.kwargs.get("out") is not None


def is_pure(node: Node) -> bool:
    """Equal inputs give an equal value, and nothing else happens."""
    return node.op == "call_function" and not has_effects(node) and not is_random(node)


def is_sym(node: Node) -> bool:
    """The node's value is a size (or a number or truth about sizes), not a tensor."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def tensor_of(node: Any) -> torch.Tensor | None:
    """The fake tensor that describes the node's value, None if it is not a tensor."""
    val = node.meta.get("val") if isinstance(node, Node) else None
    return val if isinstance(val, torch.Tensor) else None


def known_tensor(node: Any) -> torch.Tensor:
    """The fake tensor of a node that is known to be one."""
    tensor = tensor_of(node)
    assert tensor is not None, f"{node} is a tensor"
    return tensor


def is_part(node: Node) -> bool:
    """The node takes one result out of a call that has several."""
    is_getitem = node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"
    return is_getitem and isinstance(node.args[0], Node)


def output_node(graph: torch.fx.Graph) -> Node:
    """The one output node of a graph."""
    node: Node = next(iter(graph.find_nodes(op="output")))
    return node


def results_of(joint: torch.fx.Graph) -> list[Node]:
    """The results of the user's function in a joint graph: gradients come after them."""
    return output_nodes(joint, stop=output_node(joint).meta[NUM_RESULTS])


def output_nodes(graph: torch.fx.Graph, start: int = 0, stop: int | None = None) -> list[Node]:
    """The nodes among the results, of all or of some by their place."""
    return [leaf for leaf in output_leaves(graph)[start:stop] if isinstance(leaf, Node)]


def output_leaves(graph: torch.fx.Graph) -> list[Any]:
    """The results of the graph, flattened: nodes, None, and constants."""
    return _leaves(output_node(graph).args)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return [value]
    return [leaf for item in value for leaf in _leaves(item)]


def attribute_of(gm: torch.fx.GraphModule, path: str) -> Any:
    """The attribute of a module with a dotted name, None if there is none."""
    held: Any = gm
    for part in path.split("."):
        held = getattr(held, part, None)
    return held


def attributes_of(gm: torch.fx.GraphModule) -> dict[str, Any]:
    """Everything that the graph's nodes fetch by name."""
    nodes = (*gm.graph.find_nodes(op="get_attr"), *gm.graph.find_nodes(op="call_module"))
    return {str(node.target): attribute_of(gm, str(node.target)) for node in nodes}


def is_same_size(a: Any, b: Any) -> bool:
    """Two sizes are known to be equal. Never adds a guard: unknown means no."""
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return bool(sym_expression(a) == sym_expression(b))


def is_same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dim() == b.dim() and all(map(is_same_size, a.shape, b.shape))


def is_same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, and equal strides wherever a stride is ever used."""
    if not is_same_shape(a, b) or not a.layout == b.layout == torch.strided:
        return False
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(is_same_size(size, 1) or is_same_size(p, q) for size, p, q in strides)


def is_same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """One may stand for the other: type, device, shape and strides agree."""
    return a.dtype == b.dtype and a.device == b.device and is_same_layout(a, b)


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    """The nodes, and all that they are computed from."""
    return reached(nodes, lambda node: node.all_input_nodes)


def reached(starts: Iterable[Item], next_of: Callable[[Item], Iterable[Item]]) -> set[Item]:
    """The starts, and all that is reached from them, step by step."""
    found: set[Item] = set()
    stack = list(starts)
    while stack:
        item = stack.pop()
        if item not in found:
            found.add(item)
            stack.extend(next_of(item))
    return found
