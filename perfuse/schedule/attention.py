"""Attention nodes as kernels of the plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from perfuse.ir.attention import Attention
from perfuse.ir.program import Program
from perfuse.schedule import arena
from perfuse.schedule.plan import Kernel, static_product


def attention_kernel(
    name: str, node: Attention, uses: Mapping[str, Collection[int]], program: Program
) -> Kernel:
    """The kernel that computes a node; unused results are not stored."""
    stored = frozenset(out for out in node.results if uses.get(out)) or frozenset(node.results[:1])
    made = Kernel(name, (), (), stored | set(node.mutates), attention=node)
    num_bytes = arena.kernel_bytes(made, program.buffers)
    return replace(made, num_bytes=num_bytes, num_flops=attention_flops(node))


def attention_flops(node: Attention) -> int:
    """Multiplications and additions as if nothing is masked; 0 where sizes are not known."""
    return sum(2 * (static_product(sizes) or 0) for sizes in node.products)
