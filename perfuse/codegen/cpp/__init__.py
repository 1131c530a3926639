"""C++ kernels: a spelling of the Plan over a small vector header."""
