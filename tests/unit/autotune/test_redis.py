"""Decisions on a real Redis server: shared, and never in the way of a compile."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from ssl import SSLCertVerificationError
from typing import Any

import pytest

from perfuse.autotune.stored import stored_or_measured
from perfuse.cache import remote
from perfuse.cache.keys import decision_key
from perfuse.cache.remote import GRANTED_S, REQUEST_S, RemoteDecisions, breaker_of
from perfuse.cache.resp import RedisAddress
from perfuse.context import Context
from perfuse.decision import Decision, Question
from perfuse.errors import RemoteCacheWarning
from tests.harness.redis_server import RedisServer, redis_server, server_program
from tests.unit.autotune.questions import FIRST, SECOND, context, decision, question

pytestmark = pytest.mark.skipif(server_program() is None, reason="no Redis server")
ASKED = question()
NAME = f"{remote.NAMESPACE}:autotune:{decision_key(ASKED)}"


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    breaker_of.cache_clear()
    shared_server.send("FLUSHALL")
    return shared_server


def on(server: RedisServer, folder: Path, **overrides: Any) -> Context:
    """A machine with a store of its own that shares decisions on this server."""
    given = {"autotune_remote_cache": True, "redis_url": server.url}
    return context(folder, **{**given, **overrides})


def decided(ctx: Context, asked: Question = ASKED) -> Decision:
    return stored_or_measured(asked, "here", ctx, lambda: decision(asked), "autotune.measured")


def test_a_decision_is_measured_once_for_all_machines(server: RedisServer, tmp_path: Path) -> None:
    machines = [on(server, tmp_path / str(k)) for k in range(4)]
    assert [decided(m).chosen for m in machines] == [SECOND] * 4
    assert [m.counters["autotune.measured"] for m in machines] == [1, 0, 0, 0]
    assert [m.counters["autotune.remote_hit"] for m in machines] == [0, 1, 1, 1]


def test_a_shared_decision_is_kept_locally(server: RedisServer, tmp_path: Path) -> None:
    decided(on(server, tmp_path / "a"))
    decided(on(server, tmp_path / "b"))
    server.send("FLUSHALL")
    again = on(server, tmp_path / "b")
    decided(again)
    assert again.counters["autotune.local_hit"] == 1
    assert server.send("DBSIZE") == 0, "and what is found locally is not sent again"


def test_what_is_shared_is_a_document_that_expires(server: RedisServer, tmp_path: Path) -> None:
    decided(on(server, tmp_path))
    value = server.send("GET", NAME)
    assert isinstance(value, bytes) and json.loads(value) == json.loads(
        json.dumps(decision(ASKED).to_json() | {"subject": "here"})
    )
    lifetime = server.send("TTL", NAME)
    assert isinstance(lifetime, int) and lifetime > 86400


def test_other_questions_are_not_answered(server: RedisServer, tmp_path: Path) -> None:
    decided(on(server, tmp_path / "a"))
    other = on(server, tmp_path / "b")
    for change in ({"device": "another"}, {"versions": ()}, {"problem": "p"}, {"rules": "r"}):
        decided(other, question(**change))
    assert other.counters["autotune.measured"] == 4 and not other.counters["autotune.remote_hit"]


@pytest.mark.parametrize("user", ["", "default"])
def test_a_server_with_a_password(tmp_path: Path, user: str) -> None:
    with redis_server(tmp_path, password="secret") as server:
        url = server.url.replace("//:", f"//{user}:")
        first = on(server, tmp_path / "a", redis_url=f"{url}/3")
        second = on(server, tmp_path / "b", redis_url=f"{url}/3")
        decided(first), decided(second)
        assert second.counters["autotune.remote_hit"] == 1
        for wrong in (f"redis://127.0.0.1:{server.port}", f"redis://:no@127.0.0.1:{server.port}"):
            refused = on(server, tmp_path / "c", redis_url=wrong, autotune_local_cache=False)
            with pytest.warns(RemoteCacheWarning, match="NOAUTH|WRONGPASS") as told:
                assert decided(refused).chosen == SECOND
            assert "secr" not in str(told[0].message)


RUBBISH = (
    b"",
    b"\xff\xfe",
    b"[]",
    b"null",
    b"3",
    b"{}",
    b"[" * 100_000,
    b'{"format": 1}',
    b'{"format": 99, "subject": "", "rivals": [], "chosen": {}, "reason": ""}',
    json.dumps(decision(question("another problem")).to_json()).encode(),
    json.dumps(decision(ASKED).to_json() | {"chosen": 5}).encode(),
    json.dumps(decision(ASKED).to_json() | {"reason": {"a": 1}}).encode(),
    json.dumps(decision(ASKED).to_json() | {"rivals": [{"choice": 1}]}).encode(),
    json.dumps(decision(ASKED).to_json()).encode().replace(b'"_linear', b'"_other', 1)[:-9],
    json.dumps(
        decision(ASKED).to_json()
        | {"chosen": {"source": "library", "name": "aten.rm_rf", "options": []}}
    ).encode(),
    b"x" * (1 << 20),
)


@pytest.mark.parametrize("value", RUBBISH, ids=range(len(RUBBISH)))
def test_rubbish_is_measured_again_and_replaced(
    server: RedisServer, tmp_path: Path, value: bytes
) -> None:
    server.send("SET", NAME, value)
    ctx = on(server, tmp_path, autotune_local_cache=False)
    with pytest.warns(RemoteCacheWarning, match="is not used"):
        assert decided(ctx).chosen == SECOND
    assert ctx.counters["autotune.measured"] == ctx.counters["autotune.remote_refused"] == 1
    assert decided(ctx).chosen == SECOND and ctx.counters["autotune.remote_hit"] == 1


def test_a_key_of_another_type(server: RedisServer, tmp_path: Path) -> None:
    server.send("RPUSH", NAME, "a", "b")
    ctx = on(server, tmp_path)
    with pytest.warns(RemoteCacheWarning, match="WRONGTYPE"):
        assert decided(ctx).chosen == SECOND
    assert decided(on(server, tmp_path / "b")).chosen == SECOND


def test_a_document_that_is_too_large_is_not_shared(server: RedisServer, tmp_path: Path) -> None:
    asked = question("p" * (1 << 19))
    ctx = on(server, tmp_path)
    with pytest.warns(RemoteCacheWarning, match="bytes, more than"):
        assert decided(ctx, asked).chosen == SECOND
    assert server.send("DBSIZE") == 0


def test_a_server_without_room(server: RedisServer, tmp_path: Path) -> None:
    server.send("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.warns(RemoteCacheWarning, match="OOM"):
            assert decided(on(server, tmp_path)).chosen == SECOND
    finally:
        server.send("CONFIG", "SET", "maxmemory", "0")


def test_a_server_that_is_killed(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        ctx = on(server, tmp_path / "a", autotune_local_cache=False)
        assert decided(ctx).chosen == SECOND
        server.kill()
        start = time.monotonic()
        with pytest.warns(RemoteCacheWarning) as told:
            for k in range(50):
                assert decided(ctx, question(f"problem {k}")).chosen == SECOND
        assert len(told) == 1 and ctx.counters["autotune.remote_failed"] == 1
        assert time.monotonic() - start < 10


def test_a_server_that_hangs(server: RedisServer, tmp_path: Path) -> None:
    ctx = on(server, tmp_path, autotune_local_cache=False)
    decided(ctx)
    with server.stopped():
        start = time.monotonic()
        with pytest.warns(RemoteCacheWarning) as told:
            for k in range(50):
                assert decided(ctx, question(f"problem {k}")).chosen == SECOND
        assert len(told) == 1 and time.monotonic() - start < REQUEST_S + 10
    breaker_of.cache_clear()  # some minutes later
    assert decided(ctx).chosen == SECOND and ctx.counters["autotune.remote_hit"] == 1


@pytest.mark.parametrize("url", ["", "http://localhost", "redis://", "redis://h:port", "x"])
def test_an_address_that_is_none(tmp_path: Path, url: str) -> None:
    breaker_of.cache_clear()
    ctx = context(tmp_path, autotune_remote_cache=True, redis_url=url)
    with pytest.warns(RemoteCacheWarning, match="PERFUSE_REDIS_URL"):
        assert decided(ctx).chosen == SECOND


def test_a_pause_ends(server: RedisServer, tmp_path: Path, monkeypatch: Any) -> None:
    now = [0.0]
    breaker = remote.Breaker(lambda: now[0])
    monkeypatch.setattr(remote, "breaker_of", lambda *_: breaker)
    ctx = on(server, tmp_path)
    with pytest.warns(RemoteCacheWarning):
        breaker.stop("a test")
    stores = RemoteDecisions(ctx)
    stores.remember(ASKED, decision(ASKED, FIRST))
    assert server.send("DBSIZE") == 0 and not breaker.is_asked()
    now[0] += remote.PAUSE_S
    stores.remember(ASKED, decision(ASKED, FIRST))
    found = stores.look_up(ASKED)
    assert found is not None and found.chosen == FIRST


def test_slow_answers_add_up(tmp_path: Path, monkeypatch: Any) -> None:
    now = [0.0]
    breaker = remote.Breaker(lambda: now[0])
    monkeypatch.setattr(remote, "breaker_of", lambda *_: breaker)

    class Slow:
        def __init__(self, key: str, is_autotune: bool = False) -> None:
            pass

        def get(self, filename: str) -> None:
            now[0] += 0.4 * REQUEST_S

        def put(self, filename: str, data: Any) -> None:
            now[0] += 0.4 * REQUEST_S

    monkeypatch.setattr("perfuse.cache.RedisRemoteCacheBackend", Slow)
    ctx = context(tmp_path, autotune_remote_cache=True)
    with pytest.warns(RemoteCacheWarning, match="too slow"):
        for k in range(100):
            decided(ctx, question(f"problem {k}"))
    assert now[0] < GRANTED_S + 2 * REQUEST_S


class Failing:
    """A backend of somebody else's that goes wrong in every way."""

    error: Exception = RuntimeError("a bug")

    def __init__(self, key: str, is_autotune: bool = False) -> None:
        assert key and is_autotune

    def get(self, filename: str) -> Any:
        raise self.error

    def put(self, filename: str, data: Any) -> None:
        raise self.error


ERRORS = (RuntimeError("x"), KeyError("x"), OSError(5, "x"), ValueError("x"))


@pytest.mark.parametrize("error", [*ERRORS, SSLCertVerificationError(1, "x")], ids=repr)
def test_errors_of_a_backend_do_not_reach_the_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    breaker_of.cache_clear()
    monkeypatch.setattr(Failing, "error", error)
    monkeypatch.setattr("perfuse.cache.RedisRemoteCacheBackend", Failing)
    with pytest.warns(RemoteCacheWarning):
        assert decided(context(tmp_path, autotune_remote_cache=True)).chosen == SECOND


def test_nothing_is_asked_unless_the_setting_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perfuse.cache.RedisRemoteCacheBackend", Failing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decided(context(tmp_path)).chosen == SECOND


def test_addresses() -> None:
    address = RedisAddress.parse("rediss://me:p%40ss@example.org:7000/2")
    assert address == RedisAddress("example.org", 7000, 2, "me", "p@ss", True)
    assert "p@ss" not in f"{address} {address!r}"
    assert RedisAddress.parse("redis://h") == RedisAddress("h", 6379)
