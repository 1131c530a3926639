"""A context that selects candidates, for every test of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

import perfuse
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.testing import fresh_cache


@pytest.fixture
def context() -> Iterator[Context]:
    """A context that selects, with an empty cache and counters of its own."""
    with fresh_cache(), perfuse.config.patch({"max_autotune": True}):
        yield replace(Context.default(), counters=Counters())
