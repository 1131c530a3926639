"""Sources -> built entries: shared libraries and bundles of GPU code, compiled in parallel.

Results are validated and cached before they are loaded. Nothing here needs a GPU or changes a
source.
"""

LIBRARY = "library.so"  # the shared library of a program, in its entry
UNIT_LIBRARY = "unit_library.so"  # the library of a host call, in its entry
