"""A request in a module that takes a worker two seconds to import."""

from __future__ import annotations

import sys
import time

if sys.argv[0] == "-c":  # a worker
    time.sleep(2)


class Quick:
    """Answers at once."""

    def answer(self) -> float:
        return 1.0
