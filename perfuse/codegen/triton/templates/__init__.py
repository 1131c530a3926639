"""Contractions in Triton: text of matmul kernels with holes for operands, sizes and epilogues.

A kernel with a contraction and the choice of a template come in, `KernelText` goes out. Which
template computes it, if any, is decided by the plan, not here.
"""
