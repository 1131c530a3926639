"""A matmul and an instance of AMD's Composable Kernel (CK) -> the C++ source that launches it.

Comes in: sizes, strides and types of a matmul, and rows of template arguments. Goes out: why an
instance is not legal, an order of those that are, and a source for each. Nothing here compiles,
measures or looks at the machine.
"""
