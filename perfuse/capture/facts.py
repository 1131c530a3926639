"""Captures that do not need AOTAutograd's runtime, and the `RuntimeFacts` to run them by."""

from collections.abc import Callable, Mapping, Sequence

import sympy
import torch
from torch.fx import GraphModule

from perfuse.context import Context
from perfuse.graph.facts import output_leaves
from perfuse.logs import channel
from perfuse.lower.symbols import host_formula
from perfuse.runtime.size_formula import names_in
from perfuse.runtime.wrapper import RuntimeFacts, Tangent
from perfuse.torch_compat.autograd import SimpleMetadata, simple_metadata
from perfuse.torch_compat.graphs import GraphKind
from perfuse.torch_compat.sizes import sym_expression
from perfuse.torch_compat.state import is_autocast_enabled

SYMBOLIC = "symbolic_shape"
Graphs = Mapping[GraphKind, GraphModule]


def facts_of(graphs: Graphs, num_inputs: int, context: Context) -> RuntimeFacts | None:
    """The facts of the capture just traced; None, with the reason counted, if it needs more."""
    facts = facts_or_reason(graphs, num_inputs)
    if isinstance(facts, RuntimeFacts):
        return facts
    context.counters.inc(f"capture.not_simple.{facts}")
    reason = facts.replace("_", " ")
    channel("capture").info("this capture runs under AOTAutograd and is not cached: %s", reason)
    return None


def facts_or_reason(
    graphs: Graphs, num_inputs: int, takes_any_size: bool = False
) -> RuntimeFacts | str:
    """The facts of the capture just traced, or why they do not suffice to run it.

    With `takes_any_size`, sizes may be symbolic; the caller then has to check what tracing assumed
    about them.
    """
    found = simple_metadata(takes_any_size)
    if isinstance(found, str):
        return found
    reason = _reason_unfit(graphs, num_inputs, found, takes_any_size)
    if reason is not None:
        return reason
    needs_grad = found.output_needs_grad
    is_training = GraphKind.BACKWARD in graphs
    tangents = _tangents(graphs[GraphKind.BACKWARD], found) if is_training else ()
    sizes = _bound_sizes(graphs[GraphKind.FORWARD], tangents) if is_training else ()
    if sizes is None:
        return "sizes_from_data"
    return RuntimeFacts(
        num_inputs=num_inputs,
        num_outputs=len(needs_grad),
        written=found.written,
        without_grad=tuple(i for i, needed in enumerate(needs_grad) if not needed),
        tangents=tangents,
        is_training=is_training,
        is_autocast=is_autocast_enabled(),
        sizes=sizes,
        num_saved_sizes=found.num_saved_sizes,
    )


def _reason_unfit(
    graphs: Graphs, num_inputs: int, found: SimpleMetadata, takes_any_size: bool
) -> str | None:
    """Why the graphs cannot be called without AOTAutograd's runtime."""
    first = graphs.get(GraphKind.FORWARD) or graphs.get(GraphKind.INFERENCE)
    if first is None or (GraphKind.FORWARD in graphs) != (GraphKind.BACKWARD in graphs):
        return "missing_half"
    if len(first.graph.find_nodes(op="placeholder")) != num_inputs:
        return "inputs"
    is_symbolic = any(_is_symbolic(node.meta.get("val")) for node in first.graph.nodes)
    if is_symbolic and not takes_any_size:
        return SYMBOLIC
    if GraphKind.BACKWARD not in graphs:
        return None
    if len(output_leaves(graphs[GraphKind.BACKWARD].graph)) != num_inputs:
        return "gradients"
    tangents = _tangents(graphs[GraphKind.BACKWARD], found)
    if len(tangents) != len(found.tangent_outputs) or not all(map(_is_dense, tangents)):
        return "tangents"
    return None


def _is_symbolic(value: object) -> bool:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return True
    if not isinstance(value, torch.Tensor):
        return False
    if value.layout is not torch.strided:
        return True
    return any(type(n) is not int for n in (*value.shape, *value.stride()))


def _tangents(backward: GraphModule, found: SimpleMetadata) -> tuple[Tangent, ...]:
    nodes = [n for n in backward.graph.find_nodes(op="placeholder") if "tangents" in n.name]
    values = [node.meta["val"] for node in nodes]
    return tuple(
        Tangent(
            output,
            str(v.dtype).removeprefix("torch."),
            tuple(map(number_or_formula, v.shape)),
            tuple(map(number_or_formula, v.stride())),
            str(v.device),
        )
        for output, v in zip(found.tangent_outputs, values, strict=False)
    )


def number_or_formula(
    size: int | torch.SymInt,
    expression_of: Callable[[torch.SymInt], sympy.Expr] = sym_expression,
    spell: Callable[[sympy.Expr], str] = host_formula,
) -> int | str:
    """A number, or the formula of a dynamic size."""
    if not isinstance(size, torch.SymInt):
        return size
    expression = expression_of(size)
    return int(expression) if expression.is_Integer else spell(expression)


def _bound_sizes(
    forward: GraphModule, tangents: Sequence[Tangent]
) -> tuple[tuple[str, int, int | None], ...] | None:
    """Where a call finds the sizes of tangents; None if one depends on data."""
    formulas = [n for tangent in tangents for n in (*tangent.shape, *tangent.strides)]
    needed = {name for text in formulas if isinstance(text, str) for name in names_in(text)}
    found: dict[str, tuple[str, int, int | None]] = {}
    for place, node in enumerate(forward.graph.find_nodes(op="placeholder")):
        value = node.meta.get("val")
        dims = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]
        for dim, size in dims:
            if isinstance(size, torch.SymInt) and (name := str(sym_expression(size))) in needed:
                found.setdefault(name, (name, place, dim))
    return tuple(found.values()) if found.keys() == needed else None


def _is_dense(tangent: Tangent) -> bool:
    """Whether no stride is zero. One that is a formula follows from sizes, which are at least 2."""
    pairs = zip(tangent.shape, tangent.strides, strict=True)
    return all(n == 1 or isinstance(step, str) or step > 0 for n, step in pairs)
