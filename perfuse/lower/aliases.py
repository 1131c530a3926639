"""Chains of view ops, and the node whose memory they view."""

from __future__ import annotations

import torch
from torch.fx import Node as FxNode

from perfuse.torch_compat.ops import is_view_op


def alias_root(node: FxNode) -> FxNode:
    """The node whose memory a chain of view ops views."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], FxNode):
        if not (is_view_op(node.target) or node.target is torch.ops.aten.copy_.default):
            break
        node = node.args[0]
    return node


def views_from(root: FxNode, node: FxNode) -> list[FxNode]:
    """The view ops that lead from a root to a node; none where it was written to on the way."""
    chain: list[FxNode] = []
    while node is not root:
        if not is_view_op(node.target):
            return []
        chain.insert(0, node)
        node = node.args[0]  # type: ignore[assignment]
    return [] if any(user.target is torch.ops.aten.copy_.default for user in root.users) else chain
