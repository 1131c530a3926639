"""A sample of the matrix: each compiler here builds every kind of kernel, with eager's values."""

from __future__ import annotations

import pytest

from perfuse import config
from perfuse.config import Settings
from perfuse.target import host_target
from perfuse.testing import fresh_cache
from tests.compilers.compilers import found_compilers, zig_command
from tests.compilers.corpus import kernels_of_all_kinds

# One of each family: the default one is what all other tests use.
SAMPLE = [c for c in found_compilers() if c.startswith("clang")][-1:] + found_compilers()[-1:]


@pytest.mark.parametrize("compiler", list(dict.fromkeys(SAMPLE)))
def test_sample(compiler: str) -> None:
    with fresh_cache(), config.patch({"cpu.compiler": compiler, "cpu.opt_level": 2}):
        assert not kernels_of_all_kinds()


@pytest.mark.skipif(not zig_command(), reason="ziglang is not installed")
def test_zig_is_found_with_its_arguments_and_keeps_to_the_isa() -> None:
    settings = Settings().with_overrides({"cpu.compiler": zig_command(), "cpu.simd": "scalar"})
    target = host_target(settings)
    assert target.is_zig() and target.is_clang()
    assert target.compiler_command()[-3:] == ("-m", "ziglang", "c++")
    assert "-mcpu=baseline" in target.cxx_flags()
