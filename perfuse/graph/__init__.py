"""FX graph -> FX graph: decompositions used while tracing, passes, and the forward/backward cut.

Each pass is a pure function with a file of its own; `passes.py` is their order. Nothing here knows
about loops, kernels or sources, and no pass modifies its input graph.
"""
