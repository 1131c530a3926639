"""The passes by level of graph, in the order they run: a row each, a name and a function.

Dynamo's graph, before AOTAutograd decomposes ops; the joint graph of forward and backward; the
functional ATen graph that is lowered. There: canonical spelling first, since CSE compares
spellings; constants before algebra, since algebra sees through them; attention after it, since with
redundant views gone there are fewer forms to match; CSE again at the end, because algebra makes
expressions equal.

Cache keys cover only Perfuse's own files: a row added from elsewhere needs a separate cache.
"""

import functools
import time
from collections.abc import Callable, Sequence

from torch.fx import GraphModule

from perfuse.context import Context
from perfuse.graph.amax_of_views import amax_of_views
from perfuse.graph.attention import fuse_attention
from perfuse.graph.attention_chunks import attend_by_chunks
from perfuse.graph.batch_matmuls import batch_matmuls
from perfuse.graph.block_masks import drop_unread_lists
from perfuse.graph.broadcast_matmuls import broadcast_matmuls
from perfuse.graph.canonicalize import canonicalize
from perfuse.graph.channels_last import lay_channels_last, lay_joint_channels_last
from perfuse.graph.conv_bias import split_conv_biases
from perfuse.graph.conv_matmuls import conv_matmuls
from perfuse.graph.cse import eliminate_common_subexpressions, share_between_halves
from perfuse.graph.dead_code import eliminate_dead_code
from perfuse.graph.depthwise_gradients import split_depthwise_gradients
from perfuse.graph.fold_constants import fold_constants
from perfuse.graph.fold_norms import fold_norms
from perfuse.graph.join_matmuls import join_matmuls
from perfuse.graph.known_masks import use_known_masks
from perfuse.graph.pack_convolutions import pack_convolutions
from perfuse.graph.pad_matmuls import pad_matmuls
from perfuse.graph.patch_matmuls import patch_matmuls
from perfuse.graph.place_casts import place_casts
from perfuse.graph.recurrent import call_recurrent_layers
from perfuse.graph.row_major import lay_row_major
from perfuse.graph.saving.ties import mark_compared
from perfuse.graph.seed_random import seed_random
from perfuse.graph.simplify import simplify
from perfuse.graph.token_norms import read_norms_in_place
from perfuse.graph.vocabulary_heads import chunk_heads, chunk_joint_heads

Pass = Callable[[GraphModule, Context], GraphModule]
PassRow = tuple[str, Pass]
Record = Callable[[str, int, int, float], None]


@functools.cache
def plain(run: Callable[[GraphModule], GraphModule]) -> Pass:
    """The pass of a function that does not need the context."""

    @functools.wraps(run)
    def without_context(gm: GraphModule, _: Context) -> GraphModule:
        return run(gm)

    return without_context


DYNAMO_PASSES: list[PassRow] = [
    ("known_masks", plain(use_known_masks)),
    ("recurrent", plain(call_recurrent_layers)),
    ("token_norms", plain(read_norms_in_place)),
]
JOINT_PASSES: list[PassRow] = [
    ("amax_of_views", plain(amax_of_views)),
    ("block_masks", plain(drop_unread_lists)),
    ("share_between_halves", plain(share_between_halves)),
    ("vocabulary_heads", chunk_joint_heads),
    ("seed_random", seed_random),
    ("mark_compared", plain(mark_compared)),
    ("row_major", lay_row_major),
    ("conv_bias", split_conv_biases),
    ("channels_last", lay_joint_channels_last),
]
ATEN_PASSES: list[PassRow] = [
    ("block_masks", plain(drop_unread_lists)),
    ("dead_code", plain(eliminate_dead_code)),
    ("vocabulary_heads", chunk_heads),
    ("row_major", lay_row_major),
    ("canonicalize", plain(canonicalize)),
    ("cse", plain(eliminate_common_subexpressions)),
    ("fold_constants", plain(fold_constants)),
    ("place_casts", plain(place_casts)),
    ("simplify", plain(simplify)),
    ("attention", fuse_attention),
    ("cse_again", plain(eliminate_common_subexpressions)),
    ("fold_norms", plain(fold_norms)),
    ("dead_code_of_norms", plain(eliminate_dead_code)),
    ("conv_bias", split_conv_biases),
    ("channels_last", lay_channels_last),
    ("conv_matmuls", conv_matmuls),
    ("patch_matmuls", patch_matmuls),
    ("pack_convolutions", pack_convolutions),
    ("depthwise_gradients", split_depthwise_gradients),
    ("broadcast_matmuls", broadcast_matmuls),
    ("join_matmuls", plain(join_matmuls)),
    ("batch_matmuls", plain(batch_matmuls)),
    ("pad_matmuls", pad_matmuls),
    ("cse_of_padding", plain(eliminate_common_subexpressions)),
    ("dead_code_again", plain(eliminate_dead_code)),
    ("attention_chunks", plain(attend_by_chunks)),
]


def run_passes(
    gm: GraphModule, context: Context, rows: Sequence[PassRow], record: Record | None = None
) -> GraphModule:
    """All passes of a level; `record` gets each one's name, nodes before and after, and seconds."""
    settled: dict[Pass, GraphModule] = {}  # the result of each pass: a fixed point of it
    for name, run in rows:
        num_before, start = len(gm.graph.nodes), time.perf_counter()
        if settled.get(run) is not gm:
            gm = settled[run] = run(gm, context)
        if record is not None:
            record(name, num_before, len(gm.graph.nodes), time.perf_counter() - start)
    return gm
