"""Building and loading: one library per content, errors a reader can use, one OpenMP runtime."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from perfuse.build import LIBRARY
from perfuse.build.compiler import build_shared_library, library_key
from perfuse.build.loader import MAPS, load_library, mapped_openmp_runtimes
from perfuse.codegen.cpp.unit import LONG_UNIT, WIDE_UNIT
from perfuse.config import Settings
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.errors import CompilerFailed, CompilerMissing
from perfuse.system import Exited, System, replaced
from perfuse.target import cpu_features, find_compiler, host_target, parse_size, supported_isas

needs_compiler = pytest.mark.skipif(not find_compiler(""), reason="no C++ compiler")

COUNT = """
#define PF_LANES {lanes}
#include "perfuse_simd.h"
#include "simd_reduce.h"
extern "C" int {name}() {{
  int count = 0;
  pf::parallel(2, [&](int, int) {{ __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED); }});
  return count;
}}
"""


def unit(name: str) -> tuple[str, str]:
    return name, COUNT.format(name=name, lanes=host_target(Settings()).lanes)


def context(folder: Path, **cache: object) -> Context:
    settings = Settings().with_overrides({"cache": {"dir": str(folder / "cache"), **cache}})
    return Context(host_target(settings), settings, Counters())


@needs_compiler
@pytest.mark.parametrize("names", [("one",), ("one", "two", "three")], ids=len)
def test_builds_loads_and_hits(tmp_path: Path, names: tuple[str, ...]) -> None:
    ctx = context(tmp_path)
    units = [unit(name) for name in names]
    entry = build_shared_library(units, ctx)
    library = load_library(entry.read_bytes(LIBRARY))
    assert [getattr(library, name)() for name in names] == [2] * len(names)
    assert ctx.counters["build.kernels_compiled"] == len(names)
    assert ctx.counters["build.compiler_runs"] == (1 if len(names) == 1 else len(names) + 1)
    assert build_shared_library(units, ctx) == entry
    assert ctx.counters["build.cache_hit"] == 1
    assert ctx.counters["build.kernels_compiled"] == len(names)
    assert entry.read_text("one.cpp") == units[0][1]


class Listening(System):
    """The real system, which keeps the commands."""

    def __init__(self) -> None:
        self.commands: list[Sequence[str]] = []

    def spawn(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        timeout_s: float | None,
    ) -> Exited:
        self.commands.append(command)
        return super().spawn(command, folder, environment, timeout_s)


@needs_compiler
def test_units_of_long_kernels_are_compiled_at_a_lower_level(tmp_path: Path) -> None:
    units = [
        unit("kernels"),
        (f"{LONG_UNIT}0", unit("straight")[1]),
        (f"{WIDE_UNIT}0", unit("wide")[1]),
    ]
    with replaced(Listening()) as listening:
        entry = build_shared_library(units, context(tmp_path))
    assert isinstance(listening, Listening)
    levels = {
        word: [flag for flag in command if flag.startswith("-O")][-1]
        for command in listening.commands
        for word in command
        if word.endswith(".cpp")
    }
    lowered = {f"{name}0.cpp": "-O1" for name in (LONG_UNIT, WIDE_UNIT)}
    assert levels == {"kernels.cpp": "-O3", **lowered}
    assert load_library(entry.read_bytes(LIBRARY)).straight() == 2


@needs_compiler
def test_only_one_openmp_runtime_is_loaded(tmp_path: Path) -> None:
    library = load_library(
        build_shared_library([unit("alone")], context(tmp_path)).read_bytes(LIBRARY)
    )
    assert library.alone() == 2
    assert len(mapped_openmp_runtimes(MAPS.read_text())) == 1


@needs_compiler
def test_without_cache_everything_is_compiled(tmp_path: Path) -> None:
    ctx = context(tmp_path, enabled=False)
    for _ in range(2):
        entry = build_shared_library([unit("uncached")], ctx)
        assert load_library(entry.read_bytes(LIBRARY)).uncached() == 2
    assert ctx.counters["build.compiler_runs"] == 2
    assert not (tmp_path / "cache").exists()


@needs_compiler
def test_damaged_library_is_rebuilt(tmp_path: Path) -> None:
    first = context(tmp_path)
    folder = build_shared_library([unit("mended")], first).path
    assert folder is not None
    path = folder / LIBRARY
    path.write_bytes(bytes(path.stat().st_size))
    second = replace(first, counters=Counters())  # another store on the same folder
    rebuilt = build_shared_library([unit("mended")], second)
    assert load_library(rebuilt.read_bytes(LIBRARY)).mended() == 2
    assert second.counters["cache.damaged"] == 1


@needs_compiler
def test_failure_shows_command_output_and_source(tmp_path: Path) -> None:
    with pytest.raises(CompilerFailed, match="no_such_name") as caught:
        build_shared_library([("bad", "int x = no_such_name;")], context(tmp_path))
    error = caught.value
    assert "bad.cpp" in error.command
    assert error.source is not None
    assert error.source.read_text() == "int x = no_such_name;"


@needs_compiler
def test_failure_of_one_among_many(tmp_path: Path) -> None:
    with pytest.raises(CompilerFailed, match="no_such_name"):
        build_shared_library([unit("good"), ("bad", "int x = no_such_name;")], context(tmp_path))


def test_slow_compiler_is_given_up(tmp_path: Path) -> None:
    slow = tmp_path / "slow++"
    slow.write_text('#!/bin/sh\n[ "$1" = --version ] && echo slow++ 1 && exit\nexec sleep 30\n')
    slow.chmod(0o755)
    changes = {"cpu.compiler": str(slow), "build.timeout_s": 1, "cache.dir": str(tmp_path / "c")}
    with pytest.raises(CompilerFailed, match="timed out after 1 s"):
        build_shared_library([unit("slow")], Context.default(Settings().with_overrides(changes)))


def test_missing_compiler_says_what_to_install(tmp_path: Path) -> None:
    settings = Settings().with_overrides({"cpu.compiler": "no-such-compiler"})
    with pytest.raises(CompilerMissing, match=r"(?s)for no-such-compiler\).*apt-get install"):
        build_shared_library([unit("none")], Context.default(settings))


def test_missing_compiler_is_no_error_before_it_is_needed() -> None:
    settings = Settings().with_overrides({"cpu.compiler": "no-such-compiler"})
    assert host_target(settings).compiler == ""


def test_key_holds_sources_flags_and_compiler() -> None:
    settings = Settings()
    target = host_target(settings)
    base = library_key([unit("a")], target, settings)
    assert base == library_key([unit("a")], target, settings)
    slower = settings.with_overrides({"cpu.opt_level": 1})
    others = {
        library_key([unit("b")], target, settings),
        library_key([unit("a")], replace(target, compiler_version="other"), settings),
        library_key([unit("a")], replace(target, isa="scalar"), settings),
        library_key([unit("a")], target, slower),
    }
    assert len(others | {base}) == 5


def test_compiler_command_may_have_arguments() -> None:
    if shutil.which("env") is None:
        pytest.skip("no env")
    assert find_compiler("env g++").endswith("env g++")


def test_isas_follow_from_features() -> None:
    old = cpu_features("processor: 0\nflags\t\t: fpu sse2 avx\n")
    avx2 = old | {"avx2", "fma", "f16c", "bmi2"}
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    assert supported_isas("x86_64", old) == ("scalar",)
    assert supported_isas("x86_64", avx2) == ("avx2", "scalar")
    assert supported_isas("x86_64", avx512) == ("avx512", "avx2", "scalar")
    assert supported_isas("aarch64", frozenset()) == ("neon", "scalar")


def test_flags_never_change_arithmetic() -> None:
    for isa in ("avx512", "avx2", "scalar", "neon"):
        flags = replace(host_target(Settings()), isa=isa).cxx_flags()
        assert not {"-ffast-math", "-Ofast", "-march=native"} & set(flags)


@pytest.mark.parametrize(
    ("isa", "version", "moves"),
    [
        ("avx2", "g++ (Debian 12.2.0-14) 12.2.0", True),
        ("avx2", "g++ (Ubuntu 11.4.0-1ubuntu1~22.04) 11.4.0", False),
        ("avx2", "clang version 15.0.7", False),
        ("avx512", "g++ (GCC) 14.1.0", False),
    ],
)
def test_gcc_moves_whole_vectors_of_avx2(isa: str, version: str, moves: bool) -> None:
    target = replace(host_target(Settings()), isa=isa, compiler_version=version)
    assert ("-mmove-max=256" in target.cxx_flags()) == moves


def test_sizes_as_sysfs_writes_them() -> None:
    assert [parse_size(text) for text in ("32K\n", "1M", "77", "?")] == [32768, 1 << 20, 77, 0]
