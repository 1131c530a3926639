"""Plan -> Triton kernels: Python text that Triton compiles for a GPU, and their launches.

Tiles come from the plan or from the model in `tiling.py`. Memory, order and fusion are the
plan's and may not be changed here; no GPU and no Triton is needed.
"""
