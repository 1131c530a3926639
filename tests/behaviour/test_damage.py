"""Entries that are whole by their checksums and still do not work: dropped and built again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from perfuse.autotune import matmuls
from perfuse.build import loader
from perfuse.cache.access import open_store
from perfuse.config import Settings
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.decision import Decision, library
from perfuse.errors import MALFORMED, CacheDamaged
from perfuse.graph_cache import load_or_compile
from perfuse.system import replaced
from perfuse.target import find_compiler, host_target
from tests.harness.faults import Double

pytestmark = pytest.mark.skipif(not find_compiler(""), reason="no C++ compiler")
X = torch.linspace(-1, 1, 12).reshape(3, 4)


def function(x: Tensor) -> Tensor:
    return (x * 2 + 1).relu().sum(-1)


MODULE = make_fx(lambda x: (function(x),), tracing_mode="fake")(X)


def context(cache: Path) -> Context:
    settings = Settings().with_overrides({"cache.dir": str(cache), "cpu.threads": 1})
    return Context(host_target(settings), settings, Counters())


@pytest.fixture(autouse=True)
def quick_compiler() -> Iterator[None]:
    with replaced(Double()):
        yield


def run(ctx: Context) -> Tensor:
    loader._loaded.clear()
    return load_or_compile(MODULE, ctx).call([X])[0]


def replace(cache: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change one file wherever it is, and what the manifest says of it."""
    for file in cache.rglob(name):
        data = change(file.read_bytes())
        file.write_bytes(data)
        manifest = json.loads((file.parent / "manifest.json").read_text())
        row = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest["files"][name] = row
        (file.parent / "manifest.json").write_text(json.dumps(manifest))


def edited(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps({**json.loads(data), **changes}).encode()


def edited_host(**changes: Any) -> Callable[[bytes], bytes]:
    def edit(data: bytes) -> bytes:
        document = json.loads(data)
        document["host"] |= changes
        return json.dumps(document).encode()

    return edit


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "a library of zeros": ("library.so", lambda data: bytes(len(data))),
    "half a library": ("library.so", lambda data: data[: len(data) // 2]),
    "an empty library": ("library.so", lambda data: b""),
    "no document": ("program.json", lambda data: b""),
    "not text": ("program.json", lambda data: b"\xff\xfe"),
    "a list": ("program.json", lambda data: b"[]"),
    "nested": ("program.json", lambda data: b"[" * 100_000),
    "no host": ("program.json", edited(host=None)),
    "a library that is none": ("program.json", edited(built=["../../../etc"])),
    "a library that is a number": ("program.json", edited(built=3)),
    "constants of nothing": ("program.json", edited(constants=[{"name": "x"}])),
    "counts that are none": ("program.json", edited(counts=[1])),
    "a text that is no Python": ("program.json", edited_host(text="def call(:")),
    "a text without a call": ("program.json", edited_host(text="pass")),
    "an op that is none": ("program.json", edited_host(ops=["aten.no_such.default"])),
    "a segment that is none": ("program.json", edited_host(segments=["segment77"])),
    "a field too many": ("program.json", edited_host(surprise=1)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_entry_that_does_not_work_is_built_again(tmp_path: Path, damage: str) -> None:
    run(context(tmp_path))
    replace(tmp_path, *DAMAGES[damage])
    mended = context(tmp_path)
    assert torch.equal(run(mended), function(X))
    assert mended.counters["cache.damaged"] > 0
    after = context(tmp_path)
    assert torch.equal(run(after), function(X))
    assert after.counters["graph.cache_hit"] == 1 and after.counters["cache.damaged"] == 0


DECISIONS = (b"", b"[]", b"\xff", b"{}", b'{"chosen": 1}', b"[" * 100_000, b'{"a": {}}')
OLDER = b'{"chosen": "aten.mm.out", "milliseconds": {}, "reason": ""}'
WRONG_CHOICE = json.dumps(Decision("", library("aten.no_such"), (), "").to_json()).encode()


@pytest.mark.parametrize("data", [*DECISIONS, OLDER, WRONG_CHOICE], ids=range(9))
def test_a_decision_that_is_none_is_taken_again(
    tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = context(tmp_path)
    problem = matmuls.CpuMatmul(512, 512, 512, (512, 1), (512, 1), False)
    made = Decision("a test", library("aten.mm.out"), (), "no race in this test")
    monkeypatch.setattr(matmuls, "race", lambda *args, **kwargs: made)
    decision = matmuls.decide(problem, ctx)
    assert decision.chosen == made.chosen
    replace(tmp_path, "decision.json", lambda _: data)
    again = context(tmp_path)
    assert matmuls.decide(problem, again) == decision
    assert again.counters["cache.damaged"] == 1
    assert again.counters["autotune.matmuls_measured"] == 1
    assert matmuls.decide(problem, context(tmp_path)) == decision


@pytest.mark.parametrize("data", [b"", b"\xff", b"[" * 100_000, b"9" * 10_000, b"{"])
def test_documents_that_are_none(tmp_path: Path, data: bytes) -> None:
    entry = open_store(context(tmp_path)).put("key", {"a": data})
    with pytest.raises(CacheDamaged):
        entry.read_json("a")
    assert not issubclass(CacheDamaged, MALFORMED)
