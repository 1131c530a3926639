"""Plan -> C++ kernels over a small vector library without includes (the `.h` files).

Text goes out, one function per distinct kernel. Memory, order and fusion are decided by the plan
and must not be changed here.
"""
