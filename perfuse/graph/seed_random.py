"""The forward's random numbers from seeds, so that the backward can redraw them.

A dropout mask is then saved as the eight bytes of its seed, if the cut finds that cheaper.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from perfuse.context import Context
from perfuse.graph.copying import GraphCopy, copy_but_for
from perfuse.graph.facts import ancestors, is_sym, known_tensor, results_of, tensor_of
from perfuse.graph.random_ops import normal_at, seeds, uniform_at
from perfuse.torch_compat.sizes import sym_expression

aten = torch.ops.aten

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_DEVICES = ("cpu", "cuda")
# The step between uniform numbers: half of it is added, so that neither 0 nor 1 comes out.
_HALF_STEP = 2.0**-25


def seed_random(joint: GraphModule, context: Context) -> GraphModule:
    """The pass on joint graphs: each draw that results need is made from a seed of its own."""
    if context.settings.fallback_random:
        return joint
    needed = ancestors(results_of(joint.graph))
    drawn = [node for node in joint.graph.nodes if node in needed and _can_seed(node)]
    devices = {known_tensor(node).device for node in drawn}
    if len(devices) != 1:
        return joint  # none, or seeds that would have to move between devices
    return copy_but_for(joint, _Seeded(drawn).made)


def _can_seed(node: Node) -> bool:
    tensor = tensor_of(node)
    if node.target not in _DRAWS or tensor is None or node.kwargs.get("generator") is not None:
        return False
    dtypes = _DTYPES.get(node.target, _FLOATS)
    is_known = tensor.dtype in dtypes or not dtypes
    return is_known and tensor.device.type in _DEVICES


class _Seeded:
    """Copies a graph; `drawn` become functions of a seed."""

    def __init__(self, drawn: Sequence[Node]) -> None:
        self._index = {node: i for i, node in enumerate(drawn)}
        self._sizes: dict[Any, Node] = {}  # by what they are in terms of symbols
        self._source: Node | None = None

    def made(self, node: Node, new: GraphCopy) -> Node:
        """The node that replaces a node in the new graph."""
        self.graph, self._copy = new.graph, new.of
        copied = self._from_seed(node) if node in self._index else new.copy(node)
        if is_sym(node):
            self._sizes.setdefault(sym_expression(node.meta["val"]), copied)
        return copied

    def _from_seed(self, node: Node) -> Node:
        if self._source is None:
            count, device = len(self._index), known_tensor(node).device
            self._source = self.graph.call_function(seeds, (count,), {"device": device})
            made = known_tensor(node).new_empty(count, dtype=torch.int64)
            self._source.meta = {**node.meta, "val": made}
        return _DRAWS[node.target](_Draw(self, node, self._index[node]))

    def draw(self, op: Any, like: Node, index: int, dtype: torch.dtype) -> Node:
        """Numbers in the shape of a node's, from the seed of this index."""
        sizes = [self._size(like, axis) for axis in range(known_tensor(like).dim())]
        made = self.graph.call_function(op, (self._source, index, sizes, dtype))
        made.meta = {**like.meta, "val": torch.empty_like(known_tensor(like), dtype=dtype)}
        return made

    def _size(self, like: Node, axis: int) -> int | Node:
        size: int | torch.SymInt = known_tensor(like).shape[axis]
        if not isinstance(size, torch.SymInt):
            return size
        expression = sym_expression(size)
        if expression not in self._sizes:
            # Every draw of a shape that is not spelled out takes it from its first argument.
            source = self._copy[like.all_input_nodes[0]]
            made = self.graph.call_function(aten.sym_size.int, (source, axis))
            made.meta = {**like.meta, "val": size}
            self._sizes[expression] = made
        return self._sizes[expression]

    def copied(self, value: Any) -> Any:
        return self._copy[value] if isinstance(value, Node) else value


class _Draw:
    """One draw: its arguments, and the ops that it is made of instead."""

    def __init__(self, seeded: _Seeded, node: Node, index: int) -> None:
        self._seeded, self._node, self._index = seeded, node, index
        self.dtype = known_tensor(node).dtype

    def uniform(self, dtype: torch.dtype | None = None) -> Node:
        return self._seeded.draw(uniform_at, self._node, self._index, dtype or self.dtype)

    def normal(self) -> Node:
        return self._seeded.draw(normal_at, self._node, self._index, self.dtype)

    def argument(self, place: int, name: str, default: Any) -> Any:
        args = self._node.args
        given = args[place] if place < len(args) else self._node.kwargs.get(name, default)
        return self._seeded.copied(given)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        made = self._seeded.graph.call_function(target, args, kwargs)
        given = [a.meta["val"] if isinstance(a, Node) else a for a in args]
        made.meta = {**self._node.meta, "val": target(*given, **kwargs)}
        return made

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        if known_tensor(node).dtype is dtype:
            return node
        return self.call(aten._to_copy.default, node, dtype=dtype)

    def scaled(self, node: Node, factor: float, offset: float) -> Node:
        return self.call(aten.add.Scalar, self.call(aten.mul.Scalar, node, factor), offset)

    def below(self, compare: Any, chance: Any) -> Node:
        """Whether a uniform number is below a chance, in the type of the result."""
        hit = self.call(compare, self.uniform(torch.float32), chance)
        return self.cast(hit, self.dtype)


def _below_number(draw: _Draw) -> Node:
    return draw.below(aten.lt.Scalar, draw.argument(1, "p", 0.5))


def _below_tensor(draw: _Draw) -> Node:
    return draw.below(aten.lt.Tensor, draw.cast(draw.argument(0, "self", None), torch.float32))


def _uniform_between(draw: _Draw) -> Node:
    low, high = draw.argument(1, "from", 0.0), draw.argument(2, "to", 1.0)
    return draw.scaled(draw.uniform(), high - low, low)


def _normal_around(draw: _Draw) -> Node:
    mean, deviation = draw.argument(1, "mean", 0.0), draw.argument(2, "std", 1.0)
    return draw.scaled(draw.normal(), deviation, mean)


def _exponential(draw: _Draw) -> Node:
    centred = draw.call(aten.add.Scalar, draw.uniform(), _HALF_STEP)
    value = draw.call(aten.neg.default, draw.call(aten.log.default, centred))
    return draw.call(aten.div.Scalar, value, draw.argument(1, "lambd", 1.0))


_DRAWS: dict[Any, Callable[[_Draw], Node]] = {
    aten.rand.default: _Draw.uniform,
    aten.rand_like.default: _Draw.uniform,
    aten.randn.default: _Draw.normal,
    aten.randn_like.default: _Draw.normal,
    aten.bernoulli.p: _below_number,
    aten.bernoulli.default: _below_tensor,
    aten.uniform.default: _uniform_between,
    aten.normal_functional.default: _normal_around,
    aten.exponential.default: _exponential,
}
# Where those of most draws will not do; () stands for any.
_DTYPES: dict[Any, tuple[torch.dtype, ...]] = {
    aten.bernoulli.p: (),
    aten.bernoulli.default: (),
    # Scaled and moved in a smaller type, what is below the bound could be rounded to it.
    aten.uniform.default: (torch.float32,),
    aten.exponential.default: (torch.float32,),
}
