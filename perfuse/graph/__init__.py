"""FX graph -> FX graph: decompositions used while tracing, passes, and the forward/backward cut.

Each pass is a pure function with a file of its own; `passes.py` is their order. Nothing here knows
loops, kernels or sources, and no pass changes the graph it is given.
"""
