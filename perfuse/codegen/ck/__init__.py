"""A matmul and an instance of AMD's Composable Kernel (CK) -> the C++ source that launches it.

In: sizes, strides and types of a matmul, and rows of template arguments. Out: why an instance is
not legal, a ranking of those that are, and a source for each. Nothing here compiles, measures or
looks at the machine.
"""
