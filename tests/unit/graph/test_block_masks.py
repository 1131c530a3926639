"""Lists of block masks that no kernel reads: dropped from calls, and not computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from perfuse.graph.block_masks import drop_unread_lists


def graph_of(fn: Callable[..., Any], *given: Tensor) -> GraphModule:
    """The graph of a call after the pass, which must not change the result."""
    found: list[GraphModule] = []

    def keep(gm: GraphModule, _: Any) -> Callable[..., Any]:
        found.append(drop_unread_lists(gm))
        return found[-1].forward  # type: ignore[no-any-return]

    torch._dynamo.reset()
    got = torch.compile(fn, backend=aot_autograd(fw_compiler=keep))(*given)
    assert torch.equal(got, fn(*given))
    return found[-1]


def test_no_mask_sorts_nothing() -> None:
    x = torch.randn(1, 2, 40, 16)
    made = graph_of(lambda x: flex_attention(x, x, x), x)
    names = [str(node.target) for node in made.graph.nodes]
    assert not [name for name in names if "sort" in name]


def test_forward_reads_the_lists_of_queries() -> None:
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, "cpu")
    x = torch.randn(1, 2, 256, 16)
    made = graph_of(lambda x: flex_attention(x, x, x, block_mask=mask), x)
    (call,) = [node for node in made.graph.nodes if str(node.target) == "flex_attention"]
    lists: Any = call.args[4]
    assert None not in lists[2:6] and lists[6:10] == (None,) * 4


def test_other_programs_stay_as_they_are() -> None:
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    assert drop_unread_lists(graph) is graph
