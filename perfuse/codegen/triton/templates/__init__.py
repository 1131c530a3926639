"""Contractions in Triton: text of matmul kernels with holes for operands, sizes and epilogues.

A kernel with a contraction and the choice of a template come in, `KernelText` goes out; which
template is chosen, and whether at all, is the plan's.
"""
