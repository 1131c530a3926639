"""The settings: reading, changing, refusing, and their part of the cache key."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest

from perfuse import config
from perfuse.config import CpuSettings, Settings, from_environment
from perfuse.errors import ConfigError, ConfigWarning, UnknownOption


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(config, "_process", [Settings()])
    yield


def test_module_reads_as_the_settings() -> None:
    assert config.cpu.simd == "auto"
    assert config.cache.enabled is True
    assert config.fallback_random is False
    assert config.snapshot() == Settings()


def test_patch_takes_names_dicts_and_nested_dicts() -> None:
    with config.patch({"cpu.simd": "avx2", "cpu": {"threads": 3}}, on_error="eager") as inside:
        assert (config.cpu.simd, config.cpu.threads, config.on_error) == ("avx2", 3, "eager")
        assert inside == config.snapshot()
    assert config.snapshot() == Settings()


def test_patch_nests_and_undoes_on_error() -> None:
    with config.patch(verify=True):
        with pytest.raises(RuntimeError), config.patch({"cpu.threads": 5}):
            assert config.verify and config.cpu.threads == 5
            raise RuntimeError
        assert config.verify and config.cpu.threads == 0


def test_patch_decorates() -> None:
    @config.patch({"cpu.opt_level": 1})
    def level(add: int) -> int:
        return int(config.cpu.opt_level) + add

    assert level(10) == 11
    assert level.__name__ == "level"
    assert config.cpu.opt_level == 3


def test_patch_decorates_coroutines() -> None:
    @config.patch(verify=True)
    async def inside() -> bool:
        await asyncio.sleep(0)
        return bool(config.verify)

    assert asyncio.run(inside())
    assert config.verify is False


def test_patch_refuses_what_it_would_not_reach() -> None:
    def steps() -> Iterator[bool]:
        yield config.verify

    class Suite:
        pass

    for decorated in (steps, Suite):
        with pytest.raises(ConfigError, match=decorated.__name__):
            config.patch(verify=True)(decorated)


def test_settings_are_attributes_like_others() -> None:
    assert hasattr(config, "verify") and not hasattr(config, "verfy")
    assert hasattr(config.cpu, "simd") and getattr(config.cpu, "smid", None) is None
    assert {"verify", "cpu", "patch"} <= set(dir(config))
    assert {"simd", "threads"} <= set(dir(config.cpu))


def test_patch_stays_in_its_thread() -> None:
    seen: list[bool] = []
    with config.patch(verify=True):
        thread = Thread(target=lambda: seen.append(config.verify))
        thread.start()
        thread.join()
    assert seen == [False]


def test_assignment_lasts_and_reaches_other_threads() -> None:
    config.fallback_random = True
    config.cpu.threads = 2
    seen: list[Any] = []
    thread = Thread(target=lambda: seen.extend([config.fallback_random, config.cpu.threads]))
    thread.start()
    thread.join()
    assert seen == [True, 2]


def test_assignment_inside_a_patch_ends_with_it() -> None:
    with config.patch(verify=True):
        config.max_autotune = True
        assert config.max_autotune
    assert not config.max_autotune


def test_a_group_can_be_assigned_whole() -> None:
    config.cpu = CpuSettings(threads=7)
    assert config.snapshot().cpu.threads == 7


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("cpu.smd", "cpu.simd"),
        ("falback_random", "fallback_random"),
        ("cache.max_byte", "cache.max_bytes"),
    ],
)
def test_unknown_names_suggest_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownOption, match=nearest) as caught:
        config.patch({name: 1})
    assert caught.value.nearest == nearest


def test_unknown_attributes_are_refused() -> None:
    with pytest.raises(UnknownOption):
        config.verfy = True
    with pytest.raises(UnknownOption):
        config.cpu.thread = 1
    with pytest.raises(UnknownOption):
        _ = config.verfy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("verify", 1),
        ("verify", "yes"),
        ("cpu.simd", "avx1024"),
        ("cpu.threads", True),
        ("cpu.threads", -1),
        ("cpu.threads", 2.0),
        ("cpu.opt_level", 4),
        ("on_error", None),
        ("cpu", 3),
        ("cpu.stream_store_bytes", "many"),
    ],
)
def test_wrong_values_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError):
        Settings().with_overrides({name: value})


def test_cache_key_holds_what_changes_the_code() -> None:
    base = Settings()
    assert base.cache_key() == Settings().cache_key()
    assert base.with_overrides({"cpu.simd": "scalar"}).cache_key() != base.cache_key()
    assert base.with_overrides({"fallback_random": True}).cache_key() != base.cache_key()
    plain = {"verify": True, "cpu.threads": 4, "cache.dir": "/x", "on_error": "eager"}
    assert base.with_overrides(plain).cache_key() == base.cache_key()


def test_environment_is_parsed_by_type() -> None:
    settings = from_environment(
        {
            "PERFUSE_CPU_SIMD": "avx2",
            "PERFUSE_VERIFY": "1",
            "PERFUSE_CACHE_DIR": "/somewhere",
            "PERFUSE_CACHE_ENABLED": "off",
            "PERFUSE_BUILD_JOBS": "3",
            "PERFUSE_CPU_STREAM_STORE_BYTES": "none",
            "PATH": "/bin",
        }
    )
    assert settings.cpu.simd == "avx2"
    assert settings.verify and not settings.cache.enabled
    assert settings.cache.dir == "/somewhere"
    assert settings.build.jobs == 3
    assert settings.cpu.stream_store_bytes is None


def test_environment_names_the_compiler() -> None:
    assert from_environment({"CXX": "clang++"}).cpu.compiler == "clang++"
    both = from_environment({"CXX": "clang++", "PERFUSE_CPU_COMPILER": "g++"})
    assert both.cpu.compiler == "g++"


@pytest.mark.parametrize(
    "environment",
    [
        {"PERFUSE_CPU_THREADS": "x"},
        {"PERFUSE_VERIFY": "?"},
        {"PERFUSE_CPU_SIMD": "mmx"},
        {"PERFUSE_CPU_OPT_LEVEL": "9"},
        {"PERFUSE_MEMORY_BUDGET": "1 parsec"},
    ],
)
def test_environment_mistakes_are_errors(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="PERFUSE_"):
        from_environment(environment)


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [("PERFUSE_CPU_SMD", "PERFUSE_CPU_SIMD"), ("PERFUSE_LOGS", "PERFUSE_LOG")],
)
def test_unknown_variables_warn_with_the_nearest(variable: str, nearest: str) -> None:
    with pytest.warns(ConfigWarning, match=f"{variable} .* did you mean {nearest}\\?"):
        settings = from_environment({variable: "avx2", "PERFUSE_VERIFY": "1"})
    assert settings == Settings(verify=True), "what is known is taken"


def test_the_variable_of_the_logs_is_known() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert from_environment({"PERFUSE_LOG": "fusion"}) == Settings()


def test_describe_has_a_sentence_for_every_setting() -> None:
    rows = {row.name: row for row in config.describe()}
    assert rows["cpu.grain_elements"].default == 32768
    assert rows["cpu.threads"].type == "int"
    assert all(row.sentence.endswith(".") for row in rows.values())
    assert all(Settings().get(name) == row.default for name, row in rows.items())


def test_types_are_described_as_users_write_them() -> None:
    kinds = {row.name: row.type for row in config.describe()}
    assert kinds["verify"] == "bool | 'memory'"
    assert kinds["memory_budget"] == "str | int | float | None"
    assert kinds["cpu.threads"] == "int" and kinds["on_error"] == "'raise' | 'eager'"
