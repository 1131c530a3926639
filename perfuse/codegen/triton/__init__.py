"""Plan -> Triton kernels: Python text that Triton compiles for a GPU, and their launches.

Tiles come from the plan or from the model in `tiling.py`. Memory, order and fusion are decided by
the plan and must not be changed here; neither a GPU nor Triton is needed.
"""
