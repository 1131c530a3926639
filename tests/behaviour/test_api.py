"""The public names: compile, config, explain, aot_compile, testing, counters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import perfuse
from perfuse.target import machine_isas
from tests.behaviour.row import randn
from tests.behaviour.scripts import LOAD, finish, start
from tests.harness.compare import assert_as_good_as_eager

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def function(x: Tensor) -> Tensor:
    return F.gelu(x * 2).softmax(-1)


@pytest.fixture(autouse=True)
def reset() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", (None, *MODES))
def test_compile_in_every_mode(mode: str | None) -> None:
    x = randn(8, 16)
    got = perfuse.compile(function, mode=mode)(x)
    assert_as_good_as_eager(got, function(x), function(x.double()))


def test_compile_as_decorator_takes_options() -> None:
    @perfuse.compile(dynamic=True, fullgraph=True, options={"cpu.threads": 1})
    def decorated(x: Tensor) -> Tensor:
        return x.exp()

    x = randn(5)
    assert_as_good_as_eager(decorated(x), x.exp(), x.double().exp())


def test_unknown_mode_suggests_the_nearest() -> None:
    with pytest.raises(perfuse.PerfuseError, match="max-autotune"):
        perfuse.compile(function, mode="max-autotun")


def test_unknown_option_suggests_the_nearest() -> None:
    with pytest.raises(perfuse.PerfuseError, match="fallback_random"):
        perfuse.compile(function, options={"fallback_randm": True})(randn(3))


def test_backend_works_by_name() -> None:
    x = randn(4, 5)
    got = torch.compile(function, backend="perfuse")(x)
    assert_as_good_as_eager(got, function(x), function(x.double()))


def test_explain_shows_every_room() -> None:
    def mixed(x: Tensor) -> Tensor:
        return torch.linalg.svdvals(function(x)) + 1

    text = str(perfuse.explain(mixed, randn(6, 6)))
    for word in ("kernel", "bytes", "flops", "svd"):
        assert word in text.lower(), f"{word} is missing in\n{text}"


def test_ahead_of_time_round_trip_in_a_new_process(tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    path = tmp_path / "artefact"
    perfuse.aot_compile(function, (x,), path=path)
    result = finish(start(LOAD, tmp_path / "other-cache", str(path)))
    assert_as_good_as_eager(torch.tensor(result["values"]), function(x), function(x.double()))
    assert result["counters"].get("build.compiler_runs", 0) == 0


def test_run_and_get_code() -> None:
    x = randn(16, 32)
    with perfuse.testing.fresh_cache():
        got, sources = perfuse.testing.run_and_get_code(
            torch.compile(function, backend="perfuse"), x
        )
    assert_as_good_as_eager(got, function(x), function(x.double()))
    assert sources and all(isinstance(s, str) for s in sources)


def test_run_and_get_code_leaves_others_compiled() -> None:
    """No function is recompiled, and the one that is looked at keeps its own options."""
    other = torch.compile(lambda x: x.sin() * 3, backend="perfuse")
    guarded = torch.compile(function, backend="perfuse", options={"verify": True})
    x = randn(16, 32)
    for compiled in (other, guarded):
        compiled(x)
    with perfuse.testing.fresh_cache():
        first, second = (perfuse.testing.run_and_get_code(guarded, x)[1] for _ in range(2))
        assert first and first == second
    before = perfuse.counters.snapshot()
    for compiled in (other, guarded):
        compiled(x)
    assert perfuse.counters.snapshot() == before


def test_the_same_program_gives_the_same_source() -> None:
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        with perfuse.testing.fresh_cache():
            candidate = torch.compile(function, backend="perfuse")
            found.append(perfuse.testing.run_and_get_code(candidate, randn(16, 32))[1])
    assert found[0] == found[1]


def test_rand_strided() -> None:
    x = perfuse.testing.rand_strided((3, 4), (1, 5), torch.float16)
    assert (x.shape, x.stride(), x.dtype) == ((3, 4), (1, 5), torch.float16)
    assert x.float().std() > 0


def test_counters_count_and_clear() -> None:
    perfuse.counters.clear()
    with perfuse.testing.fresh_cache():
        torch.compile(function, backend="perfuse")(randn(7, 11))
    assert perfuse.counters["schedule.kernels"] == 1
    assert perfuse.counters["build.cache_miss"] > 0
    perfuse.counters.clear()
    assert perfuse.counters.snapshot() == {}


def test_fresh_cache_leaves_nothing_behind() -> None:
    with perfuse.testing.fresh_cache():
        perfuse.counters.clear()
        torch.compile(function, backend="perfuse")(randn(3, 19))
    torch._dynamo.reset()
    with perfuse.testing.fresh_cache():
        torch.compile(function, backend="perfuse")(randn(3, 19))
    assert perfuse.counters["build.cache_hit"] == 0


def test_a_broken_compiler_names_the_command() -> None:
    patch = perfuse.config.patch({"cpu.compiler": "false"})
    with perfuse.testing.fresh_cache(), patch, pytest.raises(Exception, match="false"):
        torch.compile(function, backend="perfuse")(randn(5, 23))


def test_a_broken_compiler_can_run_eagerly() -> None:
    x = randn(5, 29)
    patch = perfuse.config.patch({"cpu.compiler": "false", "on_error": "eager"})
    with perfuse.testing.fresh_cache(), patch, pytest.warns(UserWarning):
        got = torch.compile(function, backend="perfuse")(x)
    assert torch.equal(got, function(x))


MISTAKES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"mode": 5}, "a mode must be a string, got 5"),
    ({"mode": ["max-autotune"]}, "a mode must be a string"),
    ({"options": ["freeze"]}, "options must be a mapping"),
    ({"options": "freeze"}, "options must be a mapping"),
    ({"options": {"max_autotune_gemm_backends": "ATEN CPP"}}, "unknown backend in .* 'ATEN CPP'"),
    ({"options": {"max_autotune_gemm_backends": ""}}, "names no backend"),
    ({"options": {"cpu.simd": "neon" if "avx2" in machine_isas() else "avx2"}}, "does not have"),
    ({"options": {"triton.arch": "sm_banana"}}, "unknown GPU 'sm_banana'"),
)


@pytest.mark.parametrize(("how", "message"), MISTAKES, ids=str)
def test_mistakes_are_reported_before_the_first_call(how: dict[str, Any], message: str) -> None:
    with pytest.raises(perfuse.ConfigError, match=message) as raised:
        perfuse.compile(function, **how)
    assert raised.value.hint


def test_a_patch_takes_a_mapping() -> None:
    with pytest.raises(perfuse.ConfigError, match="settings must be a mapping, got 'freeze'"):
        perfuse.config.patch("freeze")  # type: ignore[arg-type]


def test_code_for_a_gpu_takes_a_tuple_of_arguments() -> None:
    with pytest.raises(perfuse.ConfigError, match="arguments must be a tuple, got a Tensor"):
        perfuse.codegen_for(function, torch.ones(4), target="cuda:90")  # type: ignore[arg-type]
