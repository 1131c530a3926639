"""Contractions as C++ functions: a matrix multiplication of `gemm.h` with the epilogue inside.

In: a kernel with a contraction, and the choice of a template. Out: the text of one function. The
multiplication itself is the header's; nothing here writes loops over its depth.
"""
