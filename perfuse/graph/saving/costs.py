"""The cost of a value: the bytes to save it, the work to recompute it."""

from enum import IntEnum
from math import prod
from typing import Any

import torch
from torch.fx import Node

from perfuse.graph.aliases import is_view, users_through
from perfuse.graph.facts import is_known, is_pure, is_sym, packet_name, tensor_of
from perfuse.torch_compat.ops import OpOverload, flop_formula
from perfuse.torch_compat.sizes import size_hint

# Not tagged as pointwise by PyTorch, but one loop over the result all the same.
_CHEAP_PACKETS = frozenset(
    """_to_copy _unsafe_view arange cat clone constant_pad_nd convert_element_type empty flip full
    full_like iota repeat scalar_tensor uniform_at where""".split()
)

# One pass over memory, but not a loop over the result.
_PASS_PACKETS = frozenset(
    """_adaptive_avg_pool2d _log_softmax _softmax all amax amin any argmax argmin avg_pool2d
    bucketize constant_pad_nd count_nonzero cummax cummin cumprod cumsum embedding
    embedding_dense_backward gather index index_add index_put index_select logcumsumexp logsumexp
    masked_scatter max max_pool2d_with_indices mean min native_batch_norm native_group_norm
    native_layer_norm prod scatter scatter_add scatter_reduce select_scatter slice_scatter std
    std_mean sum upsample_bilinear2d upsample_nearest2d var var_mean""".split()
)


# Lookups that a loop may make where it reads their result.
_LOOKUP_PACKETS = frozenset("embedding gather index index_select".split())

# Recomputing this many elements, one step each, costs as much as saving four bytes.
_STEPS_PER_FLOAT = 128
_BYTES_PER_STEP = 4 / _STEPS_PER_FLOAT


class Work(IntEnum):
    """How expensive it is to recompute a value, given its inputs."""

    FREE = 0  # a view of the same memory, or a size
    LOOP = 1  # fuses into the loop that reads it
    PASS = 2  # a pass over memory of its own: a reduction, a gather, a scan
    PRODUCT = 3  # anything else that is deterministic
    NEVER = 4  # random, with effects, or unknown: a collective, a custom op


def work_of(node: Node) -> Work:
    """How expensive `node` is to recompute."""
    if is_sym(node):
        return Work.FREE
    if not is_pure(node) or not is_known(node):
        return Work.NEVER
    if not isinstance(node.target, OpOverload) or is_view(node):
        return Work.FREE  # a part of a tuple, or a view
    if is_cheap(node) or _is_looked_up_by_loops(node):
        return Work.LOOP
    if packet_name(node) == "normal_at":
        # A GPU has arithmetic to spare; for a CPU the logarithm and the cosine take longer than
        # reading what they made.
        tensor = tensor_of(node)
        return Work.LOOP if tensor is not None and tensor.device.type != "cpu" else Work.PASS
    return Work.PASS if packet_name(node) in _PASS_PACKETS else Work.PRODUCT


def _is_looked_up_by_loops(node: Node) -> bool:
    """Matrices looked up on a CPU, each multiplied by one vector: experts, one for each token.

    Such matmuls are loops that read the matrices where they are (`lower/families/matmul.py`).
    """
    tensor = tensor_of(node)
    if packet_name(node) not in _LOOKUP_PACKETS or tensor is None or tensor.device.type != "cpu":
        return False
    readers = list(users_through(node, is_view))
    return bool(readers) and all(map(_multiplies_a_vector, readers))


def _multiplies_a_vector(node: Node) -> bool:
    if packet_name(node) != "bmm":
        return False
    a, b = (tensor_of(arg) for arg in node.args if isinstance(arg, Node))
    sizes = [] if a is None or b is None else [a.shape[1], b.shape[2]]
    return any(isinstance(size, int) and size == 1 for size in sizes)


def is_cheap(node: Node) -> bool:
    """Recomputing it costs about as much as reading it: one loop, nothing random."""
    if not is_pure(node) or not isinstance(node.target, OpOverload):
        return False
    if torch.Tag.pointwise in node.target.tags or is_view(node):
        return True
    return packet_name(node) in _CHEAP_PACKETS


def num_bytes(node: Node) -> int:
    """The bytes to save the value: the memory it spans; sizes are free."""
    tensor = tensor_of(node)
    if tensor is None:
        return 0
    shape = [size_hint(size) for size in tensor.shape]
    strides = [size_hint(stride) for stride in tensor.stride()]
    # An expanded axis takes no memory.
    return tensor.element_size() * prod(s for s, d in zip(shape, strides, strict=True) if d != 0)


def recompute_cost(node: Node) -> float:
    """The cost of recomputing the value, in saved bytes: small, except for a long chain."""
    work = work_of(node)
    if work is Work.FREE:
        return 0.0
    if work is Work.LOOP:
        return num_elements(node) * _BYTES_PER_STEP
    cost = num_flops(node) * _BYTES_PER_STEP
    # The level that recomputes matmuls puts memory before time.
    return min(cost, num_bytes(node) / 4) if work is Work.PRODUCT else cost


def is_tuple(node: Node) -> bool:
    """The node's value is several tensors."""
    return isinstance(node.meta.get("val"), (tuple, list))


def num_flops(node: Node) -> int:
    """Operations that computing the value takes, given its inputs; a view or a size takes none."""
    work = work_of(node)
    if work is Work.FREE or not isinstance(node.target, OpOverload):
        return 0
    formula = flop_formula(node.target) if work >= Work.PRODUCT else None
    if formula is not None:
        args, kwargs = _shapes(node.args), _shapes(node.kwargs)
        return int(formula(*args, **kwargs, out_val=_shapes(node.meta.get("val"))))
    return max((num_elements(n) for n in (node, *node.all_input_nodes)), default=0)


def num_elements(node: Node) -> int:
    """The number of elements of the value, 0 if it is not a tensor."""
    tensor = tensor_of(node)
    return 0 if tensor is None else prod(size_hint(size) for size in tensor.shape)


def _shapes(value: Any) -> Any:
    """The argument with every tensor in it replaced by its likely shape."""
    if isinstance(value, Node):
        return _shapes(value.meta.get("val"))
    if isinstance(value, torch.Tensor):
        return torch.Size(size_hint(size) for size in value.shape)
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if isinstance(value, (list, tuple)):
        return tuple(_shapes(item) for item in value)
    if isinstance(value, dict):
        return {name: _shapes(item) for name, item in value.items()}
    return value
