"""ATen graph -> Program: one small function per op; start at `graph.lower_graph`.

Ops become formulas, loops, matmuls or library calls. Nothing here decides which loops share a
kernel, and nothing is removed from the graph: ops without a lowering stay ATen calls.
"""
