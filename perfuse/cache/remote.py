"""Decisions on a server that several machines share. Nothing about it may stop a compile.

Each request is bounded in time, whatever the backend does. A server that fails, or that has used up
its time allowance, is not asked for a while, after one warning. A document counts only if it
answers the very question that was asked, with one of the candidates of this process.
"""

import functools
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from perfuse import cache, config
from perfuse.cache.keys import decision_key
from perfuse.cache.redis_backend import RemoteCacheBackend
from perfuse.context import Context
from perfuse.decision import Decision, Question, answer_from
from perfuse.errors import MALFORMED, RemoteCacheWarning
from perfuse.forking import ForkLock
from perfuse.logs import channel

T = TypeVar("T")

NAMESPACE = "perfuse"
REQUEST_S = 1.0  # the most that one request may take
GRANTED_S = 5.0  # the most that all requests may take before the server counts as too slow
PAUSE_S = 300.0  # for which a server that failed is not asked

LOG = channel("tuning")


class Breaker:
    """Whether a server is asked: not after a failure, nor after it has cost too much time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = ForkLock()
        self._spent_s = 0.0
        self._closed_until = float("-inf")
        self._warned: set[str] = set()

    def is_asked(self) -> bool:
        """Whether to try the server now."""
        with self._lock:
            return self._clock() >= self._closed_until

    def run(self, request: Callable[[], T]) -> T:
        """Run a request within its time limit, which counts towards the server's allowance."""
        start = self._clock()
        try:
            return bounded(request, REQUEST_S)
        finally:
            with self._lock:
                self._spent_s += self._clock() - start

    def is_too_slow(self) -> bool:
        """Whether the server has used up its time."""
        with self._lock:
            return self._spent_s > GRANTED_S

    def stop(self, reason: str) -> None:
        """Do not ask the server for a while."""
        with self._lock:
            self._closed_until, self._spent_s = self._clock() + PAUSE_S, 0.0
        self.warn("unusable", f"the remote cache is not used for {PAUSE_S:.0f} s: {reason}")

    def warn(self, trouble: str, message: str) -> None:
        """Warn once of each kind of trouble; the log has all of it."""
        LOG.warning("%s", message)
        with self._lock:
            is_new = trouble not in self._warned
            self._warned.add(trouble)
        if is_new:
            warnings.warn(f"{message}; compiling continues", RemoteCacheWarning, stacklevel=6)


@functools.cache
def breaker_of(backend: object, url: str) -> Breaker:
    """The breaker of one server in this process."""
    return Breaker()


def bounded(request: Callable[[], T], timeout_s: float) -> T:
    """The result of a request, or TimeoutError when it takes too long.

    It runs in a thread that may be left behind, because resolving a host name cannot be cut short.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(request())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="perfuse-remote-cache", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    return results[0]


class RemoteDecisions:
    """Decisions behind a `RemoteCacheBackend`."""

    name = "remote"

    def __init__(self, context: Context) -> None:
        self._counters = context.counters
        self._url = context.settings.redis_url
        self._breaker = breaker_of(cache.RedisRemoteCacheBackend, self._url)

    def look_up(self, question: Question) -> Decision | None:
        """The shared decision, if there is one that fits."""
        name = decision_key(question)
        document = self._request(lambda backend: backend.get(name))
        if document is None:
            return None
        try:
            return answer_from(document, question)
        except MALFORMED as error:
            self._refuse(name, error)
            return None

    def remember(self, question: Question, decision: Decision) -> None:
        """Share a decision; where that fails, others will measure it too."""
        name, document = decision_key(question), decision.to_json()
        self._request(lambda backend: backend.put(name, document))

    def _request(self, ask: Callable[[RemoteCacheBackend], T]) -> T | None:
        """The server's answer; None where there is no usable one, for whatever reason."""
        if not self._breaker.is_asked():
            return None
        answer: T | None = None
        try:
            backend = self._backend()
            answer = self._breaker.run(lambda: ask(backend))
        except Exception as error:  # a backend may be third-party code, and none may stop a compile
            # A certificate that is refused is both, and is not about the document.
            if isinstance(error, ValueError) and not isinstance(error, OSError):
                self._refuse("a document", error)
            else:
                self._counters.inc("autotune.remote_failed")
                self._breaker.stop(f"{type(error).__name__}: {error}")
        if self._breaker.is_too_slow():
            self._counters.inc("autotune.remote_failed")
            self._breaker.stop("its answers are too slow")
        return answer

    def _backend(self) -> RemoteCacheBackend:
        # Looked up at each use, so that a user can assign another class.
        backend: Any = cache.RedisRemoteCacheBackend
        try:
            with config.patch(redis_url=self._url):
                made: RemoteCacheBackend = backend(NAMESPACE, is_autotune=True)
            return made
        except ValueError as error:
            raise ConnectionError(f"redis_url (PERFUSE_REDIS_URL): {error}") from error

    def _refuse(self, name: str, error: Exception) -> None:
        self._counters.inc("autotune.remote_refused")
        detail = f"{type(error).__name__}: {error}"[:300]
        self._breaker.warn("refused", f"{name} of the remote cache is not used: {detail}")
