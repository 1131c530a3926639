"""What a pipelined loop copies ahead leaves the cache as its load says."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import perfuse
from perfuse.build.streamed_copies import MARK, hinted

LARGE = torch.empty(2048, 8192, dtype=torch.bfloat16)
COPY = r"cp\.async\.c[ag]\.shared\.global\S* .*;"

PTX = """.visible .entry kernel0(
	.param .u64 kernel0_param_0
)
{
	.reg .b32 	%r<9>;
// %bb.0:
	.loc	1 1 17                          // <kernels>:1:17
	// begin inline asm
	cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
	// end inline asm
	cp.async.commit_group;
	.loc	1 2 17                          // <kernels>:2:17
	cp.async.ca.shared.global [ %r3 + 0 ], [ %rd2 + 0 ], 0x4, 0x4;
	ret;
}"""


def test_copies_of_marked_lines_get_the_hint() -> None:
    source = ["", f"t1 = tl.load(a0, {MARK})", "t2 = tl.load(a1)"]
    first, second = re.findall(COPY, hinted(PTX, source.__getitem__))
    assert first == (
        "cp.async.cg.shared.global.L2::cache_hint [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2, %streamed;"
    )
    assert second == "cp.async.ca.shared.global [ %r3 + 0 ], [ %rd2 + 0 ], 0x4, 0x4;"


def test_without_marks_nothing_changes() -> None:
    assert hinted(PTX, lambda number: "t1 = tl.load(a0)") is PTX


@pytest.mark.parametrize(
    "fn", [lambda x: x.abs().amax(), lambda x: x.sum(0)], ids=("all", "columns")
)
def test_pipelined_reductions_stream(fn: Callable[[Tensor], Tensor]) -> None:
    (graph,) = perfuse.codegen_for(fn, (LARGE,), target="cuda:90").graphs
    copies = re.findall(COPY, graph.assembly[0])
    assert copies
    assert all("L2::cache_hint" in copy for copy in copies)
    assert graph.assembly[0].count("createpolicy.fractional.L2::evict_first") == 1


def test_small_reductions_keep_the_cache() -> None:
    made = perfuse.codegen_for(lambda x: x.sum(0), (LARGE[:512],), target="cuda:90")
    copies = re.findall(COPY, made.graphs[0].assembly[0])
    assert copies
    assert not any("L2::cache_hint" in copy for copy in copies)
