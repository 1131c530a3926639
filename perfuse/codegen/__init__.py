"""Plan -> sources: `cpp/` and `triton/` write kernels, `host/` the program that launches them.

The same plan, target and settings give the same bytes. Nothing here compiles, runs or measures
code, or changes a plan.
"""
