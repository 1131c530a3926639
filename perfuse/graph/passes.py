"""The passes and their order. Each is a function from a module to a new one.

Canonical spelling first, since CSE compares spellings; constants before algebra, since algebra
sees through them; attention behind it, since views cancelled are fewer forms to know; CSE again at
the end, because algebra makes expressions equal.
"""

import time
from collections.abc import Callable
from functools import partial

from torch.fx import GraphModule

from perfuse.config import ThresholdSettings
from perfuse.graph.attention import fuse_attention
from perfuse.graph.batch_products import batch_products
from perfuse.graph.canonicalize import canonicalize
from perfuse.graph.cse import eliminate_common_subexpressions
from perfuse.graph.dead_code import eliminate_dead_code
from perfuse.graph.fold_constants import fold_constants
from perfuse.graph.join_products import join_products
from perfuse.graph.pad_products import DEFAULT, pad_products
from perfuse.graph.simplify import simplify

Pass = Callable[[GraphModule], GraphModule]
Record = Callable[[str, int, int, float], None]

PASSES: tuple[tuple[str, Pass], ...] = (
    ("dead_code", eliminate_dead_code),
    ("canonicalize", canonicalize),
    ("cse", eliminate_common_subexpressions),
    ("fold_constants", fold_constants),
    ("simplify", simplify),
    ("attention", fuse_attention),
    ("cse_again", eliminate_common_subexpressions),
    ("join_products", join_products),
    ("batch_products", batch_products),
    ("pad_products", pad_products),
    ("cse_of_padding", eliminate_common_subexpressions),
    ("dead_code_again", eliminate_dead_code),
)


def run_passes(
    gm: GraphModule,
    thresholds: ThresholdSettings = DEFAULT,
    *,
    record: Record | None = None,
) -> GraphModule:
    """All passes in order; `record` gets each one's name, nodes before and after, and seconds."""
    pad = partial(pad_products, thresholds=thresholds)
    settled: dict[Pass, GraphModule] = {}  # what each pass made: it would make the same of it again
    for name, run in PASSES:
        num_before, start = len(gm.graph.nodes), time.perf_counter()
        if settled.get(run) is not gm:
            gm = settled[run] = pad(gm) if run is pad_products else run(gm)
        if record is not None:
            record(name, num_before, len(gm.graph.nodes), time.perf_counter() - start)
    return gm
