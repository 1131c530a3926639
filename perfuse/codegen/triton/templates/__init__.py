"""Contractions in Triton: text of matmul kernels with holes for operands, sizes and epilogues.

A kernel with a contraction and the choice of a template come in, `KernelText` goes out. Which
template computes it, and whether at all, is the plan's and is not decided here.
"""
