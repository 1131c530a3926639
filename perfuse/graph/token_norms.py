"""Group norms over transposed tokens, on Dynamo's graph, without eager's copy in front of them.

Attention in a convolutional network normalises rows of channels, transposed. PyTorch makes these
contiguous before it normalises them; statistics are then read across rows, a few channels of a
group at a time. `decompose_norms.group_norm` reads rows as they lie, once it sees the layout.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from perfuse.graph.copying import GraphCopy, copy_but_for
from perfuse.graph.decompose_norms import has_inner_channels
from perfuse.torch_compat.sizes import has_hint

_TARGETS = (F.group_norm, torch.group_norm)


def read_norms_in_place(gm: GraphModule) -> GraphModule:
    """The pass: a new module where there are group norms, the same one otherwise."""
    norms = {n for n in gm.graph.nodes if n.op == "call_function" and n.target in _TARGETS}
    if not norms:
        return gm

    def made(node: Node, new: GraphCopy) -> Node:
        copied = new.copy(node)
        if node in norms:
            copied.target = group_norm
        return copied

    return copy_but_for(gm, made)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Compute what `torch.group_norm` does, with its arguments."""
    if not _is_read_in_place(input, num_groups, weight, bias):
        return torch.group_norm(input, num_groups, weight, bias, eps, cudnn_enabled)
    batch, channels = input.shape[:2]
    pixels = input.numel() // (batch * channels)
    sizes = (batch, channels, pixels, num_groups)
    return torch.native_group_norm(input, weight, bias, *sizes, eps)[0]


def _is_read_in_place(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None
) -> bool:
    """Whether eager would copy rows of channels; what it refuses is left to it to refuse."""
    if x.dim() != 3 or not has_inner_channels(x) or not has_hint(x.numel()) or x.numel() == 0:
        return False
    given = [t for t in (weight, bias) if t is not None]
    fits = all(t.shape == x.shape[1:2] and t.dtype == x.dtype for t in given)
    return fits and x.shape[1] % num_groups == 0 and not torch.is_autocast_enabled("cpu")
