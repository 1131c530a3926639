"""Where each loop and call comes from: the user's line, the module, and the ops it computes."""

from __future__ import annotations

from typing import Any

from torch.fx import Node as FxNode

from perfuse.ir.program import Origin
from perfuse.lower.builder import Builder
from perfuse.lower.tensor import Tensor
from perfuse.torch_compat.graphs import source_line
from perfuse.torch_compat.ops import is_view_op
from perfuse.torch_compat.records import module_path, original_op

# Names of ops recorded per loop: the first few are enough, and a chain may be thousands long.
MAX_OPS = 6


# Ops that no user wrote: leftovers of other ops.
UNINTERESTING = frozenset({"unsafe_view", "scalar_tensor", "getitem"})


class Origins:
    """Follows ops whose value is still a formula, until the loop that computes them is emitted."""

    def __init__(self) -> None:
        self._modules: dict[FxNode, str] = {}
        self._pending: dict[FxNode, tuple[str, ...]] = {}
        self._origins: dict[FxNode, Origin] = {}

    def of(self, node: FxNode) -> Origin:
        """The origin of what is emitted while this node is lowered."""
        module = module_path(node)
        if not module and node.meta.get("is_gradient_acc"):
            # A sum of gradients belongs where the last of them comes from.
            parts = [self._modules[n] for n in node.all_input_nodes if self._modules.get(n)]
            module = parts[-1] if parts else ""
        self._modules[node] = module
        return Origin(source_line(node), module, self._ops(node))

    def _ops(self, node: FxNode) -> tuple[str, ...]:
        found = dict.fromkeys(op for n in node.all_input_nodes for op in self._pending.get(n, ()))
        if node.op == "call_function" and not is_view_op(node.target):
            name = original_op(node)
            if name not in UNINTERESTING:
                found[name] = None
        return tuple(found)[:MAX_OPS]

    def settle(self, node: FxNode, value: Any, builder: Builder, is_call: bool) -> None:
        """Record the origin of a formula; a value in memory starts a new one for its readers."""
        is_loaded = isinstance(value, Tensor) and value.value.op == "load"
        if not isinstance(value, Tensor) or (is_loaded and builder.window_on(value) is not None):
            return
        # What follows a library call (adding its bias) does not compute the call's operands.
        self._pending[node] = (original_op(node),) if is_call else self._ops(node)
        origin = builder.origin
        if is_view_op(node.target):  # a view of what an earlier op computes
            origin = self._origins.get(node.all_input_nodes[0], origin)
        self._origins[node] = origin
        builder.formula_origins[value.value] = origin
