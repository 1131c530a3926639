"""These programs run with their memory watched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import perfuse


@pytest.fixture(autouse=True)
def watched_memory() -> Iterator[None]:
    with perfuse.config.patch(verify="memory"):
        yield
