"""Which values of a graph are needed in memory, and by whom: results, and operands of libraries."""

from __future__ import annotations

import torch
from torch.fx import Node as FxNode

from perfuse.graph.aliases import users_through
from perfuse.graph.facts import WHOLE_VIEWS, packet_name
from perfuse.ir.matmul import matmul_op
from perfuse.lower.registry import LOWERINGS
from perfuse.torch_compat.ops import is_view_op


def is_shown_often(node: FxNode) -> bool:
    """A result that is returned, or passed to a library call, as several views.

    Formulas of two views differ, and each would be stored. Calls share what they read transposed.
    """
    shown = _shown(node)
    is_returned = any(user.op == "output" for user in shown)
    return len(shown) > 1 and (is_returned or len(_passed_sizes(node)) > 1)


def _passed_sizes(node: FxNode) -> set[tuple[str, ...]]:
    """The sizes, in any order, in which library calls read all elements of a value."""
    found, values = set(), [node]
    for value in values:
        for user in value.users:
            if packet_name(user) in WHOLE_VIEWS:
                values.append(user)
            elif runs_in_library(user):
                found.add(tuple(sorted(map(str, value.meta["val"].shape))))
    return found


def is_returned_and_read(node: FxNode) -> bool:
    """Whether a value is a result of the graph, by itself or as a view, and an operand too."""
    kinds = {user.op == "output" for user in users_through(node, _is_reshaped)}
    return not is_view_op(node.target) and len(kinds) == 2


def _shown(node: FxNode) -> list[FxNode]:
    """The users that need a value in memory, directly or through views."""
    return [
        user
        for user in users_through(node, _is_view)
        if user.op == "output" or runs_in_library(user)
    ]


def _is_view(node: FxNode) -> bool:
    return is_view_op(node.target)


def _is_reshaped(node: FxNode) -> bool:
    return _is_view(node) or node.target is torch.ops.aten._unsafe_view.default


def feeds_calls(node: FxNode) -> bool:
    """Whether all users, through views at most, are calls that need it in memory."""
    return all(
        user.op == "output" or runs_in_library(user) for user in users_through(node, _is_reshaped)
    )


def runs_in_library(node: FxNode) -> bool:
    row = matmul_op(node.target)
    # A bias of batches is added by a loop, which takes formulas.
    is_matmul = row is not None and not (row.rank == 3 and row.bias is not None)
    return is_matmul or node.target not in LOWERINGS or node.target in _ATTENTION


# Any implementation of it reads its operands from memory.
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}
