"""Generated Triton is a product: a change of it is seen and meant.

`python -m tests.triton.goldens` rewrites the files; read the difference before it is kept.
"""

from __future__ import annotations

import pytest

from tests.triton.goldens import NAMES, golden_path, source_of


@pytest.mark.parametrize("name", NAMES)
def test_source_is_the_golden_one(name: str) -> None:
    assert source_of(name) == golden_path(name).read_text()


def test_the_same_bytes_every_time() -> None:
    assert source_of("sum_columns") == source_of("sum_columns")
