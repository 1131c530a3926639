"""Contractions as C++ functions: a matrix multiplication of `gemm.h` with the epilogue inside.

In: a kernel with a contraction, and the choice of a template; or one of attention. Out: the text of
one function. The multiplication itself is in the headers; nothing here writes loops over its depth.
"""
