"""An interpreter of gfx9 machine code (gfx942), to run AMD kernels in tests without an AMD GPU.

`assembly.py` reads the assembly that Triton assembles into a code object, `decode.py` turns each
instruction into a function over waves (`waves.py`), `machine.py` runs the workgroups of a launch,
and `launcher.py` is the backend through which whole Perfuse programs run on it.
"""
