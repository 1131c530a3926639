"""Sources -> Executable: run the compiler in parallel, keep what it made, load it."""

from perfuse.build.compiler import LIBRARY, build_shared_library
from perfuse.build.loader import load_library

__all__ = ["LIBRARY", "build_shared_library", "load_library"]
