"""One cache for all tests of Composable Kernel: each instance is compiled once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from perfuse import config


@pytest.fixture(scope="session")
def ck_cache(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """One folder for all processes of a run: xdist gives each a folder inside that of the run."""
    own = tmp_path_factory.getbasetemp()
    return (own if worker_id == "master" else own.parent) / "ck_cache"


@pytest.fixture(autouse=True)
def shared_cache(ck_cache: Path) -> Iterator[None]:
    with config.patch({"cache.dir": str(ck_cache)}):
        yield
