"""Keys: everything that decides what an entry holds is in its key, and nothing else is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import perfuse
from perfuse import config
from perfuse.backends import backend_of
from perfuse.cache import keys
from perfuse.cache.keys import ALL_CODE, KINDS, PACKAGE, Kind, identity, key_of, own_files
from perfuse.cache.manifest import is_key
from perfuse.config import Settings
from perfuse.context import CPU, Context
from perfuse.counters import Counters
from perfuse.gpu import gpu_of_name
from perfuse.graph_cache import graph_key, load_or_compile
from perfuse.pipeline import plan_graph
from perfuse.target import Target, gpu_target, host_target

TOY = Kind("toy", 1, "a toy")

# What else settings may name, where the type alone does not tell a second value.
OTHER = {
    "triton.arch": "gfx942",
    "cpu.compiler": "clang++",
    "memory_budget": "1GiB",
    "max_autotune_gemm_backends": "ATEN",
    "verify": "memory",
}
ROWS = {row.name: row for row in config.describe()}
CODE = [name for name, row in ROWS.items() if row.changes_code]
PLAIN = [name for name, row in ROWS.items() if not row.changes_code]

# Rooms that decide what code is generated, and the settings they may read that change none of it.
GENERATING = ("ir", "graph", "lower", "schedule", "codegen", "autotune", "budget", "backends")
READ_ANYWAY = {
    "enabled": "whether a decision is stored, not what it is",
    "autotune_in_subproc": "where candidates run",
    "autotune_multi_device": "on how many devices candidates are measured",
    "benchmark_kernel": "what is logged",
    "compile_threads": "how many candidates are compiled at a time",
    "tune_seconds": "how long measuring may take: decisions depend on times anyway",
    "tune_timeout_s": "when a candidate is given up",
    "tune_worker_bytes": "when a candidate is given up",
    "over_budget": "whether a missed budget warns or raises",
}


def changed(name: str) -> Settings:
    """The default settings with another value of this one."""
    settings = Settings()
    if name in OTHER:
        return settings.with_overrides({name: OTHER[name]})
    kind, value = config._options()[name].kind, settings.get(name)
    if get_origin(kind) is Literal:
        return settings.with_overrides({name: next(c for c in get_args(kind) if c != value)})
    other: dict[type, Any] = {bool: not value, int: 2, str: "/elsewhere"}
    chosen = next(other[k] for k in (kind, *get_args(kind)) if k in other)
    return settings.with_overrides({name: chosen})


CPU_TARGET = host_target(Settings())
TARGETS = {"cpu": CPU_TARGET, "sm_90": gpu_target(Settings(), gpu_of_name("sm_90"))}


def context(settings: Settings, target: Target = CPU_TARGET) -> Context:
    return Context(target, settings, Counters(), CPU)


def generated(target: Target, settings: Settings) -> tuple[str, ...]:
    """The sources and the host program of a graph."""
    ctx, backend = context(settings, target), backend_of(target)
    plan = plan_graph(MODULE, ctx).plan
    sources = backend.generate(plan, ctx)
    return (*sources.texts, backend.host(plan, sources, ctx).text)


def traced() -> GraphModule:
    x = torch.ones(64, 300)
    return make_fx(lambda x: ((x * 2).softmax(-1), x @ x.t()), tracing_mode="fake")(x)


MODULE = traced()


def test_kinds_have_names_of_their_own_and_say_what_they_hold() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert all(kind.holds and kind.version >= 1 for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_code_of_a_kind_is_there(kind: Kind) -> None:
    assert all(own_files([pattern]) for pattern in kind.code)


def test_all_code_is_every_source_of_the_package() -> None:
    paths = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".h", ".cpp")]
    assert own_files(ALL_CODE) == sorted(str(path.relative_to(PACKAGE)) for path in paths)
    assert own_files(()) == []


def test_every_key_comes_from_the_one_function() -> None:
    """A key made by hand leaves out a version."""
    names = {kind.name for kind in KINDS}
    literals = [
        (path.name, node.value)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert not [row for row in literals if row[1].endswith("-") and row[1][:-1] in names]


def keys_around_toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The key of a toy, and of everything that differs from it in one thing."""
    yield key_of(TOY, "a", 1)
    yield key_of(replace(TOY, name="other"), "a", 1)
    yield key_of(replace(TOY, version=2), "a", 1)
    yield key_of(replace(TOY, code=("version.py",)), "a", 1)
    yield key_of(TOY, "a", 2)
    yield key_of(TOY, "a", "1")
    yield key_of(TOY, b"a", 1)
    yield key_of(TOY, "a")
    yield key_of(TOY, "a", 1, "")
    yield key_of(TOY, "a1")
    for name in ("VERSION", "FORMAT"):
        with monkeypatch.context() as patch:
            patch.setattr(keys, name, "another")
            yield key_of(TOY, "a", 1)


def test_a_key_holds_kind_format_version_code_and_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [key.partition("-")[2] for key in keys_around_toy(monkeypatch)]
    assert len(set(made)) == len(made)
    assert is_key(key_of(TOY, "a", 1)) and key_of(TOY, "a", 1).startswith("toy-")
    assert key_of(TOY, "a", 1) == key_of(replace(TOY, holds="another sentence"), "a", 1)


def test_an_edit_of_the_code_changes_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "PACKAGE", tmp_path)
    (tmp_path / "a.py").write_text("one")
    before = key_of(replace(TOY, code=("*.py",)))
    (tmp_path / "a.py").write_text("two")
    keys.code_digest.cache_clear()
    assert key_of(replace(TOY, code=("*.py",))) != before
    keys.code_digest.cache_clear()


def test_an_entry_of_another_format_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings().with_overrides({"cache.dir": str(tmp_path)})
    module = make_fx(lambda x: (x + 1,), tracing_mode="fake")(torch.ones(3))

    def counted() -> Counters:
        counters = Counters()
        ctx = replace(Context.default(settings), counters=counters)
        assert torch.equal(load_or_compile(module, ctx).call([torch.ones(3)])[0], torch.ones(3) + 1)
        return counters

    assert counted()["graph.cache_miss"] == 1
    assert counted()["graph.cache_hit"] == 1
    monkeypatch.setattr(keys, "GRAPH", replace(keys.GRAPH, version=keys.GRAPH.version + 1))
    newer = counted()
    assert newer["graph.cache_miss"] == 1 and newer["cache.damaged"] == 0
    monkeypatch.undo()
    assert counted()["graph.cache_hit"] == 1, "both formats can share a store"


@pytest.mark.parametrize("name", CODE)
def test_settings_that_change_code_are_in_the_key(name: str) -> None:
    assert changed(name).get(name) != Settings().get(name)
    assert identity(context(changed(name))) != identity(context(Settings()))
    assert graph_key(MODULE, context(changed(name))) != graph_key(MODULE, context(Settings()))


@pytest.mark.parametrize("name", PLAIN)
def test_other_settings_are_not(name: str) -> None:
    assert changed(name).get(name) != Settings().get(name)
    assert graph_key(MODULE, context(changed(name))) == graph_key(MODULE, context(Settings()))


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_other_settings_change_no_code(target: Target) -> None:
    code = generated(target, Settings())
    for name in PLAIN:
        assert generated(target, changed(name)) == code, name


def test_checking_stages_is_not_in_the_key_and_checking_memory_is() -> None:
    base = Settings()
    assert base.with_overrides({"verify": True}).cache_key() == base.cache_key()
    assert base.with_overrides({"verify": "memory"}).cache_key() != base.cache_key()


@pytest.mark.parametrize("room", GENERATING)
def test_generators_read_no_setting_that_is_not_in_the_key(room: str) -> None:
    plain = {name.rpartition(".")[2] for name in PLAIN} - READ_ANYWAY.keys()
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} reads {node.attr}"
        for path in (PACKAGE / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in plain
    ]
    assert not wrong, "\n".join(wrong)


def test_modes_share_the_cache_where_code_is_the_same() -> None:
    x = torch.randn(5, 7)

    def run(mode: str) -> None:
        torch._dynamo.reset()
        made = perfuse.compile(lambda x: x.sin() * 3, mode=mode, dynamic=False)(x)
        assert torch.allclose(made, x.sin() * 3)

    with perfuse.testing.fresh_cache():
        for first, second in (
            ("default", "reduce-overhead"),
            ("max-autotune", "max-autotune-no-cudagraphs"),
        ):
            run(first)
            perfuse.counters.clear()
            run(second)
            assert perfuse.counters["capture.cache_hit"] == 1, (first, second)
