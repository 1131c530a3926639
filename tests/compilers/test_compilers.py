"""A sample of the matrix: each compiler here builds every kind of kernel, with eager's values."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from perfuse import config
from perfuse.build.compiler import HEADERS
from perfuse.config import Settings
from perfuse.target import host_target, machine_isas
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


PAIRS = """
#include "perfuse_simd.h"
#include "simd_reduce.h"
#include "templates/gemm.h"
using namespace pf;
extern "C" void f(const bf16* a, const bf16* b, float* c, int64_t n) {
  gemm_pairs<32, 8>(Matrix<bf16>{a, n, 1}, Matrix<bf16>{b, 1, n}, n, n, n, 1,
    [=](const float* s, int64_t, int64_t, int64_t, int64_t, int64_t) { c[0] = s[0]; });
}
"""


@pytest.mark.skipif(
    not zig_command() or "avx512" not in machine_isas(), reason="no ziglang, or no AVX-512"
)
def test_zig_links_a_template_that_asks_for_an_instruction(tmp_path: Path) -> None:
    """Zig has none of the symbols behind `__builtin_cpu_supports`."""
    settings = Settings().with_overrides({"cpu.compiler": zig_command(), "cpu.simd": "avx512"})
    target = host_target(settings)
    (tmp_path / "pairs.cpp").write_text(PAIRS)
    command = [*target.compiler_command(), *target.cxx_flags(1), f"-I{HEADERS}", "-DPF_LANES=16"]
    # Calls of the runtime of threads are left open, as where a library is loaded.
    command += ["-shared", "pairs.cpp", "-o", "pairs.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
