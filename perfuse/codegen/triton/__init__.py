"""Triton kernels: the Plan's kernels as Python text that Triton compiles for a GPU."""
