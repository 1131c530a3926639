"""A soak: everything at once, for as long as asked for, and nothing may be wrong, lost or leaked.

    python -m tests.soak --minutes 30

Threads call compiled functions of changing sizes and scalars, functions are recompiled,
children are forked between the calls and compute too, artefacts are rewritten and loaded again at
one path, the cache is so small that entries are evicted all the time, and memory limits change.
Every result is compared with eager's; at the end, memory and descriptors must be what they were
after the warm-up.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

# Each worker compiles by itself: sharing cores between them is the point.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ["PERFUSE_CACHE_DIR"] = tempfile.mkdtemp(prefix="perfuse-soak-")

import torch

import perfuse

WARM_UP = 0.25  # of the time; what is held after it is what may be held at the end
SLACK_BYTES = 192 << 20
SLACK_FILES = 16


def body(x: torch.Tensor, w: torch.Tensor, scale: float) -> torch.Tensor:
    hidden = torch.softmax(x @ w * scale, -1) + x.flip(0)
    return torch.nn.functional.layer_norm(hidden, hidden.shape[-1:]).cumsum(0)


def made_of(expression: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function with code of its own, which Dynamo has never seen."""
    scope: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    exec(f"def fresh(x):\n    return {expression}\n", scope)
    return scope["fresh"]


class Gate:
    """Calls run beside each other; a fork waits for those under way and holds others back.

    Dynamo holds a lock, in C++, while it checks the guards of a compiled function, and PyTorch's
    generator one while it draws numbers. In a child that is forked meanwhile they stay locked:
    with every backend, and without any, the child waits for ever.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_calls = 0
        self._is_closed = False

    @contextmanager
    def call(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_closed)
            self._num_calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: self._num_calls == 0)
            try:
                yield
            finally:
                self._is_closed = False
                self._changed.notify_all()


class Soak:
    """The workers, what they did, and what went wrong."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.seed = seed
        self.done: Counter[str] = Counter()
        self.faults: list[str] = []
        self.stop = threading.Event()
        self.compiled = torch.compile(body, backend="perfuse", dynamic=None)
        self.turn = threading.Lock()  # Dynamo compiles one function at a time
        self.gate = Gate()

    def check(self, what: str, got: torch.Tensor, want: torch.Tensor) -> None:
        self.done[what] += 1
        if not torch.allclose(got, want, rtol=1e-3, atol=1e-3):
            self.faults.append(f"{what}: off by {(got - want).abs().max().item():.3g}")

    def call(self, rng: random.Random) -> None:
        n, m = rng.choice([3, 17, 128, 700]), rng.choice([8, 64, 300])
        given = torch.randn(n, m), torch.randn(m, m), rng.choice([0.1, 0.5, 1.0])
        self.check("call", self.compiled(*given), body(*given))

    def recompile(self, rng: random.Random) -> None:
        k = rng.randrange(1_000_000)
        fresh = made_of(f"(x * {k}).sin().sum(-1) + {k % 7}")
        x = torch.randn(rng.choice([5, 90, 600]), 512)
        with self.turn:
            made = torch.compile(fresh, backend="perfuse", dynamic=False)
            self.check("recompile", made(x), fresh(x))

    def train(self, rng: random.Random) -> None:
        x = torch.randn(rng.choice([4, 256]), 64, requires_grad=True)
        w = torch.randn(64, 64, requires_grad=True)
        got = torch.autograd.grad(self.compiled(x, w, 0.5).square().mean(), (x, w))
        want = torch.autograd.grad(body(x, w, 0.5).square().mean(), (x, w))
        for one, other in zip(got, want, strict=True):
            self.check("gradient", one, other)

    def fork(self, rng: random.Random) -> None:
        given = torch.randn(600, 300), torch.randn(300, 300), 0.5
        want = body(*given)
        self.compiled(*given)
        with self.gate.alone():
            child = os.fork()
        if child == 0:
            faulthandler.dump_traceback_later(60)
            torch.set_num_threads(1)
            right = all(torch.allclose(self.compiled(*given), want, atol=1e-3) for _ in range(3))
            os._exit(0 if right else 3)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                break
            time.sleep(0.02)
        else:
            os.kill(child, 9)
            os.waitpid(child, 0)
            status = -1
        self.done["fork"] += 1
        if status != 0:
            self.faults.append(f"fork: the child ended with {status}")

    def artefact(self, rng: random.Random) -> None:
        k, n = rng.randrange(1000), rng.choice([4, 300])
        shipped = made_of(f"(x + {k}).relu().cumsum(-1)")
        x = torch.randn(n, 256)
        with self.turn:
            path = perfuse.aot_compile(shipped, (x,), path=self.folder / "hot.perfuse")
            self.check("artefact", perfuse.load(path)(x), shipped(x))

    def limits(self, rng: random.Random) -> None:
        perfuse.config.cpu.pool_limit_bytes = rng.choice([0, 1 << 20, 64 << 20, 1 << 30])
        perfuse.release_memory()
        self.done["limits"] += 1

    def run(self, jobs: list[tuple[Callable[[random.Random], None], float]], number: int) -> None:
        rng = random.Random(self.seed * 1000 + number)
        # Dynamo has a configuration for each thread; beyond the limit it would run eagerly.
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.accumulated_recompile_limit = 1_000_000
        actions, weights = [job for job, _ in jobs], [weight for _, weight in jobs]
        while not self.stop.is_set():
            (action,) = rng.choices(actions, weights)
            is_forking = action == self.fork  # it waits for the others itself
            try:
                with nullcontext() if is_forking else self.gate.call():
                    action(rng)
            except Exception:
                self.faults.append(f"{action.__name__}: {traceback.format_exc(limit=-3)}")


def held() -> tuple[int, int]:
    """Bytes of memory and open descriptors of this process, garbage collected."""
    gc.collect()
    perfuse.release_memory()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    perfuse.config.cache.max_bytes = 8 << 20
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), given.seed)
        calls = [(soak.call, 8.0), (soak.train, 2.0)]
        rest = [(soak.recompile, 3.0), (soak.fork, 2.0), (soak.artefact, 2.0), (soak.limits, 1.0)]
        jobs = [calls] * given.threads + [rest]
        threads = [
            threading.Thread(target=soak.run, args=(job, k), daemon=True)
            for k, job in enumerate(jobs)
        ]
        for thread in threads:
            thread.start()
        time.sleep(60 * given.minutes * WARM_UP)
        before = held()
        end = time.monotonic() + 60 * given.minutes * (1 - WARM_UP)
        while time.monotonic() < end and not soak.faults:
            time.sleep(min(30.0, max(0.0, end - time.monotonic())))
            print(f"{dict(soak.done)}, held {held()[0] >> 20} MiB", flush=True)
        soak.stop.set()
        for thread in threads:
            thread.join(timeout=300)
            if thread.is_alive():
                soak.faults.append(f"{thread.name} hangs")
        after = held()
    print(f"done: {dict(soak.done)}")
    print(f"held: {before[0] >> 20} MiB, {before[1]} files -> {after[0] >> 20} MiB, {after[1]}")
    if after[0] > before[0] + SLACK_BYTES or after[1] > before[1] + SLACK_FILES:
        soak.faults.append("memory or descriptors leak")
    for fault in soak.faults[:10]:
        print(f"FAULT {fault}")
    return 1 if soak.faults else 0


if __name__ == "__main__":
    sys.exit(main())
