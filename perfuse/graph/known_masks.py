"""Attention masks, on Dynamo's graph, before attention is decomposed.

A mask known before the first call to hide nothing, or only the future, is replaced by a flag.

Models build their masks from positions, and always do so under a compiler: then the mask reaches
the kernel as data, and the kernels that handle these two cases themselves are passed over for
slower ones. Where a mask depends on constants only, it is computed here.

Any other mask must have its rows dense in memory on a GPU, or none of the fused kernels takes it:
16 x 8 heads, 512 x 512, bfloat16 on an H200 are 50 us with such a mask, 778 us without. A copy of
the mask, which all layers share, is 40 us.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from perfuse.graph.copying import GraphCopy, copy_but_for, copy_node
from perfuse.graph.facts import ancestors
from perfuse.torch_compat.ops import OpOverload, OpOverloadPacket
from perfuse.torch_compat.state import disable_dispatch_modes

MAX_ELEMENTS = 1 << 27  # of a mask, computed on the CPU: a byte each, most often
CPU = torch.device("cpu")

# By name, since Dynamo keeps calls of functions, of methods and of operators. Nothing random,
# nothing that writes, nothing that makes memory without a value.
_KNOWN = frozenset(
    """
    add and_ arange bitwise_and bitwise_not bitwise_or bool cat clone contiguous cumsum diff eq
    expand expand_as flatten float full full_like ge getitem gt int invert le logical_and
    logical_not logical_or long lt masked_fill movedim mul ne neg new_full new_ones new_zeros not_
    ones ones_like or_ permute repeat reshape rsub squeeze stack sub to transpose tril triu type
    unsqueeze view where zeros zeros_like
    """.split()
)


def use_known_masks(gm: GraphModule) -> GraphModule:
    """The pass: a new module where a mask is known, the same one otherwise."""
    calls = [node for node in gm.graph.nodes if _name(node) == "scaled_dot_product_attention"]
    masks = {node: mask for node in calls if (mask := _mask_of(node)) is not None}
    if not masks:
        return gm
    constants = _constants(gm.graph)
    written = set(_written(gm.graph, constants))
    with disable_dispatch_modes(), torch.no_grad(), CPU:
        forms = {mask: _form(mask, constants) for mask in {*masks.values()} - written}
    found = {node: forms[mask] for node, mask in masks.items() if forms.get(mask) is not None}
    sparse = {n for n, mask in masks.items() if n not in found and _has_sparse_rows(n, mask)}
    return _rewritten(gm, found, sparse) if found or sparse else gm


def _has_sparse_rows(node: Node, mask: Node) -> bool:
    """No fused GPU kernel accepts the mask in its layout."""
    query, rows = _fake(_argument(node, 0, "query")), _fake(mask)
    if query is None or rows is None or query.device.type != "cuda":
        return False
    return query.dtype in (torch.float16, torch.bfloat16) and rows.stride()[-1] != 1


def _fake(node: Any) -> torch.Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _name(node: Node) -> str:
    """Of the function or method; an operator may be either (`operator.eq`, `Tensor.__eq__`)."""
    if node.op == "call_method":
        name = str(node.target)
        return name[2:-2] if name.startswith("__") and name.endswith("__") else name
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def _argument(node: Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _mask_of(node: Node) -> Node | None:
    mask = _argument(node, 3, "attn_mask")
    return mask if isinstance(mask, Node) and not _argument(node, 5, "is_causal") else None


def _constants(graph: Graph) -> set[Node]:
    """The calls that have one value whatever the inputs are."""
    found: set[Node] = set()
    for node in graph.nodes:
        if _name(node) in _KNOWN and "out" not in node.kwargs:
            if all(n in found for n in node.all_input_nodes):
                found.add(node)
    return found


def _written(graph: Graph, constants: set[Node]) -> Iterator[Node]:
    """Constants that may be written to, and everything computed from them."""
    targets = [target for node in graph.nodes if _writes(node) for target in node.all_input_nodes]
    reached = ancestors(targets) & constants
    for node in graph.nodes:
        if node in reached or any(n in reached for n in node.all_input_nodes):
            reached.add(node)
            yield node


def _writes(node: Node) -> bool:
    name = _name(node)
    if "out" in node.kwargs or node.kwargs.get("inplace") or name in _IN_PLACE:
        return True
    if isinstance(node.target, OpOverload | OpOverloadPacket):
        return True  # a custom operator: it may write to whatever it is given
    return name.endswith("_") and name not in _KNOWN


_IN_PLACE = frozenset(
    "iadd iand ifloordiv ilshift imod imul ior ipow irshift isub itruediv ixor setitem".split()
)


def _form(mask: Node, constants: set[Node]) -> str | None:
    """ "all" or "causal" for a mask that is one of these, None for every other."""
    fake = _fake(mask)
    if mask not in constants or fake is None or fake.dim() < 2:
        return None
    if not all(isinstance(n, int) for n in fake.shape) or fake.numel() > MAX_ELEMENTS:
        return None
    shown = _shown(_computed(mask))
    if shown is None:
        return None
    if bool(shown.all()):
        return "all"
    rows, columns = shown.shape[-2:]
    is_causal = rows == columns and bool((shown == torch.ones_like(shown).tril()).all())
    return "causal" if is_causal else None


def _shown(mask: torch.Tensor) -> torch.Tensor | None:
    """Which keys are seen; None where a mask does more than hide some."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    hidden = (mask == float("-inf")) | (mask == torch.finfo(mask.dtype).min)
    shown = mask == 0
    return shown if bool((hidden | shown).all()) else None


def _computed(mask: Node) -> torch.Tensor:
    values: dict[Node, Any] = {}
    needed = ancestors([mask])
    for node in mask.graph.nodes:
        if node in needed:
            args, kwargs = (_real(part, values) for part in (node.args, node.kwargs))
            is_method = node.op == "call_method"
            call = getattr(args[0], str(node.target)) if is_method else node.target
            values[node] = call(*args[is_method:], **kwargs)
    result = values[mask]
    assert isinstance(result, torch.Tensor)
    return result


def _real(tree: Any, values: dict[Node, Any]) -> Any:
    """Arguments with values for nodes and the CPU for every device."""

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Node):
            return values[leaf]
        is_place = isinstance(leaf, torch.device) or (
            isinstance(leaf, str) and leaf.partition(":")[0] in ("cuda", "hip")
        )
        return CPU if is_place else leaf

    return map_aggregate(tree, real)


def _rewritten(gm: GraphModule, forms: dict[Node, str | None], sparse: set[Node]) -> GraphModule:
    def made(node: Node, new: GraphCopy) -> Node:
        if node in sparse:
            mask = _argument(node, 3, "attn_mask")
            dense = new.graph.call_method("contiguous", (new.of[mask],))
            return copy_node(new.graph, node, {**new.of, mask: dense})
        copied = new.copy(node)
        if node in forms:
            _say_form(copied, node, forms[node], new)
        return copied

    return copy_but_for(gm, made)


def _say_form(copied: Node, node: Node, form: str | None, new: GraphCopy) -> None:
    """Replace the mask of a call with the kernel's own flag for it."""
    names = ("query", "key", "value")
    tensors = {name: new.of[_argument(node, i, name)] for i, name in enumerate(names)}
    rest = {k: v for k, v in copied.kwargs.items() if k not in ("attn_mask", "is_causal")}
    dropout = _argument(node, 4, "dropout_p")
    rest |= {} if dropout is None else {"dropout_p": dropout}
    copied.args = ()
    copied.kwargs = {**rest, **tensors, "is_causal": form == "causal"}
