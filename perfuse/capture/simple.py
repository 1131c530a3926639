"""Which captures need nothing of AOTAutograd's runtime, and the `Facts` to run those by."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import GraphModule

from perfuse.context import Context
from perfuse.graph.facts import output_leaves
from perfuse.logs import channel
from perfuse.runtime.wrapper import Facts, Tangent
from perfuse.torch_compat import SimpleMetadata, is_autocast_enabled, simple_metadata

SYMBOLIC = "symbolic_shape"


def facts_of(
    graphs: Mapping[str, GraphModule],
    num_inputs: int,
    context: Context,
) -> Facts | None:
    """The facts of the capture just traced; None, with the reason counted, where it has more."""
    facts = facts_or_reason(graphs, num_inputs)
    if isinstance(facts, Facts):
        return facts
    context.counters.inc(f"capture.not_simple.{facts}")
    told = facts.replace("_", " ")
    channel("capture").info("this capture runs under AOTAutograd and is not cached: %s", told)
    return None


def facts_or_reason(
    graphs: Mapping[str, GraphModule], num_inputs: int, takes_any_size: bool = False
) -> Facts | str:
    """The facts of the capture just traced, or why they do not suffice to run it.

    A graph for inference runs by the same facts whatever its sizes (`takes_any_size`); whoever
    calls it then has to check what tracing assumed of them.
    """
    found = simple_metadata()
    if isinstance(found, str):
        return found
    reason = _reason_unfit(graphs, num_inputs, found)
    if reason is not None and not (
        reason == SYMBOLIC and takes_any_size and "backward" not in graphs
    ):
        return reason
    needs_grad = found.output_needs_grad
    is_training = "backward" in graphs
    return Facts(
        num_inputs,
        len(needs_grad),
        found.written,
        tuple(i for i, needed in enumerate(needs_grad) if not needed),
        _tangents(graphs["backward"], found) if is_training else (),
        is_training,
        is_autocast_enabled(),
    )


def _reason_unfit(
    graphs: Mapping[str, GraphModule], num_inputs: int, found: SimpleMetadata
) -> str | None:
    """Why what AOTAutograd reports does not fit the graphs as we would call them."""
    first = graphs.get("forward") or graphs.get("inference")
    if first is None or ("forward" in graphs) != ("backward" in graphs):
        return "missing_half"
    if len(first.graph.find_nodes(op="placeholder")) != num_inputs:
        return "inputs"
    if any(_is_symbolic(node.meta.get("val")) for node in first.graph.nodes):
        return SYMBOLIC
    if "backward" not in graphs:
        return None
    if len(output_leaves(graphs["backward"].graph)) != num_inputs:
        return "gradients"
    tangents = _tangents(graphs["backward"], found)
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
            tuple(v.shape),
            tuple(v.stride()),
            str(v.device),
        )
        for output, v in zip(found.tangent_outputs, values, strict=False)
    )


def _is_dense(tangent: Tangent) -> bool:
    return all(n == 1 or step > 0 for n, step in zip(tangent.shape, tangent.strides, strict=True))
