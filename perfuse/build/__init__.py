"""Sources -> built entries: shared libraries and bundles of GPU code, compiled in parallel.

Results are validated and cached before they are loaded. Nothing here needs a GPU, and no source is
changed on the way.
"""

from perfuse.build.compiler import LIBRARY, build_shared_library
from perfuse.build.loader import load_library

UNIT_LIBRARY = "unit_library.so"  # the library of a host call, in its entry

__all__ = ["LIBRARY", "UNIT_LIBRARY", "build_shared_library", "load_library"]
