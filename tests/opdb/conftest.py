"""These programs run with their memory watched, and are compiled quickly: they are many."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import perfuse


@pytest.fixture(autouse=True)
def watched_memory() -> Iterator[None]:
    # Other folders show what the compiler's last level does to kernels of every kind.
    with perfuse.config.patch({"verify": "memory", "cpu.opt_level": 1}):
        yield
