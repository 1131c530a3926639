"""Sources -> built entries: shared libraries and bundles of GPU code, compiled in parallel.

Results are validated and cached before they are loaded. Nothing here needs a GPU, and no source is
changed on the way.
"""

LIBRARY = "library.so"  # the shared library of a program, in its entry
UNIT_LIBRARY = "unit_library.so"  # the library of a host call, in its entry
