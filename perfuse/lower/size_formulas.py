"""Where the host computes size formulas: at entry, or after the call that finds their last input.

A formula may appear in any shape, often after other ops were lowered, and rejected lowerings remove
their nodes again. So formulas are placed when all nodes are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from perfuse.ir.program import Extern, LibraryCall, Node, SizeFormula
from perfuse.lower.symbols import Symbols


def with_formulas(
    nodes: Sequence[Node], symbols: Symbols
) -> tuple[tuple[Node, ...], list[SizeFormula]]:
    """The nodes, calls with the formulas they complete, and the formulas computed at entry."""
    placed = list(nodes)
    makers = {name: i for i, node in enumerate(nodes) for name in _made(node)}
    at_entry: list[SizeFormula] = []
    for formula in symbols.derived:
        calls = [makers[name] for name in formula.inputs if name in makers]
        if calls:
            placed[max(calls)] = _completing(placed[max(calls)], formula)
        elif symbols.can_compute(formula):
            at_entry.append(formula)
        # Else it is known only as the size of an argument of this half of a training graph.
    return tuple(placed), at_entry


def _made(node: Node) -> list[str]:
    return node.makes() if isinstance(node, LibraryCall) else []


def _completing(call: Node, formula: SizeFormula) -> Extern:
    """The call after which the formula is computed: by then all its inputs must be known."""
    assert isinstance(call, Extern), f"{call} finds no size"
    others = [name for name in formula.inputs if name not in call.makes()]
    return replace(
        call,
        new_sizes=(*call.new_sizes, formula),
        after=tuple(dict.fromkeys((*call.after, *others))),
    )
